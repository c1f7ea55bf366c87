"""The t-SNE figure: what the classifiers decide by, in two dimensions, source and target."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from modelfence.bench import methods, paper
from modelfence.bench.cells import Cell
from modelfence.bench.figures import panels_figure
from modelfence.bench.rendering import OPEN, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.kind import Built, Kind, cells_of, cost_note, pairs_of

_NEIGHBOURS = 10
_NOTE = (
    "Agreement: share of an image's ten nearest neighbours of the same domain, in the two-dimensional map, that have "
    "its class, in percent; mean ± standard deviation over seeds. High means clusters by class, 10 is none for ten "
    "classes. The paper's figure (MT -> MM) has no numbers; its text says that SF-MAP keeps the source's clusters "
    "and not the target's."
)


def what(_: str, __: str) -> Sequence[str]:
    """Return the pair of the paper's figure.

    Args:
        _: The setting: there is one.
        __: The budget: all have the same.
    """
    return ("mnist>mnist_m",)


def default_methods(setting: str) -> list[str]:
    """Return the panels of the paper's figure.

    Args:
        setting: "sf".
    """
    return [methods.SOURCE_MODEL, *methods.DEFAULTS[setting]]


def cells(request: Request) -> list[Cell]:
    """Return the cells of the figure, seed by seed.

    Args:
        request: What was asked for.
    """
    found = [cell for pair in pairs_of(request) for method in request.methods for cell in _cells(request, pair, method)]
    return sorted(found, key=lambda cell: cell.seed)


def _cells(request: Request, pair: tuple[str, tuple[str, ...]], method: str) -> list[Cell]:
    return cells_of(request, pair, method, job="features")


def build(request: Request, results: Results) -> Built:
    """Make the table and the panels.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    panels: dict[str, Mapping[str, Any]] = {}
    used: list[Any] = []
    for pair in pairs_of(request):
        for method in request.methods:
            mine = _cells(request, pair, method)
            made = results.of(mine)
            used += made
            source, *targets = pair[0], *pair[1]
            texts = {}
            for name in (source, *targets):
                values = [agreement(record["points"][name]) for record in made]
                texts[name] = spread(values) if values else results.state(mine) or OPEN
                if values:
                    records.append(record_of(values, table=request.name, method=method, domain=name))
            short = [paper.short(name) for name in (source, *targets)]
            title = results.marked(paper.title(method), mine)
            rows += [
                [title, f"{short[0]} -> {paper.short(target)}", texts[source], texts[target]] for target in targets
            ]
            if made:
                among = f", {' -> '.join(short)}" if len(request.what) > 1 else ""
                panels[f"{paper.title(method)}{among}"] = {
                    paper.short(name): one for name, one in made[0]["points"].items()
                }
    table = Table(
        f"t-SNE, budget {request.budget}",
        ["method", "pair", "source: agreement", "target: agreement"],
        rows,
        texts=2,
        notes=(_NOTE, cost_note(used)),
        records=records,
    )
    return Built(table, {"panels": partial(panels_figure, panels)} if panels else {})


def agreement(points: Mapping[str, Sequence[float]]) -> float:
    """Return how often near points have the same class, in 0..1.

    Args:
        points: "x", "y" and "labels", lists of one length.

    Example:
        >>> agreement({"x": [0, 1, 9, 10], "y": [0, 0, 0, 0], "labels": [1, 1, 2, 2]})
        0.333...
    """
    places = torch.tensor([points["x"], points["y"]], dtype=torch.float64).T
    labels = torch.tensor(points["labels"])
    far = torch.cdist(places, places).fill_diagonal_(float("inf"))
    nearest = far.topk(min(_NEIGHBOURS, len(labels) - 1), largest=False).indices
    return float((labels[nearest] == labels[:, None]).double().mean())


KIND = Kind("t-SNE panels of the source-free methods.", ("sf",), default_methods, what, cells, build)
