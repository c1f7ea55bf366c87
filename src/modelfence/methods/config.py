"""What learning configurations have in common: settings of the loop, of masks, of retraining."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs
from torch import nn

from modelfence.data.splits import MOST_SEED
from modelfence.losses.classification import Clamp

STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Score = Annotated[float, Field(ge=-100, le=100)]  # beyond, a step of Adam is lost in rounding
_BEYOND = 0.2  # nats


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LearnConfig:
    """Settings of the learning loop that all methods share, whatever they learn.

    Attributes:
        steps: Optimizer steps.
        batch_size: Images a step and process, authorized and unauthorized together, equal halves.
        learning_rate: Of Adam at the first step.
        held_out: Share of each domain given that is kept apart to measure on during learning, in 0..1.
        evaluate_every: Steps between measurements; each is a row of the history and a saved state.
        patience: Stop after so many measurements without a larger gap between authorized and unauthorized
            accuracy, and keep the best result; None runs all steps and keeps the last.
        ascent: The factor lambda on the cross-entropy of unauthorized images.
        limit: The bound alpha (beta, gamma) on that term. None takes ``ascent`` times (the log of the number of classes
            + 0.2): an image whose cross-entropy is beyond the log can't get its own class as the most probable one.
        scale: "mean": cross-entropies are means over images; "elementwise": over images and classes, as in the code
            that NTL and CUTI published, which makes the bound ``limit`` times the number of classes in the former
            units. (The same factor on all terms isn't applied: Adam doesn't notice it.)
        precision: "auto": bfloat16 on devices that are taken to be faster in it; see
            :func:`modelfence.models.autocast.default_precision`.
        seed: Of the order of the images, and of whatever else is drawn; 0 to 2**53.
    """

    steps: Annotated[int, Field(ge=1)] = 300
    batch_size: Annotated[int, Field(ge=2)] = 64
    learning_rate: Positive = 1e-4
    held_out: Share = 0.1
    evaluate_every: Annotated[int, Field(ge=1)] = 50
    patience: Annotated[int, Field(ge=1)] | None = None
    ascent: Positive = 0.1
    limit: Positive | None = 1.0
    scale: Literal["mean", "elementwise"] = "mean"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0

    @model_validator(mode="after")
    def _patience_has_a_measure(self) -> Self:
        if self.patience is not None and self.held_out == 0:
            raise ValueError("patience needs held_out above 0: there is nothing to measure on")
        return self

    def for_network(self, model: nn.Module) -> Self:
        """Return these settings with what depends on the network worked out; ``protect`` learns with those.

        Args:
            model: The network to be confined.
        """
        del model
        return self

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        del step
        return self.learning_rate

    def limit_for(self, classes: int) -> float:
        """Return the bound on the unlearning term in nats, for a classifier of so many classes.

        Example:
            >>> LearnConfig(limit=1.0).limit_for(10), LearnConfig(limit=1.0, scale="elementwise").limit_for(10)
            (1.0, 10.0)
            >>> round(LearnConfig(ascent=1.0, limit=None).limit_for(10), 2)
            2.5
        """
        if self.limit is None:
            return self.ascent * (math.log(classes) + _BEYOND)
        return self.limit * (classes if self.scale == "elementwise" else 1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MaskConfig(LearnConfig):
    """Settings that all methods share that learn a mask; see :class:`LearnConfig` for the loop.

    Attributes:
        recipe: "default", what measures best here, or "paper", the paper's losses and constants (where a method
            departs from them, it says so). It sets the value of every field that isn't given.
        learning_rate: Of Adam on the scores; times steps it bounds how many weights can be cut.
        decay: Share of the steps at the end over which the rate falls linearly to zero; in 0..1.
        score_init: Score of every weight at the start; above ``threshold``, in -100..100.
        threshold: A weight is kept where its score is above it; in -100..100.
        clamp: "batch": the bound is on the batch mean (as printed in the paper); "sample": on each image.
        batch_statistics: Learn in batch mode too; None does where the network has BatchNorm.
        masks: "joint": one mask against all unauthorized domains at once; "one_each": one mask a domain, and the
            combination of all.
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}, "paper": {}}

    recipe: Literal["default", "paper"] = "default"
    decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    score_init: Score = 1e-2
    threshold: Score = 5e-3
    clamp: Clamp = "batch"
    batch_statistics: bool | None = None
    masks: Literal["joint", "one_each"] = "joint"

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, values: Any) -> Any:
        given = dict(values.kwargs or {}) if isinstance(values, ArgsKwargs) else dict(values)
        filled = {**cls.RECIPES.get(str(given.get("recipe", "default")), {}), **given}
        return ArgsKwargs(values.args, filled) if isinstance(values, ArgsKwargs) else filled

    @model_validator(mode="after")
    def _starts_with_all_kept(self) -> Self:
        if np.float32(self.score_init) <= np.float32(self.threshold):  # as scores are compared
            raise ValueError(f"score_init ({self.score_init}) must be above threshold ({self.threshold})")
        return self

    def multiplied(self, factors: Mapping[str, str]) -> Self:
        """Return these settings with factors multiplied into what is the recipe's own value, and set to 1.

        A value that isn't the recipe's was given, and is taken as it is.

        Args:
            factors: Names of fields that hold a factor, and of the number that each multiplies.

        Example:
            >>> found = MaskConfig(decay=0.5).multiplied({"decay": "steps"})
            >>> found.steps, found.decay, MaskConfig(decay=0.5, steps=7).multiplied({"decay": "steps"}).steps
            (150, 1.0, 7)
        """
        own = {**{one.name: one.default for one in fields(self)}, **self.RECIPES[self.recipe]}
        values: dict[str, Any] = {}
        for factor, name in factors.items():
            given = getattr(self, name)
            if given == own[name]:
                product = given * getattr(self, factor)
                whole = isinstance(given, int)
                values |= {name: max(min(1, given), round(product)) if whole else product, factor: 1.0}
        return replace(self, **values)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: constant, then linear to zero."""
        tail = self.decay * self.steps
        return self.learning_rate * (min(1.0, (self.steps - step) / tail) if tail else 1.0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RetrainConfig(LearnConfig):
    """Settings that all methods share that retrain the whole network, with no mask; see :class:`LearnConfig`.

    The defaults are those of the code that NTL and CUTI published for digits: 32 pairs of an authorized and an
    unauthorized image a step, 30 times through 5,000 pairs. The network is trained as usual: dropout is active, and
    BatchNorm normalizes by the batch and updates its running statistics.

    Attributes:
        decay_per_step: Factor on the learning rate after every step, in 0..1. At 0.999 all steps together move a
            weight by some 1,000 times ``learning_rate``.
        start: "given": go on from the model's weights; "fresh": draw new ones first, from the seed. (The published
            code starts from ImageNet's.)

    Example:
        >>> round(RetrainConfig(learning_rate=1.0).rate_at(1000), 3)
        0.368
    """

    steps: Annotated[int, Field(ge=1)] = 4680
    batch_size: Annotated[int, Field(ge=4)] = 64
    evaluate_every: Annotated[int, Field(ge=1)] = 156
    scale: Literal["mean", "elementwise"] = "elementwise"
    decay_per_step: Annotated[float, Field(gt=0, le=1)] = 0.999
    start: Literal["given", "fresh"] = "given"

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * self.decay_per_step**step
