"""The paper's recipes without a source: generators learn in turn with the mask, step by step (Algorithms 1 and 2)."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.alternating import Alternating
from modelfence.methods.diverse import DiverseStyles
from modelfence.methods.labelled import shares
from modelfence.methods.loop import Companion, Learned, Row, Session, learn_scores
from modelfence.methods.material import Drawn, Examples, Proxies, Step, batch_mode, loss_of
from modelfence.methods.samples import Synthetic, of_neighbours, of_pool, together
from modelfence.methods.synthetic import SyntheticConfig
from modelfence.methods.trainee import Companions
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pool import examined

_LOOKED_AT = 128  # generated images that every measurement takes
STYLED = "neighbours"
"""What the history calls the auxiliary images."""


class _Given(NamedTuple):
    number: int
    near: Drawn | None
    targets: list[Drawn]


def learn_in_turn(
    model: nn.Module,
    config: SyntheticConfig,
    session: Session,
    judge: Judge,
    *,
    source: Examples | None = None,
    targets: Mapping[str, Examples] | None = None,
    styles: DiverseStyles | None = None,
) -> Learned:
    """Learn a mask by Eq. 4, with what is missing made anew in every step.

    The order of a step is that of Algorithm 1: images are generated, both generators are updated by them, then the
    mask. Where there are no unauthorized images, Algorithm 2 goes between: the images near the source are restyled in
    all directions, the diversity generator being updated after each, and the mask unlearns all copies.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Device, where to save, what to measure beside the proxies.
        judge: The same network.
        source: Images near the source with the network's logits; None has the generators of Algorithm 1 make them.
        targets: Images to unlearn by domain, with class probabilities.
        styles: Makes further images to unlearn, from those near the source.

    Returns:
        Mask, history, and images as they are made at the end.

    Raises:
        InputError: The batch is too small for so many domains, or a domain for its share of a batch.
        NonFiniteError: A loss term or a generator became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    turns = _Turns(model, config, session, judge, source, targets or {}, styles)
    learned = learn_scores(
        model,
        config,
        session,
        batches=turns.batches,
        loss=turns.loss,
        monitor=turns.measure,
        companion=turns.companion(),
    )
    return replace(learned, synthetic=turns.synthetic())


class _Turns:
    """What the steps of a run share; the arguments are those of :func:`learn_in_turn`."""

    def __init__(
        self,
        model: nn.Module,
        config: SyntheticConfig,
        session: Session,
        judge: Judge,
        source: Examples | None,
        targets: Mapping[str, Examples],
        styles: DiverseStyles | None,
    ) -> None:
        self.config, self.session, self.judge, self.styles = config, session, judge, styles
        self.both = batch_mode(model, config)
        self.near = None if source is None else source.split(config.held_out, config.seed)
        self.targets = {name: examples.split(config.held_out, config.seed) for name, examples in targets.items()}
        self.alternating = None if source is not None else Alternating(model, config, judge.image, session.fabric)

    def companion(self) -> Companions:
        parts: dict[str, Companion | None] = {"generators": self.alternating, "styles": self.styles}
        return Companions(**{name: part for name, part in parts.items() if part is not None})

    def batches(self, start: int) -> Iterator[_Given]:
        """Hand out half a batch of what is given near the source, if anything, and half a batch to unlearn."""
        half, image = self.config.batch_size // 2, self.judge.image

        def stream(examples: Examples, size: int, number: int) -> Iterator[Drawn]:
            return examples.batches(size, image, self.session, seed=self.config.seed + number, start=start)

        near = itertools.repeat(None) if self.near is None else stream(self.near[0], half, 0)
        sizes = shares(half, len(self.targets)) if self.targets else []
        targets = [
            stream(pair[0], size, number)
            for number, (pair, size) in enumerate(zip(self.targets.values(), sizes, strict=True), start=1)
        ]
        for number in itertools.count(start):
            yield _Given(number, next(near), [next(one) for one in targets])

    def loss(self, student: nn.Module, masked: MaskedModel, given: _Given) -> dict[str, Tensor]:
        """Update what learns beside the mask, and return the mask's terms."""
        near = given.near or self._generated(masked, given.number)
        targets = list(given.targets)
        if self.styles is not None:
            styled = self.styles.step(masked, near[0], given.number)
            targets.append((styled.images, styled.labels))
        return loss_of(student, Step(near, targets), self.config, self.session, both=self.both)

    def _generated(self, masked: MaskedModel, number: int) -> Drawn:
        assert self.alternating is not None  # noqa: S101 (for the type checker: there is nothing near given)
        images = self.alternating.step(masked, number)
        with self.session.fabric.autocast():
            return images, masked.teacher(images)

    def measure(self, student: nn.Module) -> Row:
        """Measure how far the student agrees with the original model."""
        if self.near is not None and self.near[1] is None:
            return {}  # nothing is held out
        near = self._looked_at()
        targets = {name: aside for name, (_, aside) in self.targets.items() if aside is not None}
        if self.styles is not None:
            targets[STYLED] = self._styled(near, self.styles)
        return Proxies(near, targets, self.judge.image)(student)

    def synthetic(self) -> Synthetic:
        """Return what the generators make as they are now."""
        near, found = self._looked_at(), []
        if self.alternating is not None:
            found.append(of_pool(examined(self.judge, {"generated": near.pixels})))
        if self.styles is not None:
            styled = self._styled(near, self.styles)
            found.append(of_neighbours(styled.pixels, styled.answers.argmax(1), styled.answers.shape[1]))
        return together(tuple(found))

    def _looked_at(self) -> Examples:
        if self.near is not None:
            return self.near[1] or self.near[0]
        assert self.alternating is not None  # noqa: S101 (for the type checker: there is nothing near given)
        return self._seen(self.alternating.look(_LOOKED_AT))

    def _styled(self, near: Examples, styles: DiverseStyles) -> Examples:
        return self._seen(styles.look(self.judge.normalized(near.pixels[:_LOOKED_AT])))

    def _seen(self, images: Tensor) -> Examples:
        pixels = self.judge.image.denormalize(images).cpu()
        return Examples("made", pixels, self.judge.logits(pixels))
