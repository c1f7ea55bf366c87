"""Run a network with the statistics of the batch in place of its running statistics."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from modelfence.masking.unwrap import require_network


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalize by running statistics which somebody could re-estimate."""
    return [
        module
        for module in require_network(model).modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
    ]


def has_batch_norm(model: nn.Module) -> bool:
    """Say whether a model keeps running BatchNorm statistics (timm's and synchronized variants included).

    Args:
        model: Any module.

    Returns:
        True when at least one BatchNorm layer has running statistics; layer and group norm don't count.

    Example:
        >>> has_batch_norm(nn.Sequential(nn.BatchNorm2d(3))), has_batch_norm(nn.LayerNorm(3))
        (True, False)
    """
    return bool(batch_norms(model))


class BatchStatistics(TorchFunctionMode):
    """Inside this context BatchNorm normalizes by the batch; no flag and no buffer of the network is touched.

    This is the forward pass of somebody who re-estimates the running statistics on the images at hand
    (AdaBN); two-mode learning runs the student in it. With several processes the statistics are those of the joint
    batch, and gradients flow through them.

    Args:
        world: Number of processes that share a batch.

    Example:
        >>> norm = torch.nn.BatchNorm1d(1).eval()
        >>> with BatchStatistics():
        ...     norm(torch.tensor([[1.0], [3.0]])).round().tolist()
        [[-1.0], [1.0]]
        >>> norm.running_mean.tolist()
        [0.0]
    """

    def __init__(self, world: int = 1) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls of ``batch_norm``; everything else passes."""
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        del running_mean, running_var, training, momentum
        if self.world == 1:
            return F.batch_norm(input, None, None, weight, bias, training=True, momentum=0.0, eps=eps)
        return _joint_batch_norm(input, weight, bias, eps)


def _joint_batch_norm(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Batch normalization by the mean and the biased variance over all processes."""
    axes = [axis for axis in range(values.ndim) if axis != 1]
    shape = [1, -1] + [1] * (values.ndim - 2)
    wide = values.float()
    count = _joint_sum(wide.new_full((), values.numel() // values.shape[1]))
    mean = _joint_sum(wide.sum(axes)) / count
    centred = wide - mean.reshape(shape)
    variance = _joint_sum(centred.square().sum(axes)) / count
    result = centred * torch.rsqrt(variance + eps).reshape(shape)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result.to(values.dtype)


class _JointSum(torch.autograd.Function):
    """Sum over processes; the gradient is summed over processes too."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *grads: Any) -> Tensor:
        total: Tensor = grads[0].contiguous().clone()
        torch.distributed.all_reduce(total)
        return total


def _joint_sum(value: Tensor) -> Tensor:
    result: Tensor = _JointSum.apply(value)
    return result
