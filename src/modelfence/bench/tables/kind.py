"""What every table has in common: its cells, its rows, and what both are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from modelfence.bench.cells import Cell, Job, Option, Record
from modelfence.bench.methods import SOURCE_MODEL
from modelfence.bench.rendering import Table
from modelfence.bench.request import Request, Results
from modelfence.data import catalog
from modelfence.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Options = tuple[tuple[str, Option], ...]
Pair = tuple[str, tuple[str, ...]]
"""A source and its targets."""


@dataclass(frozen=True)
class Built:
    """A table and its figures, drawn when they are asked for."""

    table: Table
    figures: Mapping[str, "Callable[[], Figure]"] = field(default_factory=dict)


class Kind(NamedTuple):
    """A table of the paper.

    Attributes:
        help: One line.
        settings: Which settings it can have; the first is its default.
        methods: From setting to the default methods; empty where the table itself says which.
        what: From setting and budget's name to the default domains, pairs or networks.
        cells: From a request to its cells.
        build: From a request and results to the table.
    """

    help: str
    settings: tuple[str, ...]
    methods: Callable[[str], Sequence[str]]
    what: Callable[[str, str], Sequence[str]]
    cells: Callable[[Request], list[Cell]]
    build: Callable[[Request, Results], Built]


def cells_of(
    request: Request,
    pair: Pair,
    method: str,
    *,
    job: Job = "confine",
    network: str | None = None,
    options: Options = (),
) -> list[Cell]:
    """Return the cells of one method on one pair, one for each seed; the source model has one.

    Args:
        request: What was asked for.
        pair: Source and targets.
        method: Its name.
        job: What is run.
        network: None takes the request's.
        options: Configuration values that the table varies.

    Raises:
        InputError: A domain isn't in the catalog.
    """
    source, targets = pair
    entry, limits = catalog.lookup(source), request.limits
    values = limits.overrides_of(method.partition(":")[0])
    if job == "ownership":
        values["references"] = limits.references
    seeds = (0,) if method == SOURCE_MODEL else request.seeds
    return [
        Cell(
            job=job,
            setting=request.setting,
            method=method,
            source=source,
            targets=targets,
            network=network or request.network_for(entry.family),
            size=limits.sizes[entry.family],
            classes=len(entry.classes),
            seed=seed,
            budget=limits.name,
            scale=limits.scale,
            overrides=tuple(sorted(values.items())),
            options=options,
        )
        for seed in seeds
    ]


def pairs_of(request: Request) -> list[Pair]:
    """Return the pairs a request names as "source>target" or "source>a+b".

    Args:
        request: What was asked for.

    Raises:
        InputError: A text isn't of that form, a domain isn't known, or the two have different classes.
    """
    return [parsed(text) for text in request.what]


def parsed(text: str) -> Pair:
    """Return source and targets of "source>a+b".

    Args:
        text: The text.

    Raises:
        InputError: It isn't of that form, a target is there twice, a domain isn't known, or the two have different
            classes.

    Example:
        >>> parsed("mnist>usps+svhn")
        ('mnist', ('usps', 'svhn'))
    """
    source, arrow, rest = text.partition(">")
    targets = tuple(rest.split("+"))
    if not arrow or not source or not all(targets):
        raise InputError(f"--pairs: {text!r:.60}: source>target is needed, such as 'mnist>usps'")
    if len(set(targets)) < len(targets):
        raise InputError(f"--pairs: {text!r:.60}: a target is there twice")
    for name in targets:
        if catalog.lookup(source).family != catalog.lookup(name).family or name == source:
            raise InputError(f"--pairs: {text!r:.60}: {name} can't be a target of {source}: other classes, or the same")
    return source, targets


Accuracies = dict[str, tuple[float, float]]


def accuracies_by_seed(records: Sequence[Record]) -> dict[int, Accuracies]:
    """Collect accuracies before and after, by seed and domain; those of the source are means over its masks.

    Args:
        records: Results of cells of one source and method.

    Returns:
        Fractions. Results of the source model itself have the same before and after.
    """
    found: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for record in records:
        domains = found.setdefault(record["cell"]["seed"], {})
        for score in record["evaluation"]["scores"]:
            before = score["accuracy"] if score["before"] is None else score["before"]["accuracy"]
            domains.setdefault(score["name"], []).append((before, score["accuracy"]))
    return {
        seed: {name: (_mean([b for b, _ in pairs]), _mean([a for _, a in pairs])) for name, pairs in domains.items()}
        for seed, domains in found.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def cost_note(records: Sequence[Record]) -> str:
    """Say how much computing time results took, and on what.

    Args:
        records: Results of cells.
    """
    if not records:
        return "No cell is finished yet."
    hours = sum(record["seconds"] for record in records) / 3600
    places = sorted({f"{one['machine']['processor']}, {one['machine']['device']}" for one in records})
    return f"{len(records)} cells, {hours:.2f} hours of processes in all ({'; '.join(places)})."
