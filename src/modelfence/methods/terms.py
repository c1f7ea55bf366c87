"""The loss of one step: groups of images, each with its own term, in the modes the network is confined in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from modelfence.losses.classification import clamped_ascent
from modelfence.methods.config import MaskConfig
from modelfence.methods.loop import Session

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """Images of a step that share a term.

    Attributes:
        name: What the history calls the term, "source" or "target"; terms of the same name are added.
        images: Shape (N, C, H, W).
        loss: From the student's logits (N, K) to a scalar.
        batch_mode: Whether the term is taken with batch statistics too, where the method does that.
    """

    name: str
    images: Tensor
    loss: Loss
    batch_mode: bool = True


def terms_of(student: nn.Module, parts: Sequence[Part], *, both: bool) -> dict[str, Tensor]:
    """Run the student on all parts and return the sum of the losses by name.

    Args:
        student: A :class:`modelfence.masking.masked_model.MaskedModel`, or a wrapper of one.
        parts: At least one.
        both: Also run every part that wants it with the statistics of its own images; those terms have names
            that end in "_batch".
    """
    again = [part for part in parts if both and part.batch_mode]
    passes = student(torch.cat([part.images for part in parts]), batch_mode=[part.images for part in again])
    terms: dict[str, Tensor] = {}
    for part, logits in zip(parts, passes[0].split([len(part.images) for part in parts]), strict=True):
        terms[part.name] = terms.get(part.name, 0) + part.loss(logits)
    for part, logits in zip(again, passes[1:], strict=True):
        name = f"{part.name}_batch"
        terms[name] = terms.get(name, 0) + part.loss(logits)
    return terms


def unlearning(labels: Tensor, config: MaskConfig, session: Session, *, share: float = 1.0) -> Loss:
    """Return the second term of Eqs. 1, 4 and 7, to be minimized: the clamped ascent, negative.

    Args:
        labels: Classes (N,), or probabilities (N, K), of the unauthorized images.
        config: Its ``ascent``, ``limit``, ``clamp`` and ``scale``.
        session: Whose processes share a batch.
        share: Factor, for one of several unauthorized domains.
    """

    def loss(logits: Tensor) -> Tensor:
        ascent = clamped_ascent(
            logits,
            labels,
            weight=config.ascent,
            limit=config.limit_for(logits.shape[1]),
            clamp=config.clamp,
            mean_over_processes=lambda value: cast("Tensor", session.fabric.all_reduce(value)),
        )
        return -share * ascent

    return loss
