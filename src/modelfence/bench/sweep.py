"""Running cells: several processes, on one machine or many, share a folder and never run one cell twice at once."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from modelfence.bench.cells import Cell, Cells, Record
from modelfence.bench.claims import claimed
from modelfence.bench.source_models import Busy
from modelfence.errors import ArtifactError, InputError, Interrupted

PAUSE = 2.0
"""Seconds between two looks at what other processes are making for all."""


@dataclass
class Outcome:
    """What became of the cells of a sweep.

    Attributes:
        made: Run here and now.
        found: Finished already, or by another process meanwhile.
        failed: Failed here, or in another process since this sweep began.
        elsewhere: Another process was at work on them at the end.
    """

    made: list[Cell] = field(default_factory=list)
    found: list[Cell] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    elsewhere: list[Cell] = field(default_factory=list)


def share(cells: Sequence[Cell], shard: str) -> list[Cell]:
    """Return one machine's share of the cells.

    Args:
        cells: All of them, in the same order on every machine.
        shard: "i/n": the i-th of n shares, from 1.

    Raises:
        InputError: It isn't of that form.

    Example:
        >>> share([], "1/4")
        []
    """
    first, _, count = shard.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise InputError(f"--shard is {shard!r:.40}; i/n is needed, such as 1/4: the first of four shares")
    return list(cells)[int(first) - 1 :: int(count)]


def sweep(
    cells: Sequence[Cell],
    store: Cells,
    make: Callable[[Cell], Record],
    *,
    began: float | None = None,
    announce: Callable[[str], None] = lambda _: None,
    finished: Callable[[Cell], None] = lambda _: None,
) -> Outcome:
    """Run cells that aren't finished; what another process has claimed is left to it.

    A cell that fails is noted and the others go on. What a cell needs and another process is making is waited for,
    other cells first.

    Args:
        cells: Which ones, in order.
        store: Where they are kept.
        make: Runs one; it may raise :class:`modelfence.bench.source_models.Busy`.
        began: When the sweep began (seconds since 1970), for processes that share one: a cell that failed since isn't
            tried again. By default now.
        announce: Told in one line how it goes.
        finished: Told of every cell whose result is kept now.

    Returns:
        What became of them.

    Raises:
        ArtifactError: Results can't be written, or the disk is full; what is finished is kept.
        Interrupted: The user stopped it; what is finished is kept.
    """
    run = _Sweep(store, make, time.time() if began is None else began, announce, finished)
    left = list(dict.fromkeys(cells))
    while left:
        before = len(left)
        left = [cell for cell in left if not run.attempt(cell)]
        if len(left) == before:
            if not run.waits:
                break
            time.sleep(PAUSE)
        run.waits = False
    run.outcome.elsewhere = left
    return run.outcome


class _Sweep:
    """What one process knows of a sweep.

    Attributes:
        waits: In this round, a cell had to wait for what another process is making for all.
    """

    def __init__(
        self,
        store: Cells,
        make: Callable[[Cell], Record],
        began: float,
        announce: Callable[[str], None],
        finished: Callable[[Cell], None],
    ) -> None:
        self.store, self.make, self.began, self.announce, self.finished = store, make, began, announce, finished
        self.outcome = Outcome()
        self.waits = False

    def attempt(self, cell: Cell) -> bool:
        """Deal with a cell; False leaves it for the next round."""
        if self._settled(cell):
            return True
        with claimed(self.store.path(cell)) as mine:
            return mine and (self._settled(cell) or self._run(cell))

    def _settled(self, cell: Cell) -> bool:
        """Whether the cell is finished, or failed in this sweep."""
        if self.store.read(cell) is not None:
            self.outcome.found.append(cell)
            return True
        if self.store.failed_since(cell, self.began):
            self.outcome.failed.append(cell)
            return True
        return False

    def _run(self, cell: Cell) -> bool:
        try:
            with _space_watched():
                result = self.make(cell)
        except Busy:
            self.waits = True
            return False
        except (KeyboardInterrupt, Interrupted) as error:
            raise Interrupted(f"stopped in {cell.name}; finished cells are kept: the same command goes on") from error
        except _Full as error:
            remedy = "free some space: finished cells are kept, and the same command goes on"
            raise ArtifactError(f"{error}; {remedy}") from error
        except Exception as error:
            return self._failed(cell, error)
        try:
            self.store.save(cell, result)
        except ArtifactError:
            raise
        except ValueError as error:  # a number that isn't finite has no place in a cell
            return self._failed(cell, error)
        self.finished(cell)
        self.outcome.made.append(cell)
        self.announce(f"{cell.name}: {result.get('line', 'done')}")
        return True

    def _failed(self, cell: Cell, error: Exception) -> bool:
        self.store.fail(cell, error)
        self.announce(f"failed: {cell.name}: {self.store.error(cell)}")
        self.outcome.failed.append(cell)
        return True


class _Full(Exception):  # noqa: N818 (it is turned into an ArtifactError)
    """The disk is full: no cell can be saved."""


@contextlib.contextmanager
def _space_watched() -> Iterator[None]:
    """Tell a full disk, which stops a sweep, from what is wrong with one cell."""
    try:
        yield
    except (OSError, ArtifactError) as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _Full(str(error)) from error
            cause = cause.__cause__
        raise
