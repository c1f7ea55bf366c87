"""What every report says in words: limits, footnotes, the resolved configuration as flat lines."""

from collections.abc import Mapping
from typing import Any

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent


def limits(evaluation: Evaluation) -> list[str]:
    """Say what the numbers don't promise.

    Args:
        evaluation: The table that is reported.

    Returns:
        Plain sentences, one limit each.
    """
    sentences = [
        "A mask is no lock: who holds labelled images of an unauthorized domain can retrain the model, and few "
        "labels may be enough.",
        "Who holds base and mask can drop the mask, and who holds base and masked checkpoint can compare them: ship "
        "the masked checkpoint alone and keep base and mask.",
        "The numbers hold for the domains listed here. A domain that wasn't measured can behave otherwise.",
        "An accuracy near chance doesn't mean that nothing is left: features inside the network still separate "
        "classes, and answers that are wrong in a regular way can be turned around.",
        "This is one run. Another seed can shift single accuracies by several points.",
    ]
    if evaluation.refresh_images is None:
        return sentences
    return [
        *sentences,
        "The network uses BatchNorm. Anyone can re-estimate its running statistics on unlabelled images; the "
        f"refreshed accuracies say what that brings back with up to {evaluation.refresh_images} images.",
    ]


def footnotes(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return every flag of every domain as (domain name, sentence)."""
    return [(score.name, flag) for score in evaluation.scores for flag in score.flags]


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


def cells(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Return the table of a report as text: column names, and one row per domain.

    Args:
        evaluation: The table that is reported; columns that nothing fills are left out.

    Returns:
        Header and rows of equal length; numbers in percent with one decimal, ``-`` where undefined.
    """
    compared = any(score.before for score in evaluation.scores)
    refresh = evaluation.refresh_images is not None
    columns: list[tuple[str, list[str]]] = [
        ("domain", [score.name for score in evaluation.scores]),
        ("role", [score.role for score in evaluation.scores]),
        ("images", [str(score.images) for score in evaluation.scores]),
    ]
    measured = [("accuracy", "accuracy"), ("balanced accuracy", "balanced_accuracy")]
    measured += [("refreshed accuracy", "refreshed_accuracy")] if refresh else []
    for title, key in measured:
        if compared:
            before = [percent(getattr(score.before, key, None)) for score in evaluation.scores]
            columns.append((f"{title} before", before))
        after = [percent(getattr(score, key)) for score in evaluation.scores]
        columns.append((f"{title} after" if compared else title, after))
    if compared:
        derived = [("drop", "drop"), ("relative drop", "relative_drop"), ("closure", "closure")]
        derived += [("closure, balanced", "closure_balanced")]
        derived += [("closure, refreshed", "closure_refreshed")] if refresh else []
        for title, key in derived:
            columns.append((title, [percent(getattr(score, key)) for score in evaluation.scores]))
    answers = [f"{score.most_predicted_class}: {percent(score.most_predicted_share)}" for score in evaluation.scores]
    columns.append(("most given class", answers))
    return [title for title, _ in columns], [list(row) for row in zip(*(column for _, column in columns), strict=True)]
