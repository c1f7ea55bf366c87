"""The ownership table: accuracy on clean and on marked images, the gap, and the test of the claim."""

from collections.abc import Sequence
from typing import Any

from modelfence.bench import methods, paper
from modelfence.bench.cells import Cell, Record
from modelfence.bench.rendering import OPEN, UNDEFINED, Table, record_of, spread
from modelfence.bench.request import Request, Results
from modelfence.bench.tables.digits import DOMAINS
from modelfence.bench.tables.kind import Built, Kind, cells_of, cost_note

_HEAD = ("method", "domain", "clean", "marked", "gap", "claim holds", "largest p", "paper: clean", "marked", "gap")
_NOTES = (
    "Accuracies in percent on test images without and with the mark, gap in points, mean ± standard deviation over "
    "seeds. SL is the unmarked source model: its claim should not hold. Claims are tested by `modelfence verify`'s "
    "test at level 1e-6, with source models of other seeds as references. The mark is NTL's for the domain.",
)


def what(_: str, __: str) -> tuple[str, ...]:
    """Return the domains of the table: the digits; more can be named.

    Args:
        _: The setting: there is one.
        __: The budget: all have the same.
    """
    return DOMAINS


def default_methods(_: str) -> list[str]:
    """Return the rows of the paper's table.

    Args:
        _: The setting: there is one.
    """
    return [methods.SOURCE_MODEL, "NTL", "CUTI", "SAMap:ownership"]


def cells(request: Request) -> list[Cell]:
    """Return the cells of the table, seed by seed.

    Args:
        request: What was asked for.
    """
    found = [
        cell
        for method in request.methods
        for domain in request.what
        for cell in cells_of(request, (domain, ()), method, job="ownership")
    ]
    return sorted(found, key=lambda cell: cell.seed)


def build(request: Request, results: Results) -> Built:
    """Make the table.

    Args:
        request: What was asked for.
        results: Its cells.
    """
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    used: list[Record] = []
    for method in request.methods:
        gaps: list[float] = []
        printed: list[float] = []
        for domain in request.what:
            mine = [cell for cell in cells(request) if (cell.method, cell.source) == (method, domain)]
            made = results.of(mine)
            used += made
            verdicts = [record["verdict"] for record in made]
            theirs = paper.ownership(domain, method)
            state = results.state(mine)
            rows.append(
                [
                    results.marked(paper.title(method), mine),
                    paper.short(domain),
                    *_ours(verdicts, state),
                    *_paper(theirs),
                ]
            )
            gaps += [] if state else [sum(one["gap"] for one in verdicts) / len(verdicts)]
            printed += [theirs[1] - theirs[0]] if theirs else []
            records += _records(request, method, domain, verdicts, theirs)
        whole = len(gaps) == len(request.what)
        mean = spread([sum(gaps) / len(gaps)]) if gaps and whole else OPEN
        theirs_mean = spread([sum(printed) / len(printed)]) if len(printed) == len(request.what) else UNDEFINED
        rows.append([paper.title(method), "mean", "", "", mean, "", "", "", "", theirs_mean])
    title = f"Ownership verification, budget {request.budget}"
    return Built(Table(title, _HEAD, rows, texts=2, notes=(*_NOTES, cost_note(used)), records=records))


def _ours(verdicts: Sequence[Record], state: str) -> list[str]:
    if not verdicts:
        return [state or OPEN] * 5
    columns = [spread([one[key] for one in verdicts]) for key in ("accuracy_clean", "accuracy_marked", "gap")]
    held = sum(bool(one["holds"]) for one in verdicts)
    return [*columns, f"{held} of {len(verdicts)}", f"{max(one['p_value'] for one in verdicts):.1e}"]


def _paper(pair: tuple[float, float] | None) -> list[str]:
    if pair is None:
        return [UNDEFINED] * 3
    marked, clean = pair
    return [spread([clean]), spread([marked]), spread([clean - marked])]


def _records(
    request: Request, method: str, domain: str, verdicts: Sequence[Record], theirs: tuple[float, float] | None
) -> list[dict[str, Any]]:
    facts = {"table": request.name, "method": method, "source": domain}
    keys = ("accuracy_clean", "accuracy_marked", "gap", "p_value")
    found = [record_of([one[key] for one in verdicts], **facts, who="ours", quantity=key) for key in keys if verdicts]
    if theirs is not None:
        marked, clean = theirs
        numbers = zip(keys, (clean, marked, clean - marked), strict=False)
        found += [record_of([value], **facts, who="paper", quantity=key) for key, value in numbers]
    return found


KIND = Kind("Ownership: a mark on the images that the model fails on.", ("sa",), default_methods, what, cells, build)
