"""What was asked for: which table, with which methods, seeds and budget; and the results it is made of."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from modelfence.bench.budgets import Budget, budget
from modelfence.bench.cells import Cell, Cells, Record, read_record, write_record
from modelfence.bench.claims import is_claimed
from modelfence.bench.rendering import FAILED, OPEN


@dataclass(frozen=True, kw_only=True)
class Request:
    """One table that was asked for.

    Attributes:
        table: Its name, such as "digits".
        setting: "sa", "sf" or "df".
        budget: Name of the budget.
        network: None takes the budget's for the family.
        methods: Names of methods, in the order of the rows.
        seeds: Of the methods.
        what: Domains, pairs ("source>target") or networks, whatever the table has rows of.
    """

    table: str
    setting: str
    budget: str
    network: str | None = None
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    what: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the table's files."""
        parts = [self.table, self.setting, self.budget, *([self.network] if self.network else [])]
        return "-".join(parts)

    @property
    def limits(self) -> Budget:
        """The budget itself."""
        return budget(self.budget)

    def network_for(self, family: str) -> str:
        """Return the network for a family of domains."""
        return self.network or self.limits.networks[family]

    def joined(self, other: "Request") -> "Request":
        """Return this request with what an earlier one of the same name asked for beside."""
        lists = {key: tuple(dict.fromkeys((*getattr(other, key), *getattr(self, key)))) for key in _LISTS}
        return replace(self, **lists)  # type: ignore[arg-type]  # only the lists

    def save(self, folder: Path) -> "Request":
        """Keep it, so that the tables can be merged again later; joined with what was asked for earlier.

        Each request is a file of its own: processes that ask for other rows at the same time don't undo each other.

        Args:
            folder: The folder of requests.

        Returns:
            All that was asked for of this table.

        Raises:
            ArtifactError: It can't be written.
        """
        if self not in _asked(folder):
            write_record(folder / f"{self.name}-{time.time_ns()}-{uuid.uuid4().hex[:8]}.json", asdict(self))
        return self.with_earlier(folder)

    def with_earlier(self, folder: Path) -> "Request":
        """Return this request with all that was asked for of its table earlier; nothing is written.

        Args:
            folder: The folder of requests.
        """
        return self.joined(next((whole for whole in saved_requests(folder) if whole.name == self.name), self))


_LISTS = ("methods", "seeds", "what")


def saved_requests(folder: Path) -> list[Request]:
    """Return what was asked for in a folder, one request for each table, by name.

    Args:
        folder: The folder of requests.
    """
    whole: dict[str, Request] = {}
    for request in _asked(folder):
        whole[request.name] = request.joined(whole.get(request.name, request))
    return list(whole.values())


def _asked(folder: Path) -> list[Request]:
    """Return every request that was made and can be read, those of one table in their order."""
    found = (_from_record(read_record(path)) for path in sorted(folder.glob("*.json"), key=lambda path: path.stem))
    return [request for request in found if request is not None]


def _from_record(record: Record | None) -> Request | None:
    if record is None or set(record) != {field.name for field in fields(Request)}:
        return None
    values: dict[str, Any] = {key: tuple(value) if key in _LISTS else value for key, value in record.items()}
    return Request(**values)


@dataclass(frozen=True)
class Results:
    """Finished cells, and what is said of the others.

    Attributes:
        store: Where they are kept.
    """

    store: Cells

    def of(self, cells: Sequence[Cell]) -> list[Record]:
        """Return the results of those cells that are finished."""
        return [record for record in map(self.store.read, cells) if record is not None]

    def state(self, cells: Sequence[Cell]) -> str:
        """Say in a word or two why not all cells are finished; empty where they are."""
        left = [cell for cell in cells if self.store.read(cell) is None]
        if not left:
            return ""
        return FAILED if self.failed(left) else OPEN

    def marked(self, word: str, cells: Sequence[Cell]) -> str:
        """Return the first word of a row, with the reason where its numbers aren't those of all its cells.

        Args:
            word: Such as the method's name.
            cells: What the row is made of.
        """
        state = self.state(cells)
        return f"{word} ({state})" if state else word

    def failed(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return those cells that failed the last time."""
        return [cell for cell in cells if self.store.read(cell) is None and self.store.error(cell) is not None]

    def running(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return those cells that a process is at work on."""
        return [cell for cell in cells if is_claimed(self.store.path(cell))]
