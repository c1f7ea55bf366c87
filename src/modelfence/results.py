"""The files of an output folder: which are ours, and how a new result takes the place of an earlier one."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from modelfence.errors import ArtifactError, InputError
from modelfence.files import usable_path
from modelfence.methods.state import is_state, states_of
from modelfence.models.load import RECORD_FILE, WEIGHTS_FILE

REPORT, HISTORY, CARD, RUN, MASK, STATE = "report.json", "history.csv", "README.md", "run.toml", "mask", "state"
SYNTHETIC, SHEETS = "synthetic.safetensors", "synthetic"
UNFINISHED = "unfinished"
"""Folder in an output folder where a run keeps its state and writes its result."""
FINISHED = "finished"
"""The same folder once the earlier result is gone: its files only have to be moved."""

_MASK_FILES = ("mask.json", "mask.safetensors")
_PAGE = "report/report.html"
_PARTS = ("generated", "translated", "restyled", "neighbours")
_FIGURES = tuple(
    f"report/figures/{name}.{kind}"
    for name in ("accuracy", "history", "layers", "samples", "proxies", *(f"synthetic-{part}" for part in _PARTS))
    for kind in ("png", "svg")
)
_SHEETS = tuple(f"{SHEETS}/{part}.png" for part in _PARTS)
_RESULTS = (REPORT, WEIGHTS_FILE, RECORD_FILE, HISTORY, CARD, RUN, SYNTHETIC, *_SHEETS, _PAGE, *_FIGURES)
_CUT_SHORT = re.compile(r"\.state(-\d+)?\.safetensors\.[0-9a-f]{8}")  # by a kill while a state was written
_KEPT_IMAGES = re.compile(r"(generated|translated|restyled)-[0-9a-f]{16}\.safetensors")
# What a text of ours has in it. Any other file is ours where one of the first four is beside it, or in its result.
_MARKS = {
    RECORD_FILE: '"made_with"',
    REPORT: '"format"',
    RUN: "[output]",
    "mask.json": '"base_digest"',
    CARD: 'library_name: "modelfence"',
    "report.html": 'content="modelfence',
}
_OWNERS = tuple(_MARKS)[:4]


def results_in(folder: Path) -> list[Path]:
    """Return the files of a result in a folder, ``report.json`` first."""
    masks = [folder / MASK, *(path for path in sorted(folder.glob(f"{MASK}/*")) if path.name.isdigit())]
    names = [*(folder / name for name in _RESULTS), *(mask / name for mask in masks for name in _MASK_FILES)]
    return [path for path in names if path.is_file()]


def states_in(folder: Path) -> list[Path]:
    """Return the saved states of a run in a folder, the newest last."""
    found = states_of(folder)
    for place, names in ((folder, _CUT_SHORT), (folder / SHEETS, _KEPT_IMAGES)):
        found += [path for path in (place.iterdir() if place.is_dir() else ()) if names.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def remove(paths: Iterable[Path]) -> None:
    """Remove files.

    Raises:
        ArtifactError: One can't be removed.
    """
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"{path}: can't be removed ({error.strerror}); remove it yourself") from error


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder where writing a result would replace a file that isn't ours.

    Raises:
        InputError: There is such a file; the text names it.
    """
    for place in (folder, folder / UNFINISHED, folder / FINISHED):
        names = (*_RESULTS, *(f"{MASK}/{name}" for name in _MASK_FILES), f"{STATE}.safetensors")
        for path in (*(usable_path(place / name) for name in names), *states_of(place)):
            if path.is_dir() or (path.is_file() and not _is_ours(path, place)):
                raise InputError(f"{path}: wasn't written by modelfence; move it away, or name another output folder")


def _is_ours(path: Path, place: Path) -> bool:
    """Say whether we wrote a file of a result that is in some place."""
    try:
        if path.name in _MARKS:
            return _MARKS[path.name] in path.read_text(encoding="utf-8", errors="replace")
        if path.name.startswith(STATE) and is_state(path):
            return True
    except OSError:
        return False
    return any(_is_ours(folder / name, place) for folder in {path.parent, place} for name in _OWNERS)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a place to write a new result to; when that is complete it takes the place of the earlier one.

    A process that is killed in the block leaves the earlier result as it was; one that is killed afterwards leaves the
    new one, whose files :func:`finish` goes on to move.

    Args:
        folder: The output folder; made when missing.

    Yields:
        A folder in it. ``report.json`` has to be written there last.

    Raises:
        InputError: A file in the folder isn't ours.
        ArtifactError: The folder can't be written; the earlier result is unchanged.
    """
    usable_path(folder)
    finish(folder)
    refuse_foreign(folder)
    staged = folder / UNFINISHED
    _remove_results(staged)
    try:
        yield staged
    except Exception:
        _remove_results(staged)
        raise
    finish(folder)


def finish(folder: Path) -> None:
    """Put a complete new result in the place of the earlier one, or go on with that; do nothing where there is none.

    Raises:
        ArtifactError: A file can't be moved or removed.
    """
    staged, ready = folder / UNFINISHED, folder / FINISHED
    try:
        if (staged / REPORT).is_file():
            remove([*results_in(folder), *states_in(folder), *states_in(staged), *staged.rglob(".*.????????")])
            _tidy(folder)
            _tidy(ready)
            if ready.exists():  # somebody else's file is in it
                _move(staged, ready)
            else:
                os.replace(staged, ready)
        _move(ready, folder)
    except OSError as error:
        raise ArtifactError(f"{folder}: the new result in it can't be moved ({error}); go on with --resume") from error


def is_finished(folder: Path) -> bool:
    """Say whether a folder holds a complete result and no run that goes on, in whatever place it is on its way to."""
    if (folder / UNFINISHED / RUN).exists() and not (folder / UNFINISHED / REPORT).exists():
        return False
    return any((folder / place / REPORT).exists() for place in (UNFINISHED, FINISHED, ""))


def _move(place: Path, goal: Path) -> None:
    """Move the files of a result to another folder, ``report.json`` last."""
    for path in reversed(results_in(place)):
        there = goal / path.relative_to(place)
        there.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, there)
    _tidy(place)


def _remove_results(staged: Path) -> None:
    """Remove what a killed process wrote of its result; the settings and the state of the run stay."""
    remove(path for path in results_in(staged) if path != staged / RUN)
    _tidy(staged)


def _tidy(folder: Path) -> None:
    """Remove those folders of a result that are empty; the whole of one that was written beside an earlier one."""
    masks = [path for path in folder.glob(f"{MASK}/*") if path.name.isdigit()]
    whole = [folder] if folder.name in (UNFINISHED, FINISHED) else []
    for path in (*masks, folder / MASK, folder / "report/figures", folder / "report", folder / "synthetic", *whole):
        with contextlib.suppress(OSError):
            path.rmdir()
