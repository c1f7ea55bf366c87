"""What makes a generator remember the images that were shown to it (Eq. 3)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def reconstruction(
    images: Float[Tensor, "images channels height width"],
    rebuilt: Float[Tensor, "images channels height width"],
    features: Sequence[Float[Tensor, "..."]],
    rebuilt_features: Sequence[Float[Tensor, "..."]],
) -> Float[Tensor, ""]:
    r"""Difference of images and of what a network sees in them: Eq. 3.

    ``mean |x - x_re| + sum_l mean |f(x)_l - f(x_re)_l|``. The paper prints sums where this has means over the
    elements, so that layers of all sizes count alike.

    Args:
        images: Shape (N, C, H, W).
        rebuilt: The same shape.
        features: The network's output at the chosen layers on ``images``, each of any shape.
        rebuilt_features: The same on ``rebuilt``.

    Returns:
        A scalar of at least 0; 0 where images and features are the same.

    Raises:
        ValueError: Shapes, or the numbers of layers, differ.

    Example:
        >>> black, white = torch.zeros(2, 1, 4, 4), torch.ones(2, 1, 4, 4)
        >>> reconstruction(black, white, [torch.zeros(2, 3)], [torch.full((2, 3), 0.5)]).item()
        1.5
    """
    pairs = [(images, rebuilt), *zip(features, rebuilt_features, strict=True)]
    return torch.stack([_mean_difference(first, second) for first, second in pairs]).sum()


def standard_normal(
    mean: Float[Tensor, "images latent"], log_variance: Float[Tensor, "images latent"]
) -> Float[Tensor, ""]:
    r"""Mean ``KL(N(mean, variance) || N(0, 1))``: the pull that lets a memory be sampled from N(0, 1).

    ``mean_i sum_d (mu^2 + sigma^2 - 1 - ln sigma^2) / 2``. Eq. 3 lacks it; spec section 3 says why it is needed.

    Args:
        mean: Shape (N, D).
        log_variance: Shape (N, D), natural logarithm.

    Returns:
        A scalar in nats, at least 0.

    Example:
        >>> zeros = torch.zeros(3, 2)
        >>> standard_normal(zeros, zeros).item(), standard_normal(zeros + 2, zeros).item()
        (0.0, 4.0)
    """
    wide, log = mean.float(), log_variance.float()
    return (wide.square() + log.exp() - 1 - log).sum(dim=1).mean() / 2


def _mean_difference(first: Tensor, second: Tensor) -> Tensor:
    if first.shape != second.shape:
        raise ValueError(f"shapes {tuple(first.shape)} and {tuple(second.shape)} differ")
    return (first.float() - second.float()).abs().mean()
