"""The table of backbones: SF-MAP on several networks, STL-10 to CIFAR-10."""

from collections.abc import Sequence

from modelfence.bench.budgets import budget as budget_of
from modelfence.bench.cells import Cell
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.comparison import Line, compare
from modelfence.bench.tables.kind import Built, Kind, cells_of
from modelfence.errors import InputError
from modelfence.models.zoo import require_known

_SOURCE, _TARGET = "stl10", "cifar10"
_NOTE = (
    "The paper's figure has no numbers; its text says that SF-MAP's target accuracy is below that of SL for each of "
    "VGG11/13/19, ResNet18/34, Swin-T and Xception. Networks are trained from scratch here."
)


def what(_: str, budget: str) -> Sequence[str]:
    """Return the networks of a budget.

    Args:
        _: The setting: there is one.
        budget: Its name.
    """
    return budget_of(budget).backbones


def default_methods(_: str) -> list[str]:
    """Return the method of the paper's figure.

    Args:
        _: The setting: there is one.
    """
    return ["SFMap"]


def cells(request: Request) -> list[Cell]:
    """Return the cells of the table, seed by seed.

    Args:
        request: What was asked for; ``what`` are networks.

    Raises:
        InputError: There is no network of a name, or one was asked for in place of the budget's.
    """
    if request.network is not None:
        raise InputError("backbones: --network has no effect there; choose the rows by --networks")
    for network in request.what:
        require_known(network)
    found = dict.fromkeys(cell for line in _lines(request) for cell in line.cells)
    return sorted(found, key=lambda cell: cell.seed)


def build(request: Request, results: Results) -> Built:
    """Make the table.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    return compare(request, results, "Backbones, STL10 -> CIFAR10", ("network", "method"), _lines(request), (_NOTE,))


def _lines(request: Request) -> list[Line]:
    found = []
    for network in request.what:
        for method in request.methods:
            made = cells_of(request, (_SOURCE, (_TARGET,)), method, network=network)
            found.append(Line((network, "SL"), _SOURCE, _TARGET, made, unprotected=True))
            found.append(Line((network, method), _SOURCE, _TARGET, made))
    return found


KIND = Kind("Backbones: SF-MAP on several networks.", ("sf",), default_methods, what, cells, build)
