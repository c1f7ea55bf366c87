"""What every mask-learning configuration has in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from modelfence.losses.classification import Clamp

STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MaskConfig:
    """Settings of the learning loop that all methods share.

    Attributes:
        recipe: "default", what measures best here, or "paper", as close to the paper as it can be followed. It
            sets the value of every field that isn't given.
        steps: Optimizer steps.
        batch_size: Images a step and process, authorized and unauthorized together, equal halves.
        learning_rate: Of Adam on the scores; times steps it bounds how many weights can be cut.
        decay: Share of the steps at the end over which the rate falls linearly to zero; in 0..1.
        score_init: Score of every weight at the start; above ``threshold``.
        threshold: A weight is kept where its score is above it.
        held_out: Share of each domain given that is kept apart to measure on during learning, in 0..1.
        evaluate_every: Steps between measurements; each is a row of the history and a saved state.
        patience: Stop after so many measurements without a larger gap between authorized and unauthorized
            accuracy, and keep the best mask; None runs all steps and keeps the last.
        ascent: The factor lambda on the cross-entropy of unauthorized images.
        limit: The bound alpha (beta, gamma) on that term.
        clamp: "batch": the bound is on the batch mean (paper); "sample": on each image.
        scale: "mean": cross-entropies are means over images; "elementwise": over images and classes, as in the code
            that NTL and CUTI published, which makes the bound ``limit`` times the number of classes in the former
            units. (The same factor on all terms isn't applied: Adam doesn't notice it.)
        batch_statistics: Learn in batch mode too; None does where the network has BatchNorm.
        masks: "joint": one mask against all unauthorized domains at once; "one_each": one mask a domain, and the
            combination of all.
        precision: "auto": bfloat16 where the processor computes it natively.
        seed: Of the order of the images.
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}, "paper": {}}

    recipe: Literal["default", "paper"] = "default"
    steps: Annotated[int, Field(ge=1)] = 300
    batch_size: Annotated[int, Field(ge=2)] = 64
    learning_rate: Positive = 1e-4
    decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    score_init: float = 1e-2
    threshold: float = 5e-3
    held_out: Share = 0.1
    evaluate_every: Annotated[int, Field(ge=1)] = 50
    patience: Annotated[int, Field(ge=1)] | None = None
    ascent: Positive = 0.1
    limit: Positive = 1.0
    clamp: Clamp = "batch"
    scale: Literal["mean", "elementwise"] = "mean"
    batch_statistics: bool | None = None
    masks: Literal["joint", "one_each"] = "joint"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, values: Any) -> Any:
        given = dict(values.kwargs or {}) if isinstance(values, ArgsKwargs) else dict(values)
        filled = {**cls.RECIPES.get(str(given.get("recipe", "default")), {}), **given}
        return ArgsKwargs(values.args, filled) if isinstance(values, ArgsKwargs) else filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.score_init <= self.threshold:
            raise ValueError(f"score_init ({self.score_init}) must be above threshold ({self.threshold})")
        if self.patience is not None and self.held_out == 0:
            raise ValueError("patience needs held_out above 0: there is nothing to measure on")
        return self
