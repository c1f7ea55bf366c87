"""Random affine maps of images."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfence.synthesis.draws import uniform


def warp(
    images: Tensor,
    generator: torch.Generator,
    *,
    turn: float = 0.0,
    zoom: tuple[float, float] = (1.0, 1.0),
    shear: float = 0.0,
    shift: float = 0.0,
    padding: Literal["zeros", "border", "reflection"] = "border",
) -> Tensor:
    """Turn, zoom, shear and shift every image by amounts of its own.

    Args:
        images: (N, C, H, W).
        generator: Draws the amounts, uniformly.
        turn: Largest angle in degrees, either way.
        zoom: Smallest and largest size of the content relative to what it was.
        shear: Largest slant, either way.
        shift: Largest displacement as a share of the image's side, either way.
        padding: What lies beyond the border.

    Returns:
        The same shape; bilinear, so no value leaves the range of the input.

    Example:
        >>> image = torch.rand(1, 1, 4, 4)
        >>> bool(torch.allclose(warp(image, torch.Generator()), image, atol=1e-5))
        True
    """
    count, device = len(images), images.device
    angle, slant, right, down = (
        uniform(generator, count, low=-most, high=most, device=device)
        for most in (math.radians(turn), shear, 2 * shift, 2 * shift)  # images are 2 units wide
    )
    scale = 1 / uniform(generator, count, low=zoom[0], high=zoom[1], device=device)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    matrix = torch.stack([cos, slant * cos - sin, right, sin, slant * sin + cos, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, padding_mode=padding, align_corners=False)
