"""What was synthesized for a run, kept for people to look at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from modelfence.synthesis.pool import PseudoSource

MOST = 64
"""Images of a part that are kept, at most."""

_FEW = 0.1


class Sample(NamedTuple):
    """Some of the images of a part, in order of class.

    Attributes:
        images: uint8 (N, C, H, W) on the CPU, at most :data:`MOST`.
        classes: What the original model says of each, int64 (N,).
    """

    images: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Synthetic:
    """Images that a mask was learned on where data was missing.

    Attributes:
        samples: By part: "generated" from noise, "translated" into the source's style, "restyled" copies of
            unauthorized images, "neighbours", the styled images that stand in for unauthorized ones.
        facts: By part: numbers about all its images, such as how many there are and how many classes.
    """

    samples: Mapping[str, Sample] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def sample(pixels: Tensor, classes: Tensor) -> Sample:
    """Choose images to show: spread evenly over those there are, so that missing classes can be seen.

    Args:
        pixels: uint8 (N, C, H, W).
        classes: int64 (N,).

    Example:
        >>> chosen = sample(torch.zeros(1000, 1, 2, 2, dtype=torch.uint8), torch.arange(1000) % 2)
        >>> len(chosen.images), chosen.classes[:3].tolist(), chosen.classes[-1].item()
        (64, [0, 0, 0], 1)
    """
    count = min(MOST, len(pixels))
    rows = torch.linspace(0, len(pixels) - 1, count).round().long()
    rows = rows[classes[rows].argsort(stable=True)]
    return Sample(pixels[rows].cpu().clone(), classes[rows].cpu())


def of_pool(pool: PseudoSource) -> Synthetic:
    """Return what there is to show of a pseudo-source."""
    samples = {name: sample(pixels, pool.logits[name].argmax(1)) for name, pixels in pool.parts.items()}
    return Synthetic(samples, dict(pool.facts))


def of_neighbours(pixels: Tensor, labels: Tensor, of_classes: int) -> Synthetic:
    """Return what there is to show of images that stand in for unauthorized ones.

    Args:
        pixels: uint8 (N, C, H, W).
        labels: What the original model says of each, int64 (N,).
        of_classes: Number of the model's classes, K.
    """
    share = torch.bincount(labels, minlength=of_classes) / len(labels)
    seen = int((share > _FEW / of_classes).sum())
    facts = {"images": float(len(pixels)), "classes": float(seen), "of_classes": float(of_classes)}
    return Synthetic({"neighbours": sample(pixels, labels)}, {"neighbours": facts})


def warning_of_neighbours(made: Synthetic) -> str | None:
    """Return a sentence where classes are missing among images that stand in for unauthorized ones, else None.

    Args:
        made: What :func:`of_neighbours` returned.
    """
    facts = made.facts["neighbours"]
    missing = facts["of_classes"] - facts["classes"]
    if not missing:
        return None
    return (
        f"neighbours images: {missing:.0f} of {facts['of_classes']:.0f} classes are (nearly) missing, and those aren't "
        "unlearned: raise neighbours, or try another seed"
    )


def together(parts: tuple[Synthetic, ...]) -> Synthetic:
    """Return several as one; where two have the same part, the first one's counts.

    Example:
        >>> together((Synthetic(), Synthetic())) == Synthetic()
        True
    """
    samples: dict[str, Sample] = {}
    facts: dict[str, Mapping[str, float]] = {}
    for part in reversed(parts):
        samples |= part.samples
        facts |= part.facts
    order = dict.fromkeys(name for part in parts for name in part.samples)
    return Synthetic(
        {name: samples[name] for name in order},
        {name: facts[name] for name in order if name in facts},
    )
