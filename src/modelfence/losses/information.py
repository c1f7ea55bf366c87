"""Mutual information between the features of an image and of its restyled copy, bounded from above (Eq. 5)."""

import math

from jaxtyping import Float
from torch import Tensor


def club(
    mean: Float[Tensor, "images features"],
    log_variance: Float[Tensor, "images features"],
    codes: Float[Tensor, "images features"],
) -> Float[Tensor, ""]:
    r"""Contrastive log-ratio upper bound of the mutual information: Eq. 5 (CLUB, ICML 2020).

    ``mean_i [ln q(z'_i | z_i) - mean_j ln q(z'_j | z_i)]`` with ``q(. | z_i)`` a Gaussian with diagonal covariance.
    Normalizations cancel, and ``mean_j (z'_j - mu_i)^2`` is variance plus squared distance from the mean of the codes,
    so that nothing larger than (N, D) is needed.

    Args:
        mean: Shape (N, D), the mean of ``q(. | z_i)``.
        log_variance: Shape (N, D), its natural logarithm of variances.
        codes: Shape (N, D), the z'.

    Returns:
        A scalar in nats; an upper bound only as far as q fits (see :func:`gaussian_nll`), and then at least 0.

    Example:
        >>> import torch
        >>> mean = torch.tensor([[-1.0], [1.0]])
        >>> club(mean, torch.zeros(2, 1), mean).item()  # told exactly: large
        1.0
        >>> club(torch.zeros(2, 1), torch.zeros(2, 1), mean).item()  # q knows nothing of z
        0.0
    """
    wide, centre = codes.float(), mean.float()
    own = (wide - centre).square()
    average = wide.mean(dim=0)
    any_other = (wide - average).square().mean(dim=0) + (average - centre).square()
    return ((any_other - own) * (-log_variance.float()).exp()).sum(dim=1).mean() / 2


def gaussian_nll(
    mean: Float[Tensor, "images features"],
    log_variance: Float[Tensor, "images features"],
    codes: Float[Tensor, "images features"],
) -> Float[Tensor, ""]:
    r"""Mean of ``-ln q(z'_i | z_i)``: minimized over q, it makes :func:`club` a bound.

    ``mean_i sum_d [(z' - mu)^2 / sigma^2 + ln sigma^2 + ln 2 pi] / 2``.

    Args:
        mean: Shape (N, D).
        log_variance: Shape (N, D), natural logarithm.
        codes: Shape (N, D).

    Returns:
        A scalar in nats, of either sign (densities).

    Example:
        >>> import torch
        >>> round(gaussian_nll(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 1)).item(), 4)
        0.9189
    """
    log = log_variance.float()
    each = (codes.float() - mean.float()).square() * (-log).exp() + log + math.log(2 * math.pi)
    return each.sum(dim=1).mean() / 2
