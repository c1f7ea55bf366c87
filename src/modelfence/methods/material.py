"""What a mask is learned on where the source is missing, and the learning on it (Eq. 4)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.losses.classification import dependence, distillation
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.labelled import require_enough, shares
from modelfence.methods.loop import Learned, Row, Session, learn_scores, row_kept
from modelfence.methods.synthetic import SyntheticConfig
from modelfence.methods.terms import Part, terms_of, unlearning
from modelfence.models.outputs import logits_of

_DOUBTFUL = 0.15  # of the VGG masks measured those that disagree less lost up to 13 % of the source, others up to 88
_PIXELS = 4096 * 1000  # of the images measured together, so that memory stays bounded

Drawn = tuple[Tensor, Tensor]
"""Images (B, C, H, W), normalized, and the answers (B, K) that go with them."""


@dataclass(frozen=True)
class Examples:
    """Images to learn on with what goes with each; a method draws batches of them by row.

    Attributes:
        name: Of the term they belong to, for errors.
        pixels: uint8 (N, C, H, W), on the CPU.
        answers: (N, K): the original model's logits, or the labels to unlearn.
    """

    name: str
    pixels: Tensor
    answers: Tensor

    def joined(self, other: "Examples") -> "Examples":
        """Return these examples and others, which have images and answers of the same shapes, under this name."""
        return Examples(self.name, torch.cat([self.pixels, other.pixels]), torch.cat([self.answers, other.answers]))

    def split(self, share: float, seed: int) -> "tuple[Examples, Examples | None]":
        """Return the examples without a random share of them, and that share; at least one on each side.

        Args:
            share: In 0..1; 0 leaves all where they are, and None as the share.
            seed: Of the choice.

        Raises:
            InputError: There is only one.
        """
        if share == 0:
            return self, None
        if len(self.pixels) < 2:
            raise InputError(f"{self.name}: 1 image; two are needed, one of them to measure on (or held_out=0)")
        aside = held_aside(len(self.pixels), share)
        order = torch.randperm(len(self.pixels), generator=torch.Generator().manual_seed(seed))
        rest, held_out = order[aside:], order[:aside]
        return (
            Examples(self.name, self.pixels[rest], self.answers[rest]),
            Examples(self.name, self.pixels[held_out], self.answers[held_out]),
        )

    def batches(self, size: int, image: ImageSpec, session: Session, *, seed: int, start: int) -> Iterator[Drawn]:
        """Hand out normalized images and their answers without end, shuffled anew each time round."""
        rows = torch.arange(len(self.pixels))  # as labels, so that the answers are found again
        domain = IndexedDomain(self.name, self.pixels.__getitem__, len(rows), spec=image, labels=rows)
        fabric = session.fabric
        stream = domain.batches(
            size, seed=seed, start=start, rank=fabric.global_rank, world=fabric.world_size, device=fabric.device
        )
        for images, chosen in stream:
            assert chosen is not None  # noqa: S101 (for the type checker: given above)
            yield images, self.answers[chosen.cpu()].to(fabric.device)


def held_aside(count: int, share: float) -> int:
    """Return how many of some images are kept aside to measure on: none at a share of 0, else at least one.

    Example:
        >>> held_aside(100, 0.1), held_aside(2, 0.1), held_aside(100, 0.0)
        (10, 1, 0)
    """
    return min(max(1, round(share * count)), count - 1) if share else 0


def require_given(domain: Domain, size: int, config: SyntheticConfig, session: Session) -> None:
    """Refuse a domain that can't fill its share of one batch of all processes with what isn't kept aside.

    Args:
        domain: With any number of images; one that doesn't say how many it has is let pass.
        size: Its share of a process's batch.
        config: Its ``most_images`` and ``held_out``.
        session: Whose processes share a batch.

    Raises:
        InputError: It has too few.
    """
    count = min(domain.size or config.most_images, config.most_images)
    require_enough(domain, size, session, left=count - held_aside(count, config.held_out))


def require_made(made: int, config: SyntheticConfig, session: Session) -> None:
    """Refuse settings by which too few images near the source would be made, before any is.

    Args:
        made: How many, at most; that there would be none is said where they are made.
        config: Its ``batch_size`` and ``held_out``.
        session: Whose processes share a batch.

    Raises:
        InputError: They can't fill half a batch of all processes.
    """
    left, joint = made - held_aside(made, config.held_out), config.batch_size // 2 * session.fabric.world_size
    if made > 0 and left < joint:
        raise InputError(
            f"{left} images near the source would be left to learn on, of {made} made at most; a step takes {joint}: "
            "raise generated, or use a smaller batch_size"
        )


@dataclass(frozen=True)
class Material:
    """Everything that a mask is learned on.

    Attributes:
        near: Images that look like the source to the original model, with its logits.
        targets: Images to unlearn by domain, with labels or class probabilities (N, K).
        restyled: Other images to keep, with the original model's logits.
    """

    near: Examples
    targets: Mapping[str, Examples]
    restyled: Examples | None = None


class Step(NamedTuple):
    """What one step learns from.

    Attributes:
        near: Images that look like the source, with the original model's logits.
        targets: Images to unlearn by domain, with labels or class probabilities.
        restyled: Other images to keep, with the original model's logits.
    """

    near: Drawn
    targets: list[Drawn]
    restyled: Drawn | None = None


def learn_on(
    model: nn.Module, config: SyntheticConfig, session: Session, material: Material, image: ImageSpec
) -> Learned:
    """Learn a mask on material; a share ``held_out`` of it is kept aside for proxies.

    Args:
        model: The trained network; it isn't changed.
        config: Weights, terms, and the settings of the loop.
        session: Device, where to save, what to measure beside the proxies.
        material: What to learn on.
        image: What the model eats.

    Raises:
        InputError: The batch is too small for so many domains, or a domain for its share of a batch.
        NonFiniteError: A loss term became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    both = batch_mode(model, config)
    near, near_aside = material.near.split(config.held_out, config.seed)
    split = {name: examples.split(config.held_out, config.seed) for name, examples in material.targets.items()}
    rest = replace(material, near=near, targets={name: pair[0] for name, pair in split.items()})
    proxies = None
    if near_aside is not None:
        proxies = Proxies(near_aside, {name: pair[1] for name, pair in split.items() if pair[1] is not None}, image)

    far = 0 if material.restyled is None else len(material.restyled.pixels)
    restyled_weight = config.restyled_weight * min(1.0, far / len(material.near.pixels))

    def loss(student: nn.Module, _: MaskedModel, step: Step) -> dict[str, Tensor]:
        return loss_of(student, step, config, session, both=both, restyled_weight=restyled_weight)

    def steps(start: int) -> Iterator[Step]:
        return _steps(rest, config, session, image, start)

    learned = learn_scores(model, config, session, batches=steps, loss=loss, monitor=proxies)
    if proxies is not None:
        _warn_of_loss(learned.history, config, session)
    return learned


