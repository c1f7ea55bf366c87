"""An evaluation with numbers set by hand, shared by the report tests."""

from collections.abc import Callable, Sequence

import pytest

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.scores import DomainScore, ModelScore


def _score(name: str, role: str, before: float | None, after: float, refreshed: float | None) -> DomainScore:
    answers = {"most_predicted_class": 3, "most_predicted_share": 0.2}
    original = None
    if before is not None:
        original = ModelScore(accuracy=before, balanced_accuracy=before, refreshed_accuracy=refreshed, **answers)
    return DomainScore(
        name=name,
        role=role,
        images=1234,
        chance=0.1,
        accuracy=after,
        balanced_accuracy=after,
        refreshed_accuracy=refreshed,
        top_label_share=0.1,
        before=original,
        **answers,
    )


@pytest.fixture(scope="session")
def make_evaluation() -> Callable[..., Evaluation]:
    def make(names: Sequence[str] = ("mnist", "usps"), *, compared: bool = True, refresh: bool = True) -> Evaluation:
        scores = [_score(names[0], "authorized", 0.986 if compared else None, 0.971, 0.984 if refresh else None)]
        for name in names[1:]:
            scores.append(_score(name, "unauthorized", 0.784 if compared else None, 0.112, 0.716 if refresh else None))
        return Evaluation(tuple(scores), classes=10, refresh_images=500 if refresh else None)

    return make
