"""Copies of images under random small convolutions: the same content, another texture."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfence.synthesis.draws import uniform
from modelfence.synthesis.warp import warp

_LARGEST = 5  # pixels, of a kernel
_INVERTED = 0.2  # share of the copies


def random_convolution_copies(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return one copy of every image, slightly warped and randomly filtered.

    A small random affine map; a random convolution (see :func:`random_convolution`) blended with the warped image by
    U(0, 1); the result stretched to 0..1; one copy in five inverted.

    Args:
        images: (N, C, H, W) on the scale 0..1.
        generator: The source of randomness.

    Returns:
        The same shape, on the scale 0..1.

    Example:
        >>> copies = random_convolution_copies(torch.rand(4, 3, 16, 16), torch.Generator().manual_seed(0))
        >>> copies.shape, copies.min().item(), copies.max().item()
        (torch.Size([4, 3, 16, 16]), 0.0, 1.0)
    """
    warped = warp(images, generator, turn=12, zoom=(0.85, 1.15), shear=0.1, shift=0.06)
    filtered = random_convolution(warped, generator)
    share, drawn = (uniform(generator, len(images), 1, 1, 1, device=images.device) for _ in range(2))
    stretched = stretch(torch.lerp(warped, filtered, share.to(images.dtype)))
    return torch.where(drawn < _INVERTED, 1 - stretched, stretched)


def random_convolution(images: Tensor, generator: torch.Generator) -> Tensor:
    """Filter every image with a random kernel of its own, of 1, 3 or 5 pixels (RandConv, ICLR 2021).

    Args:
        images: (N, C, H, W).
        generator: Draws sizes and weights: N(0, 1 / (C k^2)) over all channels.

    Returns:
        The same shape; values of any size, see :func:`stretch`.

    Example:
        >>> random_convolution(torch.rand(4, 3, 16, 16), torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 16, 16])
    """
    count, channels, height, width = images.shape
    device = generator.device
    half = torch.randint(0, _LARGEST // 2 + 1, (count, 1, 1), generator=generator, device=device)
    offset = (torch.arange(_LARGEST, device=device) - _LARGEST // 2).abs()
    inside = torch.maximum(offset[:, None], offset[None, :]) <= half  # (N, 5, 5)
    deviation = inside / (channels * (2 * half + 1).square()).sqrt()
    drawn = torch.randn(count, channels, channels, _LARGEST, _LARGEST, generator=generator, device=device)
    kernels = (drawn * deviation[:, None, None]).to(images.device, images.dtype)
    padded = F.pad(images, (_LARGEST // 2,) * 4, mode="replicate")
    filtered = F.conv2d(padded.view(1, count * channels, *padded.shape[2:]), kernels.flatten(0, 1), groups=count)
    return filtered.view(count, channels, height, width)


def stretch(images: Tensor) -> Tensor:
    """Bring every image to the scale 0..1: its darkest value becomes 0, its brightest 1.

    Args:
        images: (N, C, H, W), values of any size.

    Returns:
        The same shape; an image of one value becomes black.

    Example:
        >>> stretch(torch.tensor([[[[-1.0, 0.0, 3.0]]]])).tolist()
        [[[[0.0, 0.25, 1.0]]]]
    """
    darkest, brightest = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    return (images - darkest) / (brightest - darkest).clamp_min(1e-6)