def _warn_of_loss(history: Sequence[Row], config: SyntheticConfig, session: Session) -> None:
    """Warn where the mask that is kept forgot images near the source."""
    lost = 1 - row_kept(history, config)["source_agreement"]
    if lost > _DOUBTFUL:
        session.warn(
            f"the masked model answers {lost:.0%} of the images near the source otherwise than the original: it may "
            "have lost much of the source; measure it on source images, if there are any (watch=)"
        )


def batch_mode(model: nn.Module, config: SyntheticConfig) -> bool:
    """Return whether terms are taken with batch statistics too."""
    return has_batch_norm(model) if config.batch_statistics is None else config.batch_statistics


def _steps(
    material: Material, config: SyntheticConfig, session: Session, image: ImageSpec, start: int
) -> Iterator[Step]:
    """Hand out half a batch near the source, the other half to unlearn, and a quarter of restyled images beside."""
    half = config.batch_size // 2

    def stream(examples: Examples, size: int, number: int) -> Iterator[Drawn]:
        return examples.batches(size, image, session, seed=config.seed + number, start=start)

    near = stream(material.near, half, 0)
    far = material.restyled
    fits = 0 if far is None else min(max(1, half // 2), len(far.pixels) // session.fabric.world_size)
    restyled = None if far is None or fits == 0 else stream(far, fits, 1)
    sizes = shares(half, len(material.targets))
    targets = [
        stream(examples, size, number)
        for number, (examples, size) in enumerate(zip(material.targets.values(), sizes, strict=True), start=2)
    ]
    while True:
        yield Step(next(near), [next(one) for one in targets], None if restyled is None else next(restyled))


def loss_of(
    student: nn.Module,
    step: Step,
    config: SyntheticConfig,
    session: Session,
    *,
    both: bool,
    restyled_weight: float = 0.0,
) -> dict[str, Tensor]:
    """Return the terms of Eq. 4 by name.

    Args:
        student: The masked model, or a wrapper of it.
        step: What to learn from.
        config: Weights, terms, tolerance.
        session: Whose processes share a batch.
        both: Also take them with batch statistics.
        restyled_weight: Of the agreement on restyled images, if the step has any.
    """
    weight = config.source_weight + (0.0 if step.restyled is None else restyled_weight)
    parts = _parts(step, config, session, restyled_weight)
    return paced(terms_of(student, parts, both=both), config, session, weight)


def _parts(step: Step, config: SyntheticConfig, session: Session, restyled_weight: float) -> list[Part]:
    """Return the parts of a step; restyled images go without batch statistics, which aren't those of the source."""
    parts = []
    if config.terms != "target":
        parts.append(Part("source", step.near[0], keeping(step.near[1], config.source_weight)))
        if step.restyled is not None:
            far = keeping(step.restyled[1], restyled_weight)
            parts.append(Part("source", step.restyled[0], far, batch_mode=False))
    if config.terms != "source":
        share = 1 / len(step.targets)
        parts += [Part("target", images, forgetting(labels, config, session, share)) for images, labels in step.targets]
    return parts


def forgetting(labels: Tensor, config: SyntheticConfig, session: Session, share: float) -> Callable[[Tensor], Tensor]:
    """Return the term that unlearns the labels (N, K), and the answers' dependence on the images."""
    unlearn = unlearning(labels, config, session, share=share)
    weight = share * config.dependence_weight
    if weight == 0:
        return unlearn
    return lambda logits: (
        unlearn(logits)
        + weight
        * dependence(logits, mean_over_processes=lambda value: cast("Tensor", session.fabric.all_reduce(value)))
    )


def keeping(teacher: Tensor, weight: float) -> Callable[[Tensor], Tensor]:
    """Return the term that keeps the student's outputs at the original model's logits (N, K)."""
    return lambda logits: weight * distillation(teacher, logits)


def paced(terms: Mapping[str, Tensor], config: SyntheticConfig, session: Session, weight: float) -> dict[str, Tensor]:
    """Scale the unlearning terms by how well the student still agrees on what is to be kept.

    The factor is ``max(0, 1 - disagreement / tolerance)``, taken over all processes, without gradient. A pseudo-source
    never covers the source wholly; what the student forgets of it shows that the mask takes away what both share.
    Disagreement is that of the model as it is shipped: with batch statistics a few images disagree anyway.

    Args:
        terms: The terms of a step by name.
        config: Its ``tolerance``.
        session: Whose processes share a batch.
        weight: The sum of the weights that are in the term "source", so that the term over it is a mean KL.
    """
    if config.tolerance is None or "source" not in terms:
        return dict(terms)
    disagreement = cast("Tensor", session.fabric.all_reduce(terms["source"].detach() / weight))
    pace = (1 - disagreement / config.tolerance).clamp(0, 1)
    return {name: value * pace if name.startswith("target") else value for name, value in terms.items()}


class Proxies:
    """What can be measured without the source and without labels: agreement with the original model.

    Rows get "source_agreement" (on synthetic images kept aside), "target_agreement:<name>" and their difference
    "gap", all in -1..1.

    Args:
        source: Images near the source, with the original model's logits.
        targets: Unauthorized images by name, likewise.
        image: What the model eats.
    """

    def __init__(self, source: Examples, targets: Mapping[str, Examples], image: ImageSpec) -> None:
        self.source, self.targets, self.image = source, targets, image

    def __call__(self, student: nn.Module) -> Row:
        """Measure."""
        row: Row = {"source_agreement": self._agreement(student, self.source)}
        lost = []
        for name, examples in self.targets.items():
            lost.append(self._agreement(student, examples))
            row[f"target_agreement:{name}"] = lost[-1]
        row["gap"] = row["source_agreement"] - (sum(lost) / len(lost) if lost else 0.0)
        return row

    @torch.no_grad()
    def _agreement(self, student: nn.Module, examples: Examples) -> float:
        device = next(student.parameters()).device
        same = 0
        size = max(1, min(250, _PIXELS // examples.pixels[0, 0].numel()))
        parts = (torch.split(values, size) for values in (examples.pixels, examples.answers))
        for pixels, answers in zip(*parts, strict=True):
            logits = logits_of(student(self.image.normalize(pixels.to(device))))
            same += int((logits.argmax(1).cpu() == answers.argmax(1)).sum())
        return same / len(examples.pixels)
