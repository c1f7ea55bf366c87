"""The evaluation as a plain text table of at most 110 columns."""

import math
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelfence.evaluation.result import Evaluation
    from modelfence.evaluation.scores import DomainScore, ModelScore

_NAME_WIDTH = 19
_LINE_WIDTH = 110


def percent(fraction: float | None) -> str:
    """Write a fraction as percent with one decimal, without the sign; ``-`` where it is undefined.

    Example:
        >>> percent(0.1234), percent(float("nan")), percent(None), percent(-0.0001)
        ('12.3', '-', '-', '0.0')
    """
    if fraction is None or math.isnan(fraction):
        return "-"
    written = f"{100 * fraction:.1f}"
    return "0.0" if written == "-0.0" else written


def ratio(value: float) -> str:
    """Write ST-D with three decimals; ``undefined`` where it has no value.

    Example:
        >>> ratio(0.24421), ratio(float("nan"))
        ('0.244', 'undefined')
    """
    return "undefined" if math.isnan(value) else f"{value:.3f}"


def as_text(evaluation: "Evaluation") -> str:
    """Lay out an evaluation for a terminal.

    Args:
        evaluation: What :func:`modelfence.evaluation.table.evaluate` returned.

    Returns:
        Lines of at most 110 characters: header, one line per domain, row values, footnotes.
    """
    compared = any(score.before for score in evaluation.scores)
    refresh = any(score.refreshed_accuracy is not None for score in evaluation.scores)
    table = [_line(cells) for cells in _header(compared, refresh)]
    table.append("-" * len(table[-1]))
    table += [_line(_cells(score, compared, refresh)) for score in evaluation.scores]
    return "\n".join([*table, "", *_summary(evaluation, compared, refresh), *_footnotes(evaluation)]).rstrip()


def shorten(name: str, most: int = 26) -> str:
    """Cut the middle out of a long name.

    Args:
        name: Any text.
        most: Characters kept at most, at least 9.

    Returns:
        The name, or its head and tail around three dots.

    Example:
        >>> shorten("a domain with a long name", most=15)
        'a do...ong name'
    """
    if len(name) <= most:
        return name
    head = (most - 3) // 3
    return f"{name[:head]}...{name[head + 3 - most :]}"


def _line(cells: list[tuple[str, int]]) -> str:
    name, *rest = cells
    left = shorten(*name)
    return (left.ljust(name[1]) + "".join(text.rjust(width) for text, width in rest)).rstrip()


def _header(compared: bool, refresh: bool) -> list[list[tuple[str, int]]]:
    pair = [("before", 8), ("after", 7)] if compared else [("", 11)]
    width = sum(size for _, size in pair)
    top: list[tuple[str, int]] = [("", _NAME_WIDTH), ("", 7), ("accuracy", width), ("balanced", width)]
    low: list[tuple[str, int]] = [("domain (percent)", _NAME_WIDTH), ("images", 7), *pair, *pair]
    if refresh:
        top.append(("refreshed", width))
        low += pair
    if compared:
        closures = [("plain", 8), ("bal.", 6), *([("refr.", 7)] if refresh else [])]
        top += [("", 7), ("closure", sum(size for _, size in closures))]
        low += [("drop", 7), *closures]
    return [[*top, ("most given", 11)], [*low, ("class", 11)]]


def _cells(score: "DomainScore", compared: bool, refresh: bool) -> list[tuple[str, int]]:
    def pair(key: str) -> list[tuple[str, int]]:
        before: ModelScore | None = score.before
        after = percent(getattr(score, key))
        return [(percent(getattr(before, key, None)), 8), (after, 7)] if compared else [(after, 11)]

    mark = "* " if score.role == "authorized" else "  "
    cells = [(mark + score.name, _NAME_WIDTH), (str(score.images), 7)]
    cells += pair("accuracy") + pair("balanced_accuracy")
    if refresh:
        cells += pair("refreshed_accuracy")
    if compared:
        closures = [(score.closure, 8), (score.closure_balanced, 6), (score.closure_refreshed, 7)][: 2 + refresh]
        cells.append((percent(score.drop), 7))
        cells += [(percent(value), width) for value, width in closures]
    top = f"{score.most_predicted_class}: {percent(score.most_predicted_share)}"
    return [*cells, (top, 11)]


def _summary(evaluation: "Evaluation", compared: bool, refresh: bool) -> list[str]:
    lines = [f"* authorized. {evaluation.classes} classes, chance {percent(evaluation.chance)} %."]
    if refresh:
        lines.append(
            "refreshed: accuracy once BatchNorm statistics are re-estimated on up to "
            f"{evaluation.refresh_images} unlabelled images."
        )
    if compared and evaluation.authorized and evaluation.unauthorized:
        lines.append(
            f"ST-D {ratio(evaluation.st_d)}: authorized accuracy fell by "
            f"{percent(evaluation.relative_source_drop)} % of itself, unauthorized by "
            f"{percent(evaluation.relative_target_drop)} %."
        )
        if math.isnan(evaluation.st_d):
            lines.append("ST-D is undefined where the unauthorized accuracies together do not drop.")
    return lines


def _footnotes(evaluation: "Evaluation") -> list[str]:
    lines = []
    for score in evaluation.scores:
        for flag in score.flags:
            lines += textwrap.wrap(f"- {score.name}: {flag}.", _LINE_WIDTH, subsequent_indent="  ")
    return lines
