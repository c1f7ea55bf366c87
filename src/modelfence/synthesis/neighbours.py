"""Auxiliary domains around a source: what a mask unlearns where no unauthorized images are at hand."""

from typing import NamedTuple

import torch
from torch import Tensor

from modelfence.synthesis.judge import Judge
from modelfence.synthesis.restyling import chosen, recognized
from modelfence.synthesis.styles import random_style

_PART, _STYLE = 512, 16  # images styled at once, at most; those that share a style


class Neighbours(NamedTuple):
    """Styled copies that keep the class of their originals, by how far they are from the source.

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
    content is known, as in an unauthorized domain that the classifier works on. With BatchNorm a copy is outside where
    it is farther from the running statistics than most images near the source; without, every copy is outside.

    Args:
        judge: The classifier.
        pixels: Originals, uint8 (M, C, H, W).
        count: Copies to make; the originals are taken in turn.
        near: Images near the source, uint8.
        quantile: Share of the near images, in 0..1, that a copy must be farther away than.
        seed: Of the styles.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    copies, before, after = [], [], []
    size = max(_STYLE, judge.at_once(_PART) // _STYLE * _STYLE)
    for rows in torch.split(order[torch.arange(count) % len(pixels)], size):
        styled = (random_style(pixels[rows].float() / 255, generator) * 255).round().to(torch.uint8)
        copies.append(styled)
        before.append(judge.logits(pixels[rows]).argmax(1))
        after.append(judge.logits(styled).argmax(1))
    known = recognized(torch.cat(before), torch.cat(after))
    found, classes = chosen(copies, known), torch.cat(before)[known]
    distances, usual = judge.distances(found), judge.distances(near)
    if distances is None or usual is None:
        return Neighbours(found, classes, found[:0])
    outside = distances > usual.quantile(quantile)
    return Neighbours(found[outside], classes[outside], found[~outside])
