"""The digit tables of the paper: MNIST, USPS, SVHN and MNIST-M, each as source against the other three."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from modelfence.bench import methods, paper
from modelfence.bench.cells import Cell, Record
from modelfence.bench.figures import matrix_figure
from modelfence.bench.rendering import UNDEFINED, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.kind import Accuracies, Built, Kind, accuracies_by_seed, cells_of, cost_note, pairs_of
from modelfence.bench.tables.times import times_notes
from modelfence.errors import InputError
from modelfence.evaluation import metrics

DOMAINS = ("mnist", "usps", "svhn", "mnist_m")
_TITLES = {"sa": "source-available", "sf": "source-free", "df": "data-free"}
_DROPS = (("source drop, %", 100, 1), ("target drop, %", 100, 1), ("ST-D", 1, 3), ("closure", 1, 3))

Row = tuple[float, float, float, float]  # source drop, target drop, ST-D, closure


def what(setting: str, _: str) -> list[str]:
    """Return all ordered pairs; in the data-free setting one mask is for all targets.

    Args:
        setting: "sa", "sf" or "df".
        _: The budget: all have the same.

    Example:
        >>> len(what("sa", "cpu")), what("df", "cpu")[0]
        (12, 'mnist>usps+svhn+mnist_m')
    """
    if setting == "df":
        return [f"{one}>{'+'.join(other for other in DOMAINS if other != one)}" for one in DOMAINS]
    return [f"{source}>{target}" for source, target in itertools.permutations(DOMAINS, 2)]


def cells(request: Request) -> list[Cell]:
    """Return the cells of the table, seed by seed, so that a table of one seed is there early.

    Args:
        request: What was asked for, now and earlier in the same folder.

    Raises:
        InputError: Two masks of one source have the same target.
    """
    pairs = dict.fromkeys(pairs_of(request))
    both = Counter((source, target) for source, targets in pairs for target in targets)
    for (source, target), times in both.items():
        if times > 1:
            raise InputError(
                f"--pairs: {target} is a target of {source} in {times} pairs, and the table has one place for it; give "
                "each its own --out"
            )
    found = [cell for method in request.methods for pair in pairs for cell in cells_of(request, pair, method)]
    return sorted(found, key=lambda cell: cell.seed)


def build(request: Request, results: Results) -> Built:
    """Make the table.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    pairs = pairs_of(request)
    sources = tuple(dict.fromkeys(source for source, _ in pairs))
    domains = tuple(dict.fromkeys([*sources, *(name for _, names in pairs for name in names)]))
    made = _Rows(request, results, domains)
    for method in request.methods:
        means = {source: made.add(method, source) for source in sources}
        if method != methods.SOURCE_MODEL and len(sources) > 1:
            made.add_mean(method, means)
    head = ["method", "source", "", *map(paper.short, domains), *(name for name, _, _ in _DROPS)]
    network = request.network_for("digits")
    title = f"{_TITLES[request.setting].capitalize()}, digits, budget {request.budget}, {network}"
    times = times_notes(made.used) if request.setting == "sa" else []  # elsewhere rivals' targets needn't fall at all
    notes = (*_NOTES, *times, cost_note(made.used))
    figures = {"matrix": partial(matrix_figure, made.matrices, domains)}
    return Built(Table(title, head, made.rows, texts=3, notes=notes, records=made.records), figures)


class _Rows:
    """The rows of the table as they are made."""

    def __init__(self, request: Request, results: Results, domains: Sequence[str]) -> None:
        self.request, self.results, self.domains = request, results, domains
        self.cells = cells(request)
        self.rows: list[list[str]] = []
        self.records: list[dict[str, Any]] = []
        self.matrices: dict[str, dict[str, Accuracies]] = {}
        self.used: list[Record] = []

    def add(self, method: str, source: str) -> dict[int, Row]:
        """Add our row and the paper's; return by seed the numbers of those rows of ours that are whole."""
        mine = [cell for cell in self.cells if (cell.method, cell.source) == (method, source)]
        made, state = self.results.of(mine), self.results.state(mine)
        self.used += made
        by_seed = accuracies_by_seed(made)
        self.matrices.setdefault(method, {})[source] = _mean_of(by_seed, self.domains)
        targets = {name for cell in mine for name in cell.targets}
        changed = method != methods.SOURCE_MODEL
        whole = {
            seed: row_of(found, source, mine[0].classes)
            for seed, found in by_seed.items()
            if changed and targets < set(found)
        }
        words = [paper.title(method), paper.short(source)]
        texts = _texts(by_seed, self.domains, state, changed=changed)
        self.rows.append([*words, self.results.marked("ours", mine), *texts, *_drops(whole)])
        self.records += _records(self.request, method, source, "ours", by_seed, whole)
        printed = paper.row(self.request.setting, method, source)
        if printed is not None:
            theirs, numbers = {0: printed.accuracies}, {0: row_of(printed.accuracies, source)}
            self.rows.append([*words, "paper", *_texts(theirs, self.domains, ""), *_drops(numbers)])
            self.records += _records(self.request, method, source, "paper", theirs, numbers)
        return whole

    def add_mean(self, method: str, means: Mapping[str, Mapping[int, Row]]) -> None:
        """Add the means over sources: ours for seeds whose rows are all there, and the paper's."""
        seeds = [seed for seed in self.request.seeds if all(seed in rows for rows in means.values())]
        printed = [paper.row(self.request.setting, method, source) for source in means]
        theirs = [row_of(one.accuracies, source) for one, source in zip(printed, means, strict=True) if one is not None]
        found = {"ours": {seed: _mean_row([rows[seed] for rows in means.values()]) for seed in seeds}}
        if len(theirs) == len(means):
            found["paper"] = {0: _mean_row(theirs)}
        for who, rows in found.items():
            self.rows.append([paper.title(method), "mean", who, *[""] * len(self.domains), *_drops(rows)])
            self.records += _records(self.request, method, "mean", who, {}, rows)


