"""Content without data: drawn strokes, and the way in to shapes and textures."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError, nearest
from modelfence.synthesis.draws import uniform
from modelfence.synthesis.shapes import draw_shapes
from modelfence.synthesis.textures import draw_textures

Kind = Literal["strokes", "shapes", "textures", "mixed"]

_CHUNK = 12_288  # pixels drawn at once: the largest tensor stays in the cache
_STROKES = 4  # of an image, at most
_POINTS = 17  # of a stroke
_GRID = 64  # cells a side on which distances are measured
_COLOURED = 0.5  # share of images that aren't white on black
_LEAST_CONTRAST = 0.4


def draw(count: int, image: ImageSpec, generator: torch.Generator, kind: Kind = "mixed") -> Tensor:
    """Draw images from nothing but random numbers.

    Args:
        count: How many, at least 1.
        image: Their channels and size.
        generator: The source of randomness; the result depends on its state alone.
        kind: "strokes": one to four connected or loose lines, curves and arcs, half of them white on black;
            "shapes": ellipses, rectangles and triangles that hide each other; "textures": noise with a spectrum
            of natural images, and gratings; "mixed": every image one of the three.

    Returns:
        (count, C, H, W), float32 on the scale 0..1, on the generator's device.

    Raises:
        InputError: ``count`` is below 1, or the kind is unknown.

    Example:
        >>> spec = ImageSpec(channels=1, height=28, width=28, mean=(0.5,), std=(0.5,))
        >>> images = draw(3, spec, torch.Generator().manual_seed(0), kind="strokes")
        >>> images.shape, images.min().item()
        (torch.Size([3, 1, 28, 28]), 0.0)
    """
    if count < 1:
        raise InputError(f"drawn images: count is {count}; at least 1 is needed")
    if kind not in get_args(Kind):
        known = get_args(Kind)
        raise InputError(f"drawn images: kind {kind!r} isn't known; use {', '.join(known)}.{nearest(kind, known)}")
    if kind != "mixed":
        return _in_chunks(_DRAW[kind], count, image, generator)
    drawn = torch.randint(len(_DRAW), (count,), generator=generator, device=generator.device)
    images = torch.empty(count, *image.shape, device=generator.device)
    for index, one in enumerate(_DRAW.values()):
        places = (drawn == index).nonzero().flatten()
        if len(places):
            images[places] = _in_chunks(one, len(places), image, generator)
    return images


def draw_strokes(count: int, image: ImageSpec, generator: torch.Generator) -> Tensor:
    """Draw lines, curves and arcs; see :func:`draw`.

    Every stroke is a chain of straight pieces; a pixel's ink tells its distance to the nearest, relative to the pen's
    width, so that borders are smooth. Large images get their distances from a coarser grid.

    Args:
        count: How many images; memory grows with it.
        image: Their channels and size.
        generator: The source of randomness.
    """
    side = min(image.height, image.width)
    chains = _placed(_chains(count, generator), generator) * side  # pixels from the centre
    pen = side * uniform(generator, count, 1, low=0.02, high=0.06).clamp_min(0.6 / side)
    swell = uniform(generator, count, _STROKES, 1, low=0.75, high=1.25)
    radius = pen * swell.expand(-1, -1, _POINTS - 1).flatten(1)
    begins, ends = chains[:, :, :-1].flatten(1, 2), chains[:, :, 1:].flatten(1, 2)
    grid = [min(size, _GRID) for size in image.shape[1:]]
    distance = _distances(_pixels(image, grid, generator.device), begins, ends, radius)
    depth = ((1 - distance) * pen).view(count, 1, *grid)
    if grid != [image.height, image.width]:
        depth = F.interpolate(depth, size=(image.height, image.width), mode="bilinear", align_corners=False)
    back, front = _papers_and_inks(count, image.channels, generator)
    return torch.lerp(back, front, (depth + 0.5).clamp(0, 1))


def _pixels(image: ImageSpec, grid: list[int], device: torch.device) -> Tensor:
    """Return the centres (pixels, 2) of a grid's cells, as x and y from the image's centre in pixels of the image."""
    y, x = (
        ((torch.arange(cells, device=device) + 0.5) / cells - 0.5) * size
        for cells, size in zip(grid, image.shape[1:], strict=True)
    )
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], dim=1)


def _distances(pixels: Tensor, begins: Tensor, ends: Tensor, radius: Tensor) -> Tensor:
    """Return the distance of pixels (P, 2) to the nearest of pieces (N, S, 2), in radii (N, S) of it, as (N, P)."""
    way, scale = (ends - begins) / radius.unsqueeze(2), radius.reciprocal()
    start = begins * scale.unsqueeze(2)
    length = way.square().sum(dim=2).clamp_min(1e-6).unsqueeze(1)
    x, y = pixels.unbind(dim=1)
    terms = torch.stack([x, y, x.square() + y.square(), torch.ones_like(x)], dim=1)
    # |pixel - begin|^2, and how far along the piece the pixel lies times its length, each as one product
    from_begin = [-2 * start[..., 0] * scale, -2 * start[..., 1] * scale, scale.square(), start.square().sum(dim=2)]
    squares = terms @ torch.stack(from_begin, dim=1)
    forward = [way[..., 0] * scale, way[..., 1] * scale, torch.zeros_like(scale), -(start * way).sum(dim=2)]
    along = terms @ torch.stack(forward, dim=1)
    share = (along / length).clamp_(0, 1)
    squares.addcmul_(share, (share * length).sub_(along, alpha=2))
    return squares.amin(dim=2).clamp_min(0).sqrt()


def _chains(count: int, generator: torch.Generator) -> Tensor:
    """Return the points of all strokes (N, strokes, points, 2); strokes that an image lacks lie on its first."""
    along = torch.linspace(0, 1, _POINTS, device=generator.device)
    basis = torch.stack([(1 - along) ** 3, 3 * along * (1 - along) ** 2, 3 * along**2 * (1 - along), along**3], dim=1)
    anchors = uniform(generator, count, _STROKES, 4, 2, low=-1, high=1)
    straight = uniform(generator, count, _STROKES, 1, 1) < 0.35
    ends = torch.lerp(anchors[:, :, :1], anchors[:, :, 3:], torch.linspace(0, 1, 4, device=along.device).view(4, 1))
    curves = basis @ torch.where(straight, ends, anchors)
    start, sweep, wide, high = (
        uniform(generator, count, _STROKES, 1, low=low, high=top)
        for low, top in ((0, 2 * math.pi), (0.8 * math.pi, 2 * math.pi), (0.25, 0.7), (0.25, 0.7))
    )
    angle = start + sweep * along
    middle = uniform(generator, count, _STROKES, 1, 2, low=-0.6, high=0.6)
    arcs = middle + torch.stack([wide * angle.cos(), high * angle.sin()], dim=3)
    strokes = torch.where(uniform(generator, count, _STROKES, 1, 1) < 0.35, arcs, curves)
    joined = uniform(generator, count, _STROKES) < 0.6
    for index in range(1, _STROKES):  # a joined stroke starts where the one before ends
        gap = strokes[:, index - 1, -1] - strokes[:, index, 0]
        strokes[:, index] += (gap * joined[:, index, None]).unsqueeze(1)
    number = torch.randint(1, _STROKES + 1, (count, 1), generator=generator, device=generator.device)
    there = torch.arange(_STROKES, device=number.device) < number
    return torch.where(there[:, :, None, None], strokes, strokes[:, :1])


def _placed(points: Tensor, generator: torch.Generator) -> Tensor:
    """Fit every drawing into a square of 50 to 85 % of the side, near the centre."""
    low, high = points.amin(dim=(1, 2), keepdim=True), points.amax(dim=(1, 2), keepdim=True)
    extent = (high - low).amax(dim=3, keepdim=True).clamp_min(1e-3)
    size, shift = (
        uniform(generator, len(points), 1, 1, width, low=least, high=most)
        for width, least, most in ((1, 0.5, 0.85), (2, -0.06, 0.06))
    )
    return (points - (low + high) / 2) / extent * size + shift


def _papers_and_inks(count: int, channels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the colours (N, C, 1, 1) of background and ink, which differ enough in the mean of their channels."""
    back, front = (uniform(generator, count, channels, 1, 1) for _ in range(2))
    coloured = uniform(generator, count, 1, 1, 1) < _COLOURED
    gap = front.mean(dim=1, keepdim=True) - back.mean(dim=1, keepdim=True)
    pole = (gap >= 0).to(front.dtype)  # white or black, where the ink is too near
    front = torch.where(gap.abs() < _LEAST_CONTRAST, torch.lerp(front, pole.expand_as(front), 0.8), front)
    back = torch.where(gap.abs() < _LEAST_CONTRAST, torch.lerp(back, 1 - pole.expand_as(back), 0.8), back)
    return back * coloured, torch.where(coloured, front, 1.0)


def _in_chunks(
    one: Callable[[int, ImageSpec, torch.Generator], Tensor],
    count: int,
    image: ImageSpec,
    generator: torch.Generator,
) -> Tensor:
    chunk = max(1, _CHUNK // (min(image.height, _GRID) * min(image.width, _GRID)))
    sizes = [min(chunk, count - done) for done in range(0, count, chunk)]
    return torch.cat([one(size, image, generator) for size in sizes])


_DRAW = {"strokes": draw_strokes, "shapes": draw_shapes, "textures": draw_textures}
