"""Auxiliary domains around a source: what a mask unlearns where no unauthorized images are at hand."""

from typing import NamedTuple

import torch
from torch import Tensor

from modelfence.synthesis.judge import Judge
from modelfence.synthesis.restyling import chosen, recognized
from modelfence.synthesis.styles import GROUP, random_style

_PART = 512  # images styled at once, at most


class Neighbours(NamedTuple):
    """Styled copies that keep the class of their originals, by how far their style is from the source.

    Attributes:
        outside: To be unlearned, uint8 (N, C, H, W).
        labels: Their classes, int64 (N,).
        inside: Too near the source to be told from it: to be kept, uint8 (M, C, H, W).
    """

    outside: Tensor
    labels: Tensor
    inside: Tensor


def neighbours(judge: Judge, pixels: Tensor, count: int, *, near: Tensor, quantile: float, seed: int) -> Neighbours:
    """Style images at random, and sort the copies.

    A copy counts where the classifier recognizes it (see :func:`recognized`): there the style is another and the
    content is known, as in an unauthorized domain that the classifier works on. With BatchNorm a style is outside where
    its images together are farther from the running statistics than most groups of so many images near the source (a
    single image tells little: half of USPS is no farther from MNIST than a tenth of MNIST itself); without, every
    style is outside.

    Args:
        judge: The classifier.
        pixels: Originals, uint8 (M, C, H, W).
        count: Copies to make, rounded down to whole groups of 16 that share a style; the originals are taken in turn.
        near: Images near the source, uint8, at least 1.
        quantile: Share of the groups of near images, in 0..1, that a style must be farther away than.
        seed: Of the styles.
    """
    generator = torch.Generator().manual_seed(seed)
    usual = judge.distances(near[_in_turn(near, max(len(near), GROUP), generator)], GROUP)
    copies, before, after, far = [], [], [], []
    size = max(GROUP, judge.at_once(_PART) // GROUP * GROUP)
    for rows in torch.split(_in_turn(pixels, count, generator), size):
        styled = (random_style(pixels[rows].float() / 255, generator) * 255).round().to(torch.uint8)
        copies.append(styled)
        before.append(judge.logits(pixels[rows]).argmax(1))
        after.append(judge.logits(styled).argmax(1))
        distances = judge.distances(styled, GROUP)
        if usual is None or distances is None:
            far.append(torch.ones(len(styled), dtype=torch.bool))
        else:
            far.append((distances > usual.quantile(quantile)).repeat_interleave(GROUP))
    known, outside = recognized(torch.cat(before), torch.cat(after)), torch.cat(far)
    return Neighbours(
        chosen(copies, known & outside), torch.cat(before)[known & outside], chosen(copies, known & ~outside)
    )


def _in_turn(pixels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return rows of images in random order, again where there are fewer; as many as make whole groups."""
    order = torch.randperm(len(pixels), generator=generator)
    return order[torch.arange(count // GROUP * GROUP) % len(pixels)]
