"""The output folder of a protect run while it goes on: started, stopped, resumed, finished."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelfence.artifact import REPORT, RUN, STATE, remove_results
from modelfence.cli.runfile import difference, write_toml
from modelfence.errors import ArtifactError, InputError
from modelfence.files import atomic_write, prepare_output

_STATES = (f"{STATE}.safetensors", f"{STATE}-*.safetensors", f".{STATE}*")


class Output:
    """The folder of one run.

    Nothing in it is replaced before :meth:`begin`, so that bad input leaves an earlier result alone.

    Args:
        folder: The output folder; made when missing.
        tables: The resolved run.
        resume: Go on with the run in the folder.
        force: Allow a folder that isn't empty.
        writes: This process is the one of the run's processes that writes.

    Attributes:
        finished: The folder holds the complete result of this very run.
        begun: The folder holds this run, not an earlier one.

    Raises:
        InputError: The folder isn't empty and neither was asked for, or it holds another run than the one to resume.
    """

    def __init__(
        self, folder: Path, tables: Mapping[str, Any], *, resume: bool, force: bool, writes: bool = True
    ) -> None:
        if resume and force:
            raise InputError("--resume goes on and --force starts anew: give one of them")
        self.folder = folder
        self.resume = resume
        self.finished = False
        self._run = write_toml(tables)
        self.begun = not writes
        if resume and _has_files(folder):
            self._check_same(tables)
            self.finished = (folder / REPORT).exists()
            self.begun = True
        if writes:
            prepare_output(folder, force=force, resume=resume)
        if writes and self.finished:
            self.end()

    def begin(self, *, state_saved: bool = False) -> None:
        """Remove an earlier result and write ``run.toml``, the first time it is called.

        Args:
            state_saved: The state in the folder is already this run's.
        """
        if self.begun:
            return
        self.begun = True
        remove_results(self.folder)
        if not state_saved:
            _remove_states(self.folder)
        atomic_write(self.folder / RUN, self._run)

    def end(self) -> None:
        """Remove the state of the run, which is complete."""
        _remove_states(self.folder)

    def _check_same(self, tables: Mapping[str, Any]) -> None:
        path = self.folder / RUN
        if not path.exists():
            raise InputError(
                f"{self.folder}: has no {RUN}, so there is no run to go on with; use --force to replace it"
            )
        try:
            saved = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path}: can't be read ({error}); start again with --force") from error
        changed = difference(_settings(saved), _settings(tables))
        if changed:
            raise InputError(f"{path}: the run there has another {changed}; use the same, or start again with --force")


def _settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where the folder is: it may have been moved."""
    return {name: table for name, table in tables.items() if name != "output"}


def _has_files(folder: Path) -> bool:
    """Say whether there is anything but the temporary files of a killed process."""
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def _remove_states(folder: Path) -> None:
    for pattern in _STATES:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
