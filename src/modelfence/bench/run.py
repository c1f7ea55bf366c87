"""A sweep from request to tables: domains looked for, cells run, tables and figures merged."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelfence.bench.cells import Cell, Cells
from modelfence.bench.domains import require_domains
from modelfence.bench.jobs import Worker
from modelfence.bench.processes import run_processes, stopping
from modelfence.bench.rendering import Table, markdown, write_table
from modelfence.bench.request import Request, Results, saved_requests
from modelfence.bench.sweep import Outcome, share, sweep
from modelfence.bench.tables.catalog import KINDS
from modelfence.errors import InputError
from modelfence.files import atomic_write, usable_path
from modelfence.report.style import save_figure

Announce = Callable[[str], None]
CELLS, REQUESTS, TABLES = "cells", "requests", "tables"
"""Folders in the work folder, beside ``sl``, ``synthetic`` and ``state``."""


@dataclass
class Merged:
    """Tables, and what is missing in them.

    Attributes:
        tables: By the name of their files.
        failed: Of the cells that count, those that failed the last time they ran.
        open: How many of those cells aren't finished, failed ones included.
        killed: Processes that ended before their work was done.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    failed: list[Cell] = field(default_factory=list)
    open: int = 0
    killed: int = 0

    @property
    def text(self) -> str:
        """All tables as Markdown."""
        return "\n".join(map(markdown, self.tables.values()))


def run(
    requests: Sequence[Request],
    work: Path,
    *,
    shard: str = "1/1",
    processes: int = 1,
    announce: Announce = lambda _: None,
) -> Merged:
    """Run what isn't finished of some tables, and merge them.

    Args:
        requests: The tables.
        work: The work folder, which any number of processes and machines may share.
        shard: "i/n": this machine's share of the cells.
        processes: Processes to start; 1 works in this one.
        announce: Told in one line how it goes.

    Returns:
        The tables as they are afterwards.

    Raises:
        InputError: A domain is missing, or a request doesn't fit; before any work.
        ArtifactError: The disk is full, or the folder can't be written.
        Interrupted: The user stopped it.
    """
    usable_path(work)
    cells = share(cells_of(requests), shard)
    require_domains(name for cell in cells for name in (cell.source, *cell.targets))
    if processes < 1:
        raise InputError(f"--processes is {processes}; at least 1 is needed")
    cells_of([request.with_earlier(work / REQUESTS) for request in requests])  # they have to fit into one table
    whole = [request.save(work / REQUESTS) for request in requests]
    began, killed = time.time(), 0
    if processes == 1:
        with stopping():
            outcome = sweep_here(cells, work, began, announce)
        if outcome.elsewhere:
            announce(f"{len(outcome.elsewhere)} cells are left to other processes that are at work on them")
    else:
        killed = run_processes(cells, work, began, processes, announce)
    merged = merge(work, whole, judged=cells_of(requests), announce=announce)
    merged.killed = killed
    return merged


def cells_of(requests: Sequence[Request]) -> list[Cell]:
    """Return the cells of some tables, each once, seed by seed: every table is there before its spread.

    Args:
        requests: The tables.
    """
    found = dict.fromkeys(cell for request in requests for cell in KINDS[request.table].cells(request))
    return sorted(found, key=lambda cell: cell.seed)


def sweep_here(cells: Sequence[Cell], work: Path, began: float, announce: Announce) -> Outcome:
    """Run cells in this process.

    Args:
        cells: Which ones.
        work: The work folder.
        began: When the sweep began, in seconds since 1970.
        announce: Told in one line how it goes.

    Raises:
        ArtifactError: As :func:`run`.
        Interrupted: The same.
    """
    worker = Worker(work, announce)
    store = Cells(work / CELLS, announce)
    return sweep(cells, store, worker, began=began, announce=announce, finished=worker.finished)


def merge(
    work: Path,
    requests: Sequence[Request] | None = None,
    *,
    judged: Sequence[Cell] | None = None,
    announce: Announce = lambda _: None,
) -> Merged:
    """Write the tables and figures of a work folder from its finished cells.

    Args:
        work: The work folder.
        requests: Which tables; by default all that were ever asked for in this folder.
        judged: The cells whose failures and absence count; by default all of the tables'.
        announce: Told in one line of each cell whose file isn't used.

    Raises:
        InputError: Nothing was asked for in this folder.
        ArtifactError: A table can't be written.
    """
    asked = saved_requests(work / REQUESTS) if requests is None else requests
    if not asked:
        raise InputError(
            f"{work}: no tables were asked for in this folder; run one first, such as: modelfence bench digits"
        )
    merged = Merged()
    results = Results(Cells(work / CELLS, functools.cache(announce)))
    for request in asked:
        kind = KINDS[request.table]
        built = kind.build(request, results)
        merged.tables[request.name] = built.table
        write_table(built.table, work / TABLES, request.name)
        for name, draw in built.figures.items():
            save_figure(draw(), work / TABLES, f"{request.name}-{name}")
    cells = cells_of(asked)
    own = cells if judged is None else judged
    merged.failed = results.failed(own)
    merged.open = sum(results.store.read(cell) is None for cell in own)
    lines = [f"- {cell.name}: {results.store.error(cell)}" for cell in results.failed(cells)]
    if lines:
        atomic_write(work / TABLES / "failed.md", "\n".join(["Cells that failed:", "", *lines, ""]))
    else:
        (work / TABLES / "failed.md").unlink(missing_ok=True)
    return merged
