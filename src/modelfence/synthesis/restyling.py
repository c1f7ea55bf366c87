"""Copies of unauthorized images that keep the content and leave the style: what the classifier shall go on to know."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelfence.synthesis.draws import uniform
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.random_convolution import random_convolution_copies
from modelfence.synthesis.textures import draw_textures

_PART = 500  # images restyled at once, at most


def restyle(judge: Judge, pixels: Tensor, count: int, *, seed: int) -> Tensor:
    """Put images on random textures and through random convolutions, and keep the copies the classifier agrees on.

    A copy counts where the classifier predicts what it predicts for the original: there it knows the content in more
    than the unauthorized style. Classes that it falls back to on whatever it doesn't know don't count.

    Args:
        judge: The classifier.
        pixels: Unlabelled images, uint8 (M, C, H, W).
        count: How many to make; fewer are returned.
        seed: Of textures and convolutions.

    Returns:
        uint8 (n, C, H, W) with n at most ``count``, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    copies, before, after = [], [], []
    for rows in torch.split(torch.arange(count) % len(pixels), judge.at_once(_PART)):
        original = pixels[rows]
        copies.append(in_random_styles(original, judge, generator))
        before.append(judge.logits(original).argmax(1))
        after.append(judge.logits(copies[-1]).argmax(1))
    return chosen(copies, recognized(torch.cat(before), torch.cat(after)))


def beside_copies(judge: Judge, pixels: Tensor, count: int, *, seed: int) -> Tensor:
    """Return images, each followed by a copy of it in a random style, whatever the classifier says of that.

    Args:
        judge: The classifier.
        pixels: Unlabelled images, uint8 (M, C, H, W).
        count: How many images to take, in random order; from the start again where there are fewer.
        seed: Of the order, the textures and the convolutions.

    Returns:
        uint8 (2 count, C, H, W), on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(len(pixels), generator=generator)[torch.arange(count) % len(pixels)]
    parts = []
    for rows in torch.split(mixed, judge.at_once(_PART)):
        original = pixels[rows]
        parts.append(torch.stack([original, in_random_styles(original, judge, generator)], dim=1).flatten(0, 1))
    return torch.cat(parts)


def in_random_styles(pixels: Tensor, judge: Judge, generator: torch.Generator) -> Tensor:
    """Put images (N, C, H, W), uint8, on random textures and through random convolutions; uint8 too."""
    blended = on_textures(pixels.float() / 255, judge, generator)
    return (random_convolution_copies(blended, generator) * 255).round().to(torch.uint8)


def chosen(parts: Sequence[Tensor], wanted: Tensor) -> Tensor:
    """Return some images of several parts, without a second copy of all.

    Args:
        parts: Each (N, C, H, W).
        wanted: bool, one for each image of all parts.

    Example:
        >>> chosen([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([True, False, True])).tolist()
        [1, 3]
    """
    split = torch.split(wanted, [len(part) for part in parts])
    return torch.cat([part[mine] for part, mine in zip(parts, split, strict=True)])


def recognized(before: Tensor, after: Tensor) -> Tensor:
    """Say which copies a classifier recognizes, rather than takes for what it takes anything unknown for.

    A copy of class k counts where the prediction stays k, and where copies of class k are predicted k at least twice
    as often as copies of other classes.

    Args:
        before: Predictions for the originals, int64 (N,).
        after: Predictions for the copies, int64 (N,).

    Returns:
        bool (N,).

    Example:
        >>> recognized(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0])).tolist()
        [False, False, False, False]
        >>> recognized(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1])).tolist()
        [True, True, True, True]
    """
    classes = int(torch.maximum(before.max(), after.max())) + 1
    table = torch.zeros(classes, classes).index_put_((before, after), torch.ones(len(before)), accumulate=True)
    originals, predicted = table.sum(1), table.sum(0)
    stayed = table.diagonal() / originals.clamp_min(1)
    mistaken = (predicted - table.diagonal()) / (len(before) - originals).clamp_min(1)
    return (before == after) & (stayed >= 2 * mistaken)[before]


def on_textures(images: Tensor, judge: Judge, generator: torch.Generator) -> Tensor:
    """Put every image on a random texture: half of them as the difference of both, half as a blend.

    Args:
        images: (N, C, H, W) on the scale 0..1.
        judge: Knows the shape of images.
        generator: The source of randomness.
    """
    textures = draw_textures(len(images), judge.image, generator)
    share, kind = (uniform(generator, len(images), 1, 1, 1) for _ in range(2))
    blended = torch.lerp(textures, images, 0.4 + 0.6 * share)
    return torch.where(kind < 0.5, (images - textures).abs(), blended)
