"""Random styles, geometric and photometric, that turn images into those of other domains without any learning."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfence.errors import InputError
from modelfence.synthesis.draws import normal, order, uniform, whole
from modelfence.synthesis.random_convolution import random_convolution, stretch
from modelfence.synthesis.warp import warp

Style = Callable[[Tensor, torch.Generator], Tensor]
"""From images (N, C, H, W) on the scale 0..1 and a source of randomness to images of the same shape and scale."""

GROUP = 16
"""Images in a row that get the same styles."""

_SIDE = 32  # pixels, for which the lengths below are given


def blur(images: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian blur; a standard deviation of 0.5 to 1.5 pixels of 32, and of half a pixel at least."""
    return _blurred(images, _unit(images) * _number(generator, 0.5, 1.5))


def affine(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn by up to 20 degrees, zoom, shear and shift, every image by its own amounts."""
    return warp(images, generator, turn=20, zoom=(0.8, 1.2), shear=0.2, shift=0.1)


def thicken(images: Tensor, generator: torch.Generator) -> Tensor:
    """Grow what is bright by 1 pixel of 32, blended with the original: dilation."""
    return torch.lerp(images, _dilated(images, _unit(images)), _number(generator, 0.5, 1))


def thin(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shrink what is bright by 1 pixel of 32, blended with the original: erosion."""
    eroded = 1 - _dilated(1 - images, _unit(images))
    return torch.lerp(images, eroded, _number(generator, 0.5, 1))


def pixelate(images: Tensor, generator: torch.Generator) -> Tensor:
    """Coarse pixels; at 32 pixels of 2 to 4."""
    factor = _unit(images) * whole(generator, 2, 4)
    height, width = (max(2, math.ceil(side / factor)) for side in images.shape[2:])
    return F.interpolate(F.adaptive_avg_pool2d(images, (height, width)), size=images.shape[2:], mode="nearest")


def sharpen(images: Tensor, generator: torch.Generator) -> Tensor:
    """Add 1 to 4 times the difference from a blurred copy."""
    return (images + _number(generator, 1, 4) * (images - _blurred(images, _unit(images)))).clamp(0, 1)


def zoom_out(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shrink to 50 to 85 % of the size; the border is repeated around."""
    return warp(images, generator, zoom=(0.5, 0.85), shift=0.05)


def color(images: Tensor, generator: torch.Generator) -> Tensor:
    """Scale and shift every channel of every image by its own amounts."""
    gain, offset = (
        uniform(generator, *images.shape[:2], 1, 1, low=low, high=high, device=images.device)
        for low, high in ((0.3, 1.2), (-0.3, 0.5))
    )
    return (images * gain + offset).clamp(0, 1)


def contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Scale every image's distance from its mean, to between 0.2 and 0.7 or 1.3 and 3 times."""
    low, high = ((0.2, 0.7), (1.3, 3.0))[whole(generator, 0, 1)]
    factor = uniform(generator, len(images), 1, 1, 1, low=low, high=high, device=images.device)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (mean + (images - mean) * factor).clamp(0, 1)


def invert(images: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG001 (all styles look alike)
    """Exchange dark and bright."""
    return 1 - images


def noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise of a standard deviation of 0.05 to 0.25."""
    drawn = normal(generator, *images.shape, device=images.device)
    return (images + _number(generator, 0.05, 0.25) * drawn).clamp(0, 1)


def background(images: Tensor, generator: torch.Generator) -> Tensor:
    """Put the content on a smooth random background: the difference of both, or a blend."""
    cells = whole(generator, 1, 8)
    drawn = uniform(generator, *images.shape[:2], cells, cells, device=images.device)
    behind = F.interpolate(drawn, size=images.shape[2:], mode="bilinear", align_corners=False)
    if whole(generator, 0, 1):
        return (images - behind).abs()
    return torch.lerp(images, behind, _number(generator, 0.3, 0.7))


def filtered(images: Tensor, generator: torch.Generator) -> Tensor:
    """Filter every image with a random kernel of its own and stretch the result to 0..1."""
    return stretch(random_convolution(images, generator))


def grey(images: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG001 (all styles look alike)
    """Replace every channel by the mean of all."""
    return images.mean(dim=1, keepdim=True).expand_as(images).clone()


def binarize(images: Tensor, generator: torch.Generator) -> Tensor:
    """Black where the mean of the channels is below a threshold near the image's mid-range, white elsewhere."""
    means = images.mean(dim=1, keepdim=True)
    darkest, brightest = means.amin(dim=(2, 3), keepdim=True), means.amax(dim=(2, 3), keepdim=True)
    share = uniform(generator, len(images), 1, 1, 1, low=0.3, high=0.7, device=images.device)
    return (means > torch.lerp(darkest, brightest, share)).to(images.dtype).expand_as(images).clone()


GEOMETRIC: Mapping[str, Style] = MappingProxyType(
    {
        "blur": blur,
        "affine": affine,
        "thicken": thicken,
        "thin": thin,
        "pixelate": pixelate,
        "sharpen": sharpen,
        "zoom_out": zoom_out,
    }
)
PHOTOMETRIC: Mapping[str, Style] = MappingProxyType(
    {
        "color": color,
        "contrast": contrast,
        "invert": invert,
        "noise": noise,
        "background": background,
        "random_convolution": filtered,
        "grey": grey,
        "binarize": binarize,
    }
)
STYLES: Mapping[str, Style] = MappingProxyType({**GEOMETRIC, **PHOTOMETRIC})


def random_style(images: Tensor, generator: torch.Generator, count: tuple[int, int] = (1, 3)) -> Tensor:
    """Apply random styles of :data:`STYLES`, one after the other.

    Every 16 images in a row get the same styles, whose strengths differ within them where that is cheap. Shuffle
    the images first if neighbours belong together.

    Args:
        images: (N, C, H, W) on the scale 0..1, at least 8 x 8 pixels.
        generator: The source of randomness; the result depends on its state and on the images alone.
        count: Smallest and largest number of different styles.

    Returns:
        The same shape, on the scale 0..1.

    Raises:
        InputError: ``count`` isn't an increasing pair from 1 to the number of styles.

    Example:
        >>> styled = random_style(torch.rand(4, 3, 16, 16), torch.Generator().manual_seed(0))
        >>> styled.shape, bool(styled.min() >= 0), bool(styled.max() <= 1)
        (torch.Size([4, 3, 16, 16]), True, True)
    """
    usable = [style for name, style in STYLES.items() if name != "grey" or images.shape[1] > 1]
    least, most = count
    if not 1 <= least <= most <= len(usable):
        raise InputError(f"random style: count is {count}; two numbers from 1 to {len(usable)}, the smaller first")
    groups = []
    for group in torch.split(images, GROUP):
        styled = group
        for index in order(generator, len(usable))[: whole(generator, least, most)]:
            styled = usable[index](styled, generator)
        groups.append(styled.clamp(0, 1))  # rounding
    return torch.cat(groups)


def _number(generator: torch.Generator, low: float, high: float) -> float:
    return float(uniform(generator, 1, low=low, high=high))


def _unit(images: Tensor) -> float:
    """Return how many pixels stand for one pixel of an image of 32."""
    return min(images.shape[2:]) / _SIDE


def _blurred(images: Tensor, deviation: float) -> Tensor:
    half = min(max(1, math.ceil(2.5 * deviation)), min(images.shape[2:]) - 1)
    offsets = torch.arange(-half, half + 1, device=images.device, dtype=images.dtype)
    weights = torch.softmax(-(offsets**2) / (2 * max(deviation, 0.5) ** 2), dim=0)
    channels = images.shape[1]
    rows = weights.view(1, 1, 1, -1).expand(channels, 1, 1, -1)
    padded = F.pad(images, (half,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, rows, groups=channels), rows.transpose(2, 3), groups=channels)


def _dilated(images: Tensor, radius: float) -> Tensor:
    half = max(1, round(radius))
    return F.max_pool2d(images, 2 * half + 1, stride=1, padding=half)
