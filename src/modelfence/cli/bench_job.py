"""What ``modelfence bench`` does: requests, sweep, tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelfence.bench.processes import default_processes
from modelfence.bench.request import Request
from modelfence.bench.run import CELLS, TABLES, Merged, cells_of, merge, run
from modelfence.bench.tables.catalog import FOUR, KINDS, request
from modelfence.cli.console import Console
from modelfence.errors import InputError

_FAILED = 1


def run_bench(
    table: str,
    console: Console,
    *,
    chosen: Sequence[str],
    seeds: Sequence[int],
    budget: str,
    network: str | None,
    out: str,
    shard: str,
    processes: int | None,
    settings: Sequence[str] = (),
    what: Sequence[str] = (),
) -> int:
    """Run a table, or the four digit tables, and show them.

    Args:
        table: Its name, or "tables" for the four.
        console: Where progress and tables go.
        chosen: Methods; empty takes the table's.
        seeds: Seeds; empty takes the budget's.
        budget: Name of the budget.
        network: None takes the budget's.
        out: The work folder.
        shard: "i/n".
        processes: None takes one for each core.
        settings: Settings; empty takes the table's first.
        what: Pairs, domains or networks; empty takes the table's.

    Returns:
        The exit code.

    Raises:
        InputError: Something isn't known or doesn't fit, or a domain is missing; before any work.
    """
    if table == "tables" and chosen:
        raise InputError("bench tables: --methods differ from table to table; use bench digits and bench ownership")
    wanted = FOUR if table == "tables" else [(table, one) for one in settings or KINDS[table].settings[:1]]
    requests: list[Request] = [
        request(name, setting=setting, budget=budget, network=network, chosen=chosen, seeds=seeds, what=what)
        for name, setting in wanted
    ]
    work, count = Path(out), default_processes() if processes is None else processes
    console.note(f"{len(cells_of(requests))} cells in {work / CELLS}, shard {shard}, {count} process(es)")
    return _shown(run(requests, work, shard=shard, processes=count, announce=console.note), work, console)


def run_merge(out: str, console: Console) -> int:
    """Write the tables of a work folder again and show them.

    Args:
        out: The work folder.
        console: Where tables go.

    Returns:
        The exit code.
    """
    return _shown(merge(Path(out), announce=console.note), Path(out), console)


def _shown(merged: Merged, work: Path, console: Console) -> int:
    record: dict[str, Any] = {
        "folder": str(work / TABLES),
        "tables": {
            name: {"title": table.title, "notes": list(table.notes), "numbers": list(table.records)}
            for name, table in merged.tables.items()
        },
        "failed": [cell.name for cell in merged.failed],
        "open": merged.open,
    }
    lines = [merged.text, f"Tables and figures are in {work / TABLES}."]
    if merged.open:
        lines.append(f"{merged.open} cells aren't finished; {len(merged.failed)} of them failed (failed.md says why).")
    console.result("\n".join(lines), record)
    return _FAILED if merged.failed or merged.killed else 0