_NOTES = (
    "Accuracies in percent, before => after, mean ± standard deviation over seeds. Drops are relative; the row's "
    "target drop is that of the summed target accuracies, ST-D is source drop over target drop, the mean row is the "
    "mean of the rows. Closure is the share of the above-chance accuracy taken away, over targets at least 5 points "
    "above chance. The paper's ratios are recomputed from its accuracies.",
    "The paper's source models start from ImageNet weights, ours are trained from scratch.",
)


def row_of(accuracies: Accuracies, source: str, classes: int = 10) -> Row:
    """Return the numbers that follow from a row's accuracies.

    Args:
        accuracies: Fractions before and after, by domain.
        source: Which of them is the source.
        classes: Number of classes; ten in the paper's tables.

    Example:
        >>> round(row_of({"a": (0.8, 0.76), "b": (0.5, 0.3)}, "a")[3], 6)
        0.5
    """
    found = paper.row_of(accuracies, source)
    targets = [pair for name, pair in accuracies.items() if name != source]
    return found.source_drop, found.target_drop, found.st_d, metrics.row_closure(targets, 1 / classes)


def _texts(by_seed: Mapping[int, Accuracies], domains: Sequence[str], state: str, *, changed: bool = True) -> list[str]:
    texts = []
    for name in domains:
        pairs = [found[name] for found in by_seed.values() if name in found]
        if not pairs:
            texts.append(state or UNDEFINED)
            continue
        before, after = zip(*pairs, strict=True)
        texts.append(f"{spread([sum(before) / len(before)])} => {spread(after)}" if changed else spread(after))
    return texts


def _drops(by_seed: Mapping[int, Row]) -> list[str]:
    if not by_seed:
        return [UNDEFINED] * len(_DROPS)
    columns = zip(*by_seed.values(), strict=True)
    return [
        spread(values, scale=scale, digits=digits) for values, (_, scale, digits) in zip(columns, _DROPS, strict=True)
    ]


def _mean_row(rows: Sequence[Row]) -> Row:
    source, target, ratio, closed = (tuple(column) for column in zip(*rows, strict=True))
    return sum(source) / len(rows), sum(target) / len(rows), metrics.mean_st_d(ratio), sum(closed) / len(rows)


def _records(
    request: Request,
    method: str,
    source: str,
    who: str,
    by_seed: Mapping[int, Accuracies],
    rows: Mapping[int, Row],
) -> list[dict[str, Any]]:
    facts = {"table": request.name, "method": method, "source": source, "who": who}
    found = []
    for name in dict.fromkeys(name for one in by_seed.values() for name in one):
        for place, quantity in enumerate(("accuracy before", "accuracy after")):
            values = [one[name][place] for one in by_seed.values() if name in one]
            found.append(record_of(values, **facts, domain=name, quantity=quantity))
    for place, quantity in enumerate(("relative source drop", "relative target drop", "ST-D", "closure")):
        values = [row[place] for row in rows.values()]
        if values:
            found.append(record_of(values, **facts, domain="", quantity=quantity))
    return found


def _mean_of(by_seed: Mapping[int, Accuracies], domains: Sequence[str]) -> Accuracies:
    found: Accuracies = {}
    for name in domains:
        pairs = [one[name] for one in by_seed.values() if name in one]
        if pairs:
            before, after = zip(*pairs, strict=True)
            found[name] = sum(before) / len(before), sum(after) / len(after)
    return found


KIND = Kind(
    "The digit tables: each of MNIST, USPS, SVHN, MNIST-M as source.",
    ("sa", "sf", "df"),
    methods.DEFAULTS.__getitem__,
    what,
    cells,
    build,
)
