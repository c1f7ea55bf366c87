"""Writing files so that a run killed at any moment leaves the last complete state."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelfence.errors import ArtifactError, InputError

SEAL = "digest"
"""The key under which a record has the digest of the rest of it."""


def usable_path(path: str | Path) -> Path:
    """Refuse a text that no file system takes as a path: too long, or with a NUL character.

    Args:
        path: Where something is, or shall be.

    Raises:
        InputError: It can't be a path.

    Example:
        >>> usable_path("a" * 5000)
        Traceback (most recent call last):
        modelfence.errors.InputError: 'aaaaaaaaaaaaaaaa...: is too long for a path; ...
    """
    shown = f"{str(path)[:16]!r}"[:-1]
    try:
        os.stat(path)
    except ValueError as error:
        raise InputError(f"{shown}...: can't be a path ({error}); name another file or folder") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{shown}...: is too long for a path; name another file or folder") from error
    return Path(path)


def writable_folder(path: str | Path, what: str) -> Path:
    """Refuse a place where no folder can be written; nothing is made.

    Args:
        path: The folder, which may be missing.
        what: Which folder it is, for the error.

    Raises:
        InputError: Its name can't be a path, or it is a file, or in one.
        ArtifactError: There is no permission.

    Example:
        >>> writable_folder("out/there", "output").name
        'there'
    """
    folder = usable_path(path)
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise InputError(f"{there}: is a file, not a folder; name another {what} folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArtifactError(f"{there}: can't be written (no permission); name another {what} folder")
    return folder


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; whatever is wrong with it is a ``ValueError``, nesting that has no end in sight included."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as it will be read back, with a digest of all else in it, by which damage is noticed.

    Args:
        record: JSON values.

    Raises:
        TypeError: A value isn't one that JSON has.
        ValueError: It holds itself.

    Example:
        >>> record = sealed({"classes": 10, "names": {1: "one"}})
        >>> list(record), unsealed(record)
        (['digest', 'classes', 'names'], {'classes': 10, 'names': {'1': 'one'}})
    """
    content = json.loads(json.dumps(record))
    return {SEAL: _digest(content), **content}  # first, so that its line can be taken out


def unsealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without its digest; one that has none, as earlier files and those changed on purpose, as it is.

    Args:
        record: As it was read.

    Raises:
        ValueError: It isn't the content that the digest was made of.

    Example:
        >>> unsealed({**sealed({"classes": 10}), "classes": 11})
        Traceback (most recent call last):
        ...
        ValueError: its content isn't what 'digest' was made of (if the change is yours, take that line out)
    """
    content = {name: value for name, value in record.items() if name != SEAL}
    try:
        fits = SEAL not in record or record[SEAL] == _digest(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not fits:
        raise ValueError(f"its content isn't what {SEAL!r} was made of (if the change is yours, take that line out)")
    return content


def _digest(record: Mapping[str, Any]) -> str:
    return sha256(json.dumps(record, sort_keys=True).encode())


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a file by temporary file, fsync and rename.

    Args:
        path: Where the file shall be; its folder is made when missing.
        content: Bytes, or text written as UTF-8.

    Raises:
        InputError: There can't be a file of that name.
        ArtifactError: The folder can't be written or the disk is full; the old file is left as it was.
    """
    usable_path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    made = _missing(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _remove_empty(made)
        reason = error.strerror or str(error)
        raise ArtifactError(f"{path}: can't be written ({reason}); the previous file is unchanged") from error


def prepare_output(folder: Path, *, force: bool = False, resume: bool = False) -> Path:
    """Check that results may be written to a folder, and make it.

    Args:
        folder: The output folder.
        force: Allow a folder that has files in it; those with our names are replaced.
        resume: Allow a folder that has files in it; the run in it goes on.

    Returns:
        The folder.

    Raises:
        InputError: The folder isn't empty and neither flag was given, or it is a file.
        ArtifactError: The folder can't be made or written.
    """
    writable_folder(folder, "output")
    if not (force or resume):
        require_empty(folder, "use --force to replace it, or --resume where a run can go on")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{folder}: can't be made or read ({error.strerror}); name another folder") from error
    return folder


def require_empty(folder: Path, remedy: str) -> None:
    """Refuse an output folder that has anything in it; one that isn't there is empty.

    Args:
        folder: The output folder.
        remedy: What to do, the end of the error's text.

    Raises:
        InputError: It isn't empty.
        ArtifactError: It can't be read.
    """
    try:
        used = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise ArtifactError(f"{folder}: can't be made or read ({error.strerror}); name another folder") from error
    if used:
        raise InputError(f"{folder}: output folder isn't empty; {remedy}")


@contextlib.contextmanager
def output_folder(folder: Path, *, force: bool = False, resume: bool = False) -> Iterator[Path]:
    """Hold an output folder: see :func:`prepare_output`.

    Where the block fails, the folders that were made for it and are still empty are taken away again.
    """
    usable_path(folder)
    made = _missing(folder)
    try:
        yield prepare_output(folder, force=force, resume=resume)
    except BaseException:
        _remove_empty(made)
        raise


def _missing(folder: Path) -> list[Path]:
    """Return the folders that have to be made for a folder to be there, itself first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def versions() -> dict[str, str]:
    """Return the versions that a record of ours names: those of modelfence and torch.

    Example:
        >>> sorted(versions())
        ['modelfence', 'torch']
    """
    import torch

    from modelfence import __version__

    return {"modelfence": __version__, "torch": str(torch.__version__)}


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes as 64 hexadecimal digits.

    Example:
        >>> sha256(b"")[:8]
        'e3b0c442'
    """
    return hashlib.sha256(data).hexdigest()
