"""Convergence: accuracies on source and target while the methods of the source-free setting learn."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from modelfence.bench import methods, paper
from modelfence.bench.cells import Cell
from modelfence.bench.figures import Curve, curves_figure
from modelfence.bench.rendering import OPEN, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.kind import Built, Kind, cells_of, cost_note, pairs_of
from modelfence.errors import InputError

_SHARES = (0.25, 0.5, 0.75, 1.0)
_EVERY = {"smoke": 5, "cpu": 25, "full": 25}
_NOTE = (
    "Accuracies in percent on validation images that no method sees, after a share of its steps, mean ± standard "
    "deviation over seeds. The paper's figure (MT -> US) has no numbers; its text says that SF-MAP keeps the balance "
    "where NTL and CUTI forget the source."
)


def what(_: str, __: str) -> Sequence[str]:
    """Return the pair of the paper's figure.

    Args:
        _: The setting: there is one.
        __: The budget: all have the same.
    """
    return ("mnist>usps",)


def cells(request: Request) -> list[Cell]:
    """Return the cells of the table, seed by seed.

    Args:
        request: What was asked for.

    Raises:
        InputError: A method doesn't learn, so that it has no curve.
    """
    if methods.SOURCE_MODEL in request.methods:
        raise InputError(f"--methods: {methods.SOURCE_MODEL} learns nothing, so it has no curve; leave it out")
    found = [cell for method in request.methods for pair in pairs_of(request) for cell in _cells(request, pair, method)]
    return sorted(found, key=lambda cell: cell.seed)


def _cells(request: Request, pair: tuple[str, tuple[str, ...]], method: str) -> list[Cell]:
    return cells_of(request, pair, method, options=(("evaluate_every", _EVERY[request.budget]),))


def build(request: Request, results: Results) -> Built:
    """Make the table and the curves.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    curves: dict[str, list[Curve]] = {}
    used: list[Any] = []
    for pair in pairs_of(request):
        for method in request.methods:
            mine = _cells(request, pair, method)
            made = results.of(mine)
            used += made
            for name in (pair[0], *pair[1]):
                found = [curve_of(record["history"], name) for record in made]
                by_share = [[_at(curve, share) for curve in found] for share in _SHARES]
                texts = [spread(values) if values else results.state(mine) or OPEN for values in by_share]
                rows.append([paper.title(method), paper.short(name), *texts])
                facts = {"table": request.name, "method": method, "domain": name}
                records += [
                    record_of(values, **facts, share=share)
                    for share, values in zip(_SHARES, by_share, strict=True)
                    if values
                ]
                if found:
                    curves.setdefault(paper.title(method), []).append((paper.short(name), name == pair[0], found[0]))
    head = ["method", "domain", *(f"{share:.0%} of steps" for share in _SHARES)]
    table = Table(
        f"Convergence, {', '.join(request.what)}, budget {request.budget}",
        head,
        rows,
        texts=2,
        notes=(_NOTE, cost_note(used)),
        records=records,
    )
    return Built(table, {"curves": partial(curves_figure, curves)} if curves else {})


def curve_of(history: Sequence[Mapping[str, float | None]], domain: str) -> list[tuple[float, float]]:
    """Return a domain's accuracies by step: pairs of step and fraction.

    Args:
        history: Of a run that watched the domain.
        domain: Its name.

    Example:
        >>> curve_of([{"step": 5, "watch:usps": 0.5}, {"step": 10}], "usps")
        [(5, 0.5)]
    """
    known = [(row["step"], row.get(f"watch:{domain}")) for row in history]
    return [(step, value) for step, value in known if step is not None and value is not None]


def _at(curve: Sequence[tuple[float, float]], share: float) -> float:
    """Return the accuracy at the last measurement within a share of the steps; the first one where there is none."""
    if not curve:
        return math.nan
    reached = [value for step, value in curve if step <= share * curve[-1][0]]
    return reached[-1] if reached else curve[0][1]


KIND = Kind("Convergence curves of the source-free methods.", ("sf",), methods.DEFAULTS.__getitem__, what, cells, build)
