"""What every report says in words: limits, footnotes, the resolved configuration as flat lines."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent


def limits(evaluation: Evaluation | None, *, masked: bool = True) -> list[str]:
    """Say what the numbers don't promise.

    Args:
        evaluation: The table that is reported, if there is one.
        masked: Whether a mask confines the model; else it was retrained.

    Returns:
        Plain sentences, one limit each.
    """
    sentences = [
        *_LOCKS[masked],
        "The numbers hold for the domains listed here. A domain that wasn't measured can behave otherwise.",
        "An accuracy near chance doesn't mean that nothing is left: features inside the network still separate "
        "classes, and answers that are wrong in a regular way can be turned around.",
        "This is one run. Another seed can shift single accuracies by several points.",
    ]
    if evaluation is None or evaluation.refresh_images is None:
        return sentences
    return [
        *sentences,
        "The network uses BatchNorm. Anyone can re-estimate its running statistics on unlabelled images; the "
        f"refreshed accuracies say what that brings back with up to {evaluation.refresh_images} images.",
    ]


_LOCKS = {
    True: (
        "A mask is no lock: who holds labelled images of an unauthorized domain can retrain the model, and few "
        "labels may be enough.",
        "Who holds base and mask can drop the mask, and who holds base and masked checkpoint can compare them: ship "
        "the masked checkpoint alone and keep base and mask.",
    ),
    False: (
        "Retraining is no lock: who holds labelled images of an unauthorized domain can train the model further, and "
        "few labels may be enough.",
    ),
}


def footnotes(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return what must be said about each domain: (name, sentence), for the domains with any flag."""
    return [(score.name, "; ".join(score.flags)) for score in evaluation.scores if score.flags]


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a nested configuration to dotted keys.

    Args:
        config: Nested mappings; any other value is written by ``str``.
        prefix: Put before every key.

    Returns:
        (key, value) pairs in the order given.

    Example:
        >>> flat({"seed": 0, "method": {"name": "SAMap", "steps": 400}})
        [('seed', '0'), ('method.name', 'SAMap'), ('method.steps', '400')]
    """
    lines: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            lines += flat(value, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", str(value)))
    return lines


class Column(NamedTuple):
    """A column of a report's table.

    Attributes:
        group: Heading over neighbouring columns, empty for a column by itself.
        title: Heading of the column.
        values: One text per domain; numbers in percent with one decimal, ``-`` where undefined.
    """

    group: str
    title: str
    values: list[str]


def columns(evaluation: Evaluation) -> list[Column]:
    """Return the table of a report, column by column: domain, role, numbers.

    Args:
        evaluation: The table that is reported.

    Returns:
        The columns; those that nothing fills are left out.
    """
    scores = evaluation.scores
    compared = any(score.before for score in scores)
    refresh = evaluation.refresh_images is not None
    found = [
        Column("", "domain", [score.name for score in scores]),
        Column("", "role", [score.role for score in scores]),
        Column("", "images", [f"{score.images:,}" for score in scores]),
    ]
    measured = [("accuracy", "accuracy"), ("balanced", "balanced_accuracy")]
    for title, key in [*measured, *([("refreshed", "refreshed_accuracy")] if refresh else [])]:
        after = [percent(getattr(score, key)) for score in scores]
        if compared:
            found.append(Column(title, "before", [percent(getattr(score.before, key, None)) for score in scores]))
            found.append(Column(title, "after", after))
        else:
            found.append(Column("", title, after))
    if compared:
        derived = [("drop", "points", "drop"), ("drop", "relative", "relative_drop"), ("closure", "plain", "closure")]
        derived.append(("closure", "balanced", "closure_balanced"))
        derived += [("closure", "refreshed", "closure_refreshed")] if refresh else []
        found += [Column(group, title, [percent(getattr(s, key)) for s in scores]) for group, title, key in derived]
    answers = [f"{score.most_predicted_class}: {percent(score.most_predicted_share)}" for score in scores]
    return [*found, Column("", "most given class", answers)]
