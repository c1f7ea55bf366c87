"""Convergence: accuracies on source and target while the methods learn, and when the target is confined."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from modelfence.bench import methods, paper
from modelfence.bench.cells import Cell, Record
from modelfence.bench.figures import Curve, curves_figure
from modelfence.bench.rendering import OPEN, UNDEFINED, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.kind import Built, Kind, cells_of, cost_note, pairs_of
from modelfence.errors import InputError

_SHARES = (0.25, 0.5, 0.75, 1.0)
_EVERY = {"smoke": 5, "cpu": 25, "full": 25}
_NEAR_CHANCE, _KEPT = 0.05, 0.95
_NOTES = (
    "Accuracies in percent on validation images that no method sees, after a share of its steps, mean ± standard "
    "deviation over seeds. The paper's figure (MT -> US, source-free) has no numbers; its text says that SF-MAP keeps "
    "the balance where NTL and CUTI forget the source.",
    "Confined: every target at most 5 points above chance while the source keeps 95 % of its accuracy. The columns say "
    "at which step, and after how many seconds of learning, that was first measured: neither the training of the "
    "source model, from which NTL and CUTI go on, nor the making of synthetic images before the first step is counted.",
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
        several = len(request.what) > 1
        among = f", {paper.short(pair[0])} -> {'+'.join(map(paper.short, pair[1]))}" if several else ""
        for method in request.methods:
            mine = _cells(request, pair, method)
            made = results.of(mine)
            used += made
            facts = {"table": request.name, "method": method, "source": pair[0], "targets": list(pair[1])}
            when, times = _confined(made, pair, 1 / mine[0].classes)
            records += [record_of(values, **facts, quantity=key) for key, values in times.items() if values]
            for name in (pair[0], *pair[1]):
                found = [curve_of(record["history"], name) for record in made]
                by_share = [[_at(curve, share) for curve in found] for share in _SHARES]
                texts = [spread(values) if values else results.state(mine) or OPEN for values in by_share]
                rows.append(
                    [
                        results.marked(paper.title(method), mine),
                        f"{paper.short(name)}{among}",
                        *texts,
                        *(when if name == pair[0] else ["", ""]),
                    ]
                )
                records += [
                    record_of(values, **facts, domain=name, share=share)
                    for share, values in zip(_SHARES, by_share, strict=True)
                    if values
                ]
                if found:
                    curves.setdefault(f"{paper.title(method)}{among}", []).append(
                        (paper.short(name), name == pair[0], found[0])
                    )
    head = ["method", "domain", *(f"{share:.0%} of steps" for share in _SHARES), "confined at step", "s"]
    table = Table(
        f"Convergence, setting {request.setting}, {', '.join(request.what)}, budget {request.budget}",
        head,
        rows,
        texts=2,
        notes=(*_NOTES, cost_note(used)),
        records=records,
    )
    return Built(table, {"curves": partial(curves_figure, curves)} if curves else {})


def _confined(
    made: Sequence[Record], pair: tuple[str, tuple[str, ...]], chance: float
) -> tuple[list[str], dict[str, list[float]]]:
    """Return when a method first confined the model, as texts of two columns and as numbers over seeds."""
    found = [confined_at(record, *pair, chance) for record in made]
    steps, seconds = [one[0] for one in found if one], [one[1] for one in found if one]
    times: dict[str, list[float]] = {"confined": [float(one is not None) for one in found]}
    if len(steps) < len(made):
        return [f"{len(steps)} of {len(made)}", UNDEFINED], times
    times |= {"confined at step": steps, "confined after seconds": seconds}
    return [spread(steps, scale=1, digits=0), spread(seconds, scale=1)], times


def confined_at(record: Record, source: str, targets: Sequence[str], chance: float) -> tuple[float, float] | None:
    """Return the step and the seconds at which a run first had its targets near chance and kept its source.

    Args:
        record: Of a run that watched the domains.
        source: Its source.
        targets: Its targets.
        chance: Accuracy of guessing.

    Example:
        >>> rows = [{"step": 5, "seconds": 2.0, "watch:a": 0.9, "watch:b": 0.14}]
        >>> confined_at({"history": rows, "watched_before": {"watch:a": 0.92}}, "a", ["b"], 0.1)
        (5, 2.0)
    """
    least = _KEPT * record["watched_before"][f"watch:{source}"]
    for row in record["history"]:
        accuracies = [row.get(f"watch:{name}") for name in (source, *targets)]
        if None in accuracies:
            continue
        own, *others = accuracies
        if own >= least and max(others) <= chance + _NEAR_CHANCE:
            return row["step"], row["seconds"]
    return None


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


KIND = Kind("Accuracies while the methods learn.", ("sf", "sa"), methods.DEFAULTS.__getitem__, what, cells, build)
