"""Several processes on one machine that share a sweep."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from modelfence.bench.cells import Cell
from modelfence.errors import ArtifactError, Interrupted

_STOPPED, _REFUSED = 130, 2
_MOST = 8


def default_processes() -> int:
    """Return how many processes make sense here: one for each core, at most 8; one where there is a GPU.

    Example:
        >>> default_processes() >= 1
        True
    """
    import torch

    if torch.cuda.is_available():
        return 1
    return min(_MOST, _cores())


def run_processes(cells: Sequence[Cell], work: Path, began: float, count: int, announce: Callable[[str], None]) -> int:
    """Start processes that run the cells, and wait for them.

    Each runs on its share of the cores. What a process says goes to standard error.

    Args:
        cells: Which ones, for all processes alike: they share them by claims.
        work: The work folder.
        began: When the sweep began, in seconds since 1970.
        count: How many processes.
        announce: Told if one was killed.

    Returns:
        How many were killed, or failed.

    Raises:
        ArtifactError: A process couldn't write.
        Interrupted: The user stopped it; the processes have ended.
    """
    context = multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    threads = max(1, _cores() // count)
    started: list[BaseProcess] = []
    with stopping():
        try:
            for _ in range(count):
                one: BaseProcess = context.Process(target=_work, args=(list(cells), work, began, threads, errors))
                one.start()
                started.append(one)
            for process in started:
                process.join()
        except (KeyboardInterrupt, Interrupted) as error:
            _end(started)
            raise Interrupted("stopped; finished cells are kept: the same command goes on") from error
    codes = [one.exitcode for one in started]
    if not errors.empty():
        raise ArtifactError(errors.get())
    if _STOPPED in codes:
        raise Interrupted("stopped; finished cells are kept: the same command goes on")
    bad = [code for code in codes if code]
    for code in bad:
        announce(f"a process ended with code {code} (killed, out of memory?); the same command goes on")
    return len(bad)


def _work(cells: list[Cell], work: Path, began: float, threads: int, errors: Any) -> None:
    """Run cells in a process of its own."""
    import torch

    from modelfence.bench.run import sweep_here

    torch.set_num_threads(threads)
    with stopping():
        try:
            sweep_here(cells, work, began, _say)
        except ArtifactError as error:
            errors.put(str(error))
            sys.exit(_REFUSED)
        except (KeyboardInterrupt, Interrupted):
            sys.exit(_STOPPED)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _end(processes: Sequence[BaseProcess]) -> None:
    for one in processes:
        one.terminate()
    for one in processes:
        one.join()


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C inside a ``with`` block, so that claims are given back and states are saved."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> int:
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1
