"""The paper's numbers, to stand beside ours; ratios are recomputed from its accuracies."""

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from modelfence.evaluation import metrics

TITLES = {"SAMap": "SA-MAP", "SFMap": "SF-MAP", "DFMap": "DF-MAP"}
"""What the paper calls our methods."""
SHORT = {"mnist": "MT", "usps": "US", "svhn": "SN", "mnist_m": "MM", "cifar10": "CIFAR10", "stl10": "STL10"} | {
    "visda_t": "VisDA T",
    "visda_v": "VisDA V",
}
"""What the paper calls our domains."""


class Row(NamedTuple):
    """One row of a table: accuracies are fractions, by domain, before and after.

    Attributes:
        accuracies: Before and after by domain, the source first.
        source_drop: Relative drop of the source's accuracy.
        target_drop: That of the targets' summed accuracies.
        st_d: Ratio of the two.
    """

    accuracies: dict[str, tuple[float, float]]
    source_drop: float
    target_drop: float
    st_d: float


def row_of(accuracies: dict[str, tuple[float, float]], source: str) -> Row:
    """Compute the drops and ST-D of a row.

    Args:
        accuracies: Before and after as fractions, by domain.
        source: Which of the domains is the source.

    Example:
        >>> row_of({"a": (0.8, 0.76), "b": (0.5, 0.25)}, "a").st_d.__round__(3)
        0.1
    """
    own = accuracies[source]
    targets = [pair for name, pair in accuracies.items() if name != source]
    before, after = [pair[0] for pair in targets], [pair[1] for pair in targets]
    ordered = {source: own} | {name: pair for name, pair in accuracies.items() if name != source}
    target_drop = metrics.relative_drop(sum(before), sum(after))
    return Row(ordered, metrics.relative_drop(*own), target_drop, metrics.st_d(*own, before, after))


def row(setting: str, method: str, source: str) -> Row | None:
    """Return a row of the paper's digit tables, or None where it has no such row.

    Args:
        setting: "sa", "sf" or "df".
        method: Such as "NTL" or "SAMap"; a recipe behind ":" is ignored.
        source: Name of the source domain.

    Example:
        >>> [round(value, 3) for value in row("sa", "SAMap", "mnist").accuracies["usps"]]
        [0.963, 0.143]
    """
    rows = _numbers().get(setting, {}).get(method.partition(":")[0], {})
    if source not in rows:
        return None
    pairs = {name: (before / 100, after / 100) for name, (before, after) in rows[source].items()}
    return row_of(pairs, source)


def ownership(domain: str, method: str) -> tuple[float, float] | None:
    """Return the accuracies on marked and on clean images, as fractions; None where the paper has none.

    Args:
        domain: Name of the domain.
        method: "SL", "NTL", "CUTI" or "SAMap".

    Example:
        >>> [round(value, 3) for value in ownership("mnist", "SL")]
        [0.992, 0.994]
    """
    pair = _numbers()["ownership"].get(domain, {}).get(method.partition(":")[0])
    return None if pair is None else (pair[0] / 100, pair[1] / 100)


def degradation(method: str, source: str, target: str) -> float | None:
    """Return source accuracy less target accuracy, a fraction, where the paper's text gives it.

    Args:
        method: Such as "SFMap".
        source: Name of the source domain.
        target: Name of the target domain.

    Example:
        >>> degradation("SFMap", "cifar10", "stl10")
        0.38
    """
    value = _numbers()["degradation"].get(method.partition(":")[0], {}).get(f"{source}>{target}")
    return None if value is None else value / 100


def title(method: str) -> str:
    """Return what the paper calls a method, with our recipe where that isn't the default.

    Args:
        method: Our name.

    Example:
        >>> title("SAMap:paper"), title("NTL")
        ('SA-MAP (paper recipe)', 'NTL')
    """
    name, _, recipe = method.partition(":")
    return TITLES.get(name, name) + (f" ({recipe} recipe)" if recipe else "")


def short(domain: str) -> str:
    """Return what the paper calls a domain.

    Args:
        domain: Our name.
    """
    return SHORT.get(domain, domain)


@cache
def _numbers() -> dict[str, Any]:
    text = resources.files("modelfence.bench").joinpath("paper.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
