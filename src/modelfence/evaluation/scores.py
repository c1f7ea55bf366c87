"""How a model does on one domain: measured numbers, derived numbers, and what must be said beside them."""

import math
from dataclasses import dataclass
from typing import Literal

from modelfence.evaluation import metrics
from modelfence.evaluation.text import percent

Role = Literal["authorized", "unauthorized"]

_COLLAPSE_SHARE = 0.8  # of all answers on one class,
_COLLAPSE_EXCESS = 0.25  # and this much more than the class's share of the images
_RESTORED = 0.10  # accuracy that a BatchNorm refresh brings back before it is worth a sentence


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    """How one model does on one domain; accuracies and shares are fractions in 0..1.

    Attributes:
        accuracy: Share of right answers.
        balanced_accuracy: Mean recall of the classes that occur.
        most_predicted_class: The class answered most often, -1 when no answer was finite.
        most_predicted_share: Its share of all images.
        non_finite: Images whose output held NaN or infinity; they count as wrong.
        refreshed_accuracy: Accuracy once the running statistics are re-estimated on unlabelled images of the
            domain; None for a model without BatchNorm.
    """

    accuracy: float
    balanced_accuracy: float
    most_predicted_class: int
    most_predicted_share: float
    non_finite: int = 0
    refreshed_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class DomainScore(ModelScore):
    """How a model does on one domain, beside the model it was made from; differences are NaN without that.

    Attributes:
        name: Name of the domain.
        role: Whether the owner authorized it.
        images: Number of images evaluated.
        chance: Accuracy of guessing, 1/K.
        top_label_share: Share of the most predicted class among the true labels.
        before: The original model's numbers, or None.
    """

    name: str
    role: Role
    images: int
    chance: float
    top_label_share: float
    before: ModelScore | None = None

    @property
    def drop(self) -> float:
        """Lost accuracy, as a fraction (times 100: points)."""
        return metrics.drop(self.before.accuracy, self.accuracy) if self.before else math.nan

    @property
    def relative_drop(self) -> float:
        """Lost share of the accuracy before."""
        return metrics.relative_drop(self.before.accuracy, self.accuracy) if self.before else math.nan

    @property
    def closure(self) -> float:
        """Share of the above-chance accuracy taken away; NaN where there was nothing to protect.

        All closures are NaN for an authorized domain: nothing was to be taken away there.
        """
        return self._closure("accuracy")

    @property
    def closure_balanced(self) -> float:
        """Closure computed from balanced accuracies: not misled by a collapse on an unbalanced set."""
        return self._closure("balanced_accuracy")

    @property
    def closure_refreshed(self) -> float:
        """Closure computed from both models' accuracies after a BatchNorm refresh; NaN without BatchNorm.

        ``(original refreshed - masked refreshed) / (original refreshed - chance)``: what is left of the
        protection when an attacker re-estimates the running statistics of the shipped model, measured
        against the same attacker on the original model.
        """
        return self._closure("refreshed_accuracy")

    def _closure(self, kind: str) -> float:
        before, after = getattr(self.before, kind, None), getattr(self, kind)
        if self.role == "authorized" or before is None or after is None:
            return math.nan
        return metrics.closure(before, after, self.chance)

    @property
    def flags(self) -> tuple[str, ...]:
        """What must be said beside the numbers, as plain sentences."""
        sentences = (
            self._nothing_to_protect(),
            self._collapse(),
            self._below_chance(),
            self._undone_by_refresh(),
            f"{self.non_finite} images got a non-finite output and count as wrong" if self.non_finite else "",
        )
        return tuple(sentence for sentence in sentences if sentence)

    def _nothing_to_protect(self) -> str:
        if self.role == "authorized" or self.before is None or not math.isnan(self.closure):
            return ""
        reached = percent(self.before.accuracy)
        return (
            f"nothing to protect: the original model reached {reached} %, less than 5 points above chance "
            f"({percent(self.chance)} %)"
        )

    def _collapse(self) -> str:
        excess = self.most_predicted_share - self.top_label_share
        if self.most_predicted_share < _COLLAPSE_SHARE or excess < _COLLAPSE_EXCESS:
            return ""
        return (
            f"collapsed to class {self.most_predicted_class}: {percent(self.most_predicted_share)} % of the "
            "images get this answer, so read balanced accuracy"
        )

    def _below_chance(self) -> str:
        error = math.sqrt(self.chance * (1 - self.chance) / self.images)  # of guessing, on this many images
        if self.balanced_accuracy >= self.chance - max(3 * error, self.chance / 4):
            return ""
        return (
            f"below chance: balanced accuracy is {percent(self.balanced_accuracy)} %, and answers that are "
            "wrong so regularly still tell something"
        )

    def _undone_by_refresh(self) -> str:
        if self.role == "authorized" or self.before is None or self.refreshed_accuracy is None:
            return ""
        if self.refreshed_accuracy - self.accuracy < _RESTORED:
            return ""
        return (
            f"a BatchNorm refresh on unlabelled images brings {percent(self.accuracy)} % accuracy back to "
            f"{percent(self.refreshed_accuracy)} %"
        )
