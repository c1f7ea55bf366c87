"""The table of an evaluation: one score per domain, row values, JSON both ways."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from modelfence.errors import InputError
from modelfence.evaluation import metrics
from modelfence.evaluation.scores import DomainScore, ModelScore, Role
from modelfence.evaluation.text import as_text


@dataclass(frozen=True)
class Evaluation:
    """A table of domains with its row values; ``print`` shows it, ``to_dict`` makes it JSON.

    Attributes:
        scores: One entry per domain, in the order given.
        classes: Number of classes K of the model.
        refresh_images: Unlabelled images per domain used for the refreshed accuracies; None for networks
            without BatchNorm.

    Example:
        >>> good = {"accuracy": 0.9, "balanced_accuracy": 0.9}
        >>> answers = {"most_predicted_class": 0, "most_predicted_share": 0.1}
        >>> facts = {"images": 10, "chance": 0.1, "top_label_share": 0.1, **answers}
        >>> before = ModelScore(**good, **answers)
        >>> a = DomainScore(name="a", role="authorized", **good, **facts, before=before)
        >>> bad = {"accuracy": 0.1, "balanced_accuracy": 0.1}
        >>> b = DomainScore(name="b", role="unauthorized", **bad, **facts, before=before)
        >>> table = Evaluation((a, b), classes=10)
        >>> table.st_d, round(table.closure, 6), Evaluation.from_dict(table.to_dict()) == table
        (0.0, 1.0, True)
    """

    scores: tuple[DomainScore, ...]
    classes: int
    refresh_images: int | None = None

    @property
    def chance(self) -> float:
        """Accuracy of guessing, 1/K."""
        return 1.0 / self.classes

    @property
    def authorized(self) -> tuple[DomainScore, ...]:
        """The scores of the authorized domains."""
        return tuple(score for score in self.scores if score.role == "authorized")

    @property
    def unauthorized(self) -> tuple[DomainScore, ...]:
        """The scores of the unauthorized domains."""
        return tuple(score for score in self.scores if score.role == "unauthorized")

    @property
    def relative_source_drop(self) -> float:
        """Lost share of the accuracy on the authorized domains, summed before the ratio."""
        return _relative_drop(self.authorized)

    @property
    def relative_target_drop(self) -> float:
        """Lost share of the accuracy on the unauthorized domains, summed before the ratio."""
        return _relative_drop(self.unauthorized)

    @property
    def st_d(self) -> float:
        """Source/target drop ratio of this table's row, see :func:`modelfence.evaluation.metrics.st_d`.

        All unauthorized domains count, those near chance too, as in the paper. Several authorized domains
        enter with the mean of their accuracies.
        """
        known = [(score.before.accuracy, score.accuracy) for score in self.authorized if score.before]
        targets = [(score.before.accuracy, score.accuracy) for score in self.unauthorized if score.before]
        if not known or not targets:
            return math.nan
        source = [math.fsum(column) / len(known) for column in zip(*known, strict=True)]
        return metrics.st_d(source[0], source[1], [b for b, _ in targets], [a for _, a in targets])

    @property
    def closure(self) -> float:
        """Closure of the unauthorized domains together, see :func:`modelfence.evaluation.metrics.row_closure`."""
        return self._closure("accuracy")

    @property
    def closure_refreshed(self) -> float:
        """The same after a BatchNorm refresh of both models."""
        return self._closure("refreshed_accuracy")

    def _closure(self, kind: str) -> float:
        pairs = [(getattr(score.before, kind, None), getattr(score, kind)) for score in self.unauthorized]
        return metrics.row_closure([(b, a) for b, a in pairs if b is not None and a is not None], self.chance)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat record per domain, JSON-ready: numbers as fractions, NaN as None.

        Returns:
            Records with the fields of :class:`DomainScore`, the derived numbers, and ``before_*`` columns.
        """
        records = []
        for score in self.scores:
            record = _score_record(score)
            before = record.pop("before") or {}
            records.append(record | {f"before_{key}": value for key, value in before.items()})
        return records

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values, NaN as None; :meth:`from_dict` takes it back."""
        return {
            "classes": self.classes,
            "refresh_images": self.refresh_images,
            "scores": [_score_record(score) for score in self.scores],
        } | {key: _json_number(getattr(self, key)) for key in _SUMMARY}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "evaluation record") -> "Evaluation":
        """Rebuild an evaluation from :meth:`to_dict`; derived numbers are computed anew.

        Args:
            data: The dictionary.
            where: What errors call it, such as the file it was read from.

        Raises:
            InputError: A field is missing or has the wrong kind; the text names it.
        """
        facts = _fields(cls, data, where)
        records = data.get("scores")
        if not isinstance(records, list) or not records or facts["classes"] < 1:
            raise _wrong(f"{where}.scores", "a list of at least one domain, and classes above 0", records)
        scores = tuple(_score_from(record, f"{where}.scores[{row}]") for row, record in enumerate(records))
        return cls(scores=scores, **facts)

    def __str__(self) -> str:
        return as_text(self)


_SUMMARY = ("chance", "st_d", "relative_source_drop", "relative_target_drop", "closure", "closure_refreshed")
_DERIVED = ("drop", "relative_drop", "closure", "closure_balanced", "closure_refreshed")


def _score_record(score: DomainScore) -> dict[str, Any]:
    record = {key: _json_number(value) for key, value in dataclasses.asdict(score).items()}
    if score.before is not None:
        record["before"] = {key: _json_number(value) for key, value in record["before"].items()}
    record |= {key: _json_number(getattr(score, key)) for key in _DERIVED}
    return {"name": score.name, "role": score.role} | record | {"flags": list(score.flags)}


def _score_from(record: Any, where: str) -> DomainScore:
    own = _fields(DomainScore, record, where)
    before = record.get("before")
    if own["role"] not in ("authorized", "unauthorized") or own["images"] < 1 or not 0 < own["chance"] <= 1:
        raise _wrong(where, "a role, images and a chance", [own[key] for key in ("role", "images", "chance")])
    if before is not None:
        own["before"] = ModelScore(**_fields(ModelScore, before, f"{where}.before"))
    return DomainScore(**own)


_KINDS: Mapping[object, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    int: ("a whole number", (int,)),
    int | None: ("a whole number or null", (int, NoneType)),
    float: ("a number or null", (int, float, NoneType)),
    float | None: ("a number or null", (int, float, NoneType)),
    Role: ("text", (str,)),
}


def _fields(kind: type, record: Any, where: str) -> dict[str, Any]:
    """Check the plain fields of a dataclass in a JSON record; null stands for NaN where a number is needed."""
    if not isinstance(record, Mapping):
        raise _wrong(where, "a table", record)
    found = {}
    for field in dataclasses.fields(kind):
        if field.type not in _KINDS:  # scores, before
            continue
        text, types = _KINDS[field.type]
        value = record.get(field.name, ...)
        if not isinstance(value, types) or isinstance(value, bool) or (isinstance(value, int) and abs(value) > 2**53):
            raise _wrong(f"{where}.{field.name}", text, value)
        found[field.name] = math.nan if value is None and field.type is float else value
    return found


def _wrong(where: str, wanted: str, value: object) -> InputError:
    given = "nothing" if value is ... else f"{value!r:.40}"
    return InputError(f"{where}: must be {wanted} (got {given}); use what to_dict() wrote")


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _relative_drop(scores: tuple[DomainScore, ...]) -> float:
    pairs = [(score.before.accuracy, score.accuracy) for score in scores if score.before]
    return metrics.relative_drop(math.fsum(b for b, _ in pairs), math.fsum(a for _, a in pairs))
