"""The output folder of a protect run while it goes on: started, stopped, resumed, finished."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelfence.cli.runfile import difference, parse_toml, write_toml
from modelfence.errors import InputError
from modelfence.files import atomic_write, usable_path
from modelfence.results import (
    FINISHED,
    RUN,
    UNFINISHED,
    finish,
    is_finished,
    refuse_foreign,
    remove,
    results_in,
    states_in,
)


class Output:
    """The folder of one run.

    The run keeps its settings and its state in the folder ``unfinished`` inside it. An earlier result stays beside it,
    complete, until the new one is (see :mod:`modelfence.results`). Nothing is written before :meth:`begin`.

    Args:
        folder: The output folder, prepared.
        tables: The resolved run.
        resume: Go on with the run in the folder.
        writes: This process is the one of the run's processes that writes.

    Attributes:
        work: Where the state is.
        finished: The folder holds the complete result of this very run.
        begun: The folder holds this run.
        new: There was no run to go on with.

    Raises:
        InputError: The folder holds another run than the one to resume, or files that aren't ours.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Any], *, resume: bool, writes: bool = True) -> None:
        self.folder, self.work = folder, folder / UNFINISHED
        self.resume = resume
        self.finished = False
        self.new = not (resume and _has_files(folder))
        self._run = write_toml(tables)
        self.begun = not writes
        if writes:
            finish(folder)
            refuse_foreign(folder)
        if not self.new:
            self._check_same(tables)
            self.finished = is_finished(folder)
            self.begun = True

    def begin(self, *, state_saved: bool = False) -> None:
        """Take the place of another run that wasn't finished and write ``run.toml``, the first time it is called.

        Args:
            state_saved: The newest state in the folder is already this run's.
        """
        if self.begun:
            return
        self.begun = True
        states = states_in(self.work)
        remove([*results_in(self.work), *(states[:-1] if state_saved else states)])
        atomic_write(self.work / RUN, self._run)

    def _check_same(self, tables: Mapping[str, Any]) -> None:
        path = run_file(self.folder)
        if path is None:
            raise InputError(
                f"{self.folder}: has no {RUN}, so there is no run to go on with; use --force to replace it"
            )
        changed = difference(_settings(parse_toml(path)), _settings(tables))
        if changed:
            raise InputError(f"{path}: the run there has another {changed}; use the same, or start again with --force")


def run_file(folder: Path) -> Path | None:
    """Return the settings of the run to go on with in a folder, or else those of its result; None without either."""
    return next((path for place in (UNFINISHED, FINISHED, "") if (path := folder / place / RUN).is_file()), None)


def refuse_inside(folder: Path, domains: Iterable[str]) -> None:
    """Refuse an output folder inside a domain's folder: it would become a class, or one of its images.

    Args:
        folder: The output folder.
        domains: The domains of the run as they are named; those that aren't folders are passed over.

    Raises:
        InputError: It is in one of them.
    """
    for text in domains:
        domain = usable_path(text).expanduser()
        if domain.is_dir() and folder.resolve().is_relative_to(domain.resolve()):
            raise InputError(f"{folder}: the output folder is inside the domain {text}; name one outside it")


def _settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where the folder is: it may have been moved."""
    return {name: table for name, table in tables.items() if name != "output"}


def _has_files(folder: Path) -> bool:
    """Say whether there is anything but the temporary files of a killed process."""
    names = [path.name for path in (*folder.glob("*"), *(folder / UNFINISHED).glob("*"))]
    return any(name != UNFINISHED and not name.startswith(".") for name in names)
