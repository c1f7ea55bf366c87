"""How far images are from what a network was trained on, told by its BatchNorm layers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class BatchNormDistance(TorchFunctionMode):
    """Inside this context every BatchNorm layer compares the batch with its running statistics.

    The running statistics describe the images that the network was trained on; images that match them at every layer
    look like those to the network (DeepInversion, CVPR 2020, uses the sum of norms; here the distances are relative
    to the spread, so that layers and networks count alike). No flag and no buffer is touched.

    Attributes:
        layers: One distance a layer that was run, a scalar, differentiable in the images.

    Example:
        >>> norm = torch.nn.BatchNorm1d(1).eval()
        >>> with BatchNormDistance() as found:
        ...     _ = norm(torch.tensor([[1.0], [3.0]]))
        >>> found.total().item()
        4.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at calls of ``batch_norm``; every call passes unchanged."""
        if func is F.batch_norm:
            self._compare(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _compare(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *_: Any, **__: Any
    ) -> None:
        if running_mean is None or running_var is None:
            return
        self.layers.append(relative_distance(*channel_moments(input), running_mean, running_var.sqrt()))

    def total(self) -> Tensor:
        """Return the mean over the layers, a scalar of at least 0.

        Raises:
            ValueError: No layer with running statistics was run.
        """
        if not self.layers:
            raise ValueError("no BatchNorm layer with running statistics was run")
        return torch.stack(self.layers).mean(0)


def channel_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (biased) of every channel over a batch, each float32 (C,).

    Args:
        values: Shape (N, C, ...).
    """
    wide = values.float()
    axes = [axis for axis in range(values.ndim) if axis != 1]
    variance, mean = torch.var_mean(wide, dim=axes, correction=0)
    return mean, (variance + 1e-8).sqrt()


def relative_distance(mean: Tensor, deviation: Tensor, true_mean: Tensor, true_deviation: Tensor) -> Tensor:
    """Return the squared distance of means and deviations over the mean variance, a scalar.

    Args:
        mean: Shape (C,).
        deviation: Shape (C,), standard deviations.
        true_mean: Shape (C,), what they should be.
        true_deviation: Shape (C,).

    Example:
        >>> one = torch.ones(2)
        >>> relative_distance(2 * one, one, one, one).item()
        1.0
    """
    scale = true_deviation.square().mean() + 1e-12
    return ((mean - true_mean).square() + (deviation - true_deviation).square()).mean() / scale
