"""The ablation of the loss: keeping alone (L1), unlearning alone (L2), and both, source-free."""

from collections.abc import Sequence

from modelfence.bench.cells import Cell
from modelfence.bench.domains import is_here
from modelfence.bench.methods import known
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.comparison import Line, compare, short_pair
from modelfence.bench.tables.kind import Built, Kind, Options, cells_of, pairs_of
from modelfence.errors import InputError
from modelfence.methods.synthetic import SyntheticConfig

_PAIRS = ("mnist>usps", "cifar10>stl10", "visda_t>visda_v")
_TERMS: tuple[tuple[str, Options], ...] = (
    ("L1 alone: keep", (("terms", "source"),)),
    ("L2 alone: unlearn", (("terms", "target"),)),
    ("L1 + L2", ()),
)
_NOTE = (
    "Eq. 4 of the paper is L1 + L2. Its figure has no numbers; its text says that L1 alone hardly protects, that L2 "
    "alone destroys the source, and that both together lower the target most without loss on the source."
)


def what(_: str, __: str) -> Sequence[str]:
    """Return the pairs of the paper's figure whose domains are here.

    Args:
        _: The setting: there is one.
        __: The budget: all have the same.
    """
    return [pair for pair in _PAIRS if not pair.startswith("visda") or all(map(is_here, ("visda_t", "visda_v")))]


def default_methods(_: str) -> list[str]:
    """Return the method whose loss is taken apart.

    Args:
        _: The setting: there is one.
    """
    return ["SFMap"]


def cells(request: Request) -> list[Cell]:
    """Return the cells of the table, seed by seed.

    Args:
        request: What was asked for.

    Raises:
        InputError: A method's loss can't be taken apart.
    """
    for method in request.methods:
        if not issubclass(known().get(method.partition(":")[0], object), SyntheticConfig):
            raise InputError(f"--methods: {method} has no setting 'terms', so its loss can't be taken apart; use SFMap")
    found = dict.fromkeys(cell for line in _lines(request) for cell in line.cells)
    return sorted(found, key=lambda cell: cell.seed)


def build(request: Request, results: Results) -> Built:
    """Make the table.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    return compare(request, results, "Parts of the loss", ("pair", "method", "loss"), _lines(request), (_NOTE,))


def _lines(request: Request) -> list[Line]:
    found = []
    for source, targets in pairs_of(request):
        for method in request.methods:
            made = [(name, cells_of(request, (source, targets), method, options=options)) for name, options in _TERMS]
            for target in targets:
                pair = short_pair(source, target)
                found.append(Line((pair, method, "none: SL"), source, target, made[-1][1], unprotected=True))
                found += [Line((pair, method, name), source, target, mine) for name, mine in made]
    return found


KIND = Kind("Ablation of the source-free loss: L1, L2, both.", ("sf",), default_methods, what, cells, build)
