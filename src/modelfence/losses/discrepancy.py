"""Maximum mean discrepancy: how far two sets of features are apart, as a whole and class by class (Eq. 6)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BANDWIDTHS = 5
_FEWEST = 2  # samples of a class that say something about its spread


def gaussian_mmd(first: Float[Tensor, "first features"], second: Float[Tensor, "second features"]) -> Float[Tensor, ""]:
    r"""Squared maximum mean discrepancy with a sum of five Gaussian kernels.

    ``mean k(a, a') + mean k(b, b') - 2 mean k(a, b)`` over all pairs, those of a sample with itself included (the
    biased estimate), with ``k(a, b) = sum_{i=0..4} exp(-|a - b|^2 / (2^i h / 4))`` and ``h`` the mean squared distance
    of two different samples of both sets together, without gradient. NTL (ICLR 2022) uses it on flattened features.

    Args:
        first: Shape (N, D), N at least 1.
        second: Shape (M, D), M at least 1.

    Returns:
        A scalar, 0 (the same samples) to 10; computed in float32 also under autocast.

    Raises:
        ValueError: A set is empty.

    Example:
        >>> one, two = torch.tensor([[0.0], [1.0]]), torch.tensor([[5.0], [6.0], [7.0]])
        >>> round(gaussian_mmd(one, one).item(), 4)
        0.0
        >>> round(gaussian_mmd(one, two).item(), 4)
        6.4839
    """
    if not len(first) or not len(second):
        raise ValueError(f"{len(first)} and {len(second)} samples: each set needs at least one")
    joint = torch.cat([first.float(), second.float()])
    distances = _squared_distances(joint)
    count = len(joint)
    bandwidth = (distances.detach().sum() / (count * count - count) / 4).clamp_min(torch.finfo(torch.float32).tiny)
    kernel = torch.stack([torch.exp(-distances / (bandwidth * 2**i)) for i in range(_BANDWIDTHS)]).sum(dim=0)
    cut = len(first)
    return kernel[:cut, :cut].mean() + kernel[cut:, cut:].mean() - 2 * kernel[:cut, cut:].mean()


def class_mmd(
    first: Float[Tensor, "images features"], second: Float[Tensor, "images features"], labels: Int[Tensor, " images"]
) -> Float[Tensor, ""]:
    r"""Mean over classes of the squared discrepancy of their features: Eq. 6.

    ``mean_k MMD^2(z^k, z'^k)`` over the classes with at least two images in the batch; the others are left out (spec
    section 4).

    Args:
        first: Shape (N, D), features of images.
        second: Shape (N, D), features of the same images in another style.
        labels: Shape (N,), the class of each, at least 0.

    Returns:
        A scalar of at least 0; 0, with a gradient of zero, when no class has two images.

    Example:
        >>> first = torch.tensor([[0.0], [1.0], [9.0]])
        >>> class_mmd(first, first + 1, torch.tensor([0, 0, 1])).item() > 0
        True
        >>> class_mmd(first, first + 1, torch.tensor([0, 1, 2])).item()
        0.0
    """
    classes = (torch.bincount(labels) >= _FEWEST).nonzero().flatten()
    if not len(classes):
        return 0 * (first.float().sum() + second.float().sum())
    each = [gaussian_mmd(first[labels == one], second[labels == one]) for one in classes]
    return torch.stack(each).mean()


def _squared_distances(samples: Tensor) -> Tensor:
    """Return |a - b|^2 of all pairs (N, N), from one product of matrices."""
    centred = samples - samples.detach().mean(dim=0)  # distances stay, and rounding is relative to the spread
    with torch.autocast(samples.device.type, enabled=False):
        products = centred @ centred.T
    norms = products.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * products).clamp_min(0)
    return distances.masked_fill(torch.eye(len(samples), dtype=torch.bool, device=samples.device), 0)
