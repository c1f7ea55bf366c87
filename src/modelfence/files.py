"""Writing files so that a run killed at any moment leaves the last complete state."""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from modelfence.errors import ArtifactError, InputError


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a file by temporary file, fsync and rename.

    Args:
        path: Where the file shall be; its folder is made when missing.
        content: Bytes, or text written as UTF-8.

    Raises:
        ArtifactError: The folder can't be written or the disk is full; the old file is left as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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
        ArtifactError: The folder can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, not a folder; name another output folder")
    if folder.is_dir() and any(folder.iterdir()) and not (force or resume):
        remedy = "use --force to replace it, or --resume where a run can go on"
        raise InputError(f"{folder}: output folder isn't empty; {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{folder}: can't be made ({error.strerror})") from error
    return folder


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes as 64 hexadecimal digits.

    Example:
        >>> sha256(b"")[:8]
        'e3b0c442'
    """
    return hashlib.sha256(data).hexdigest()
