"""Tables with one row for each run: pairs of domains, backbones, parts of the loss."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from modelfence.bench import paper
from modelfence.bench.cells import Cell, Record
from modelfence.bench.figures import bars_figure
from modelfence.bench.rendering import UNDEFINED, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.kind import Built, accuracies_by_seed, cost_note
from modelfence.evaluation import metrics

_NUMBERS = (
    ("source before", 100, 1),
    ("source after", 100, 1),
    ("target before", 100, 1),
    ("target after", 100, 1),
    ("degradation", 100, 1),
    ("source drop, %", 100, 1),
    ("target drop, %", 100, 1),
    ("ST-D", 1, 3),
)
NOTE = (
    "Accuracies in percent, mean ± standard deviation over seeds. Degradation is source accuracy less target accuracy "
    "after, in points (the red line of the paper's figures); drops are relative."
)


class Line(NamedTuple):
    """One row.

    Attributes:
        words: Its first columns.
        source: Name of the source domain.
        target: Name of the target domain.
        cells: One for each seed; of the source model when ``unprotected``.
        unprotected: Show what the cells say of the source model.
        printed: The paper's degradation, a fraction.
    """

    words: tuple[str, ...]
    source: str
    target: str
    cells: list[Cell]
    unprotected: bool = False
    printed: float | None = None


def compare(
    request: Request,
    results: Results,
    title: str,
    words: Sequence[str],
    lines: Sequence[Line],
    notes: Sequence[str] = (),
) -> Built:
    """Make a table and its figure, bars as in the paper.

    Args:
        request: What was asked for.
        results: Its cells.
        title: One line.
        words: Heads of the first columns.
        lines: The rows.
        notes: Sentences under the table.
    """
    printed = any(line.printed is not None for line in lines)
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    bars: list[tuple[str, float, float]] = []
    used: dict[str, Record] = {}
    for line in lines:
        made = results.of(line.cells)
        used |= {str(record["cell"]): record for record in made}
        numbers = [numbers_of(*pair, unprotected=line.unprotected) for pair in _pairs(line, made)]
        texts = _texts(numbers, results.state(line.cells))
        theirs = [UNDEFINED if line.printed is None else spread([line.printed])] if printed else []
        first, *rest = line.words
        rows.append([results.marked(first, line.cells), *rest, *texts, *theirs])
        records += _records(request, words, line, numbers)
        if numbers:
            after = [sum(one[place] for one in numbers) / len(numbers) for place in (1, 3)]
            bars.append((" ".join(line.words), after[0], after[1]))
    head = [*words, *(name for name, _, _ in _NUMBERS), *(["paper: degradation"] if printed else [])]
    table = Table(
        f"{title}, budget {request.budget}",
        head,
        rows,
        texts=len(words),
        notes=(NOTE, *notes, cost_note(list(used.values()))),
        records=records,
    )
    return Built(table, {"bars": partial(bars_figure, bars)} if bars else {})


def numbers_of(source: tuple[float, float], target: tuple[float, float], *, unprotected: bool = False) -> list[float]:
    """Return a row's numbers, in the order of the columns, as fractions.

    Args:
        source: Accuracy before and after.
        target: The same.
        unprotected: Of the source model: there is no before.

    Example:
        >>> [round(value, 2) for value in numbers_of((0.8, 0.76), (0.5, 0.25))]
        [0.8, 0.76, 0.5, 0.25, 0.51, 0.05, 0.5, 0.1]
    """
    if unprotected:
        return [math.nan, source[0], math.nan, target[0], source[0] - target[0], math.nan, math.nan, math.nan]
    ratio = metrics.st_d(*source, [target[0]], [target[1]])
    drops = metrics.relative_drop(*source), metrics.relative_drop(*target)
    return [*source, *target, source[1] - target[1], *drops, ratio]


def _pairs(line: Line, made: Sequence[Record]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return accuracies of source and target for each seed; of the source model, which no seed changes, once."""
    found = [(one[line.source], one[line.target]) for one in accuracies_by_seed(made).values() if line.target in one]
    return found[:1] if line.unprotected else found


def _texts(numbers: Sequence[Sequence[float]], state: str) -> list[str]:
    if not numbers:
        return [state or UNDEFINED] * len(_NUMBERS)
    columns = zip(*numbers, strict=True)
    return [
        spread(values, scale=scale, digits=digits) for values, (_, scale, digits) in zip(columns, _NUMBERS, strict=True)
    ]


def _records(
    request: Request, words: Sequence[str], line: Line, numbers: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    facts = {"table": request.name, **dict(zip(words, line.words, strict=True))}
    found = []
    for place, (name, _, _) in enumerate(_NUMBERS if numbers else ()):
        found.append(record_of([one[place] for one in numbers], **facts, who="ours", quantity=name.removesuffix(", %")))
    if line.printed is not None:
        found.append(record_of([line.printed], **facts, who="paper", quantity="degradation"))
    return found


def short_pair(source: str, target: str) -> str:
    """Return a pair's name in the paper's words.

    Args:
        source: Name of the source domain.
        target: Name of the target domain.
    """
    return f"{paper.short(source)} -> {paper.short(target)}"
