"""Claims: which process works on a file, so that no two do, and what a dead one left is taken over.

The claims on ``x.json`` are the files ``x.json.claim-0``, ``x.json.claim-1``, ...; the highest one counts. A stale
claim is taken over by making the next file, which only one process can. It clears them all away at the end.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelfence.errors import ArtifactError

BEAT = 30.0
"""Seconds between two signs of life of a claim."""
SILENCE = 900.0
"""Seconds without one after which a claim made on another machine is taken to be of a dead process."""


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold the claim on a file inside a ``with`` block, if nobody else does.

    Args:
        path: The file that will be made.

    Yields:
        Whether the claim is ours. Look again then whether the file is there: another process may have just made it.

    Raises:
        ArtifactError: The claim can't be written.
    """
    mine = _take(path)
    if mine is None:
        yield False
        return
    done = threading.Event()
    beat = threading.Thread(target=_show_life, args=(mine, done), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        done.set()
        beat.join()
        for claim in _claims(path):
            if _number(claim) <= _number(mine):  # a higher one is of a process that took ours for dead
                with contextlib.suppress(OSError):
                    claim.unlink()


def is_claimed(path: Path) -> bool:
    """Say whether a living process is at work on a file."""
    claims = _claims(path)
    return bool(claims) and not _is_stale(claims[-1])


def _take(path: Path) -> Path | None:
    """Make the next claim where there is none or only a stale one."""
    claims = _claims(path)
    if claims and not _is_stale(claims[-1]):
        return None
    number = 1 + _number(claims[-1]) if claims else 0
    mine = path.with_name(f"{path.name}.claim-{number}")
    try:
        if not mine.parent.is_dir():
            mine.parent.mkdir(parents=True, exist_ok=True)
        with mine.open("x", encoding="utf-8") as file:
            json.dump(_me(), file)
    except OSError as error:
        if isinstance(error, FileExistsError) and mine.parent.is_dir():
            return None  # another process was quicker
        with contextlib.suppress(OSError):
            mine.unlink()
        raise ArtifactError(f"{mine}: can't be written ({error.strerror or error})") from error
    if any(other != mine and not _is_stale(other) for other in _claims(path)):
        # The stale claim that we saw was cleared away meanwhile, and there is a new one.
        with contextlib.suppress(OSError):
            mine.unlink()
        return None
    return mine


def _claims(path: Path) -> list[Path]:
    """Return the claims on a file, the one that counts last."""
    found = path.parent.glob(f"{_escaped(path.name)}.claim-*")
    return sorted((one for one in found if one.suffix[7:].isdecimal()), key=_number)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _number(claim: Path) -> int:
    return int(claim.suffix[7:])


def _show_life(claim: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(claim)


def _is_stale(claim: Path) -> bool:
    """Whether the process that made a claim is dead: looked up on its own machine, else by its silence."""
    try:
        age = time.time() - claim.stat().st_mtime
        text = claim.read_text(encoding="utf-8")
    except OSError:
        return False  # cleared away just now: look again later
    try:
        owner = json.loads(text)
        place, process, started = owner["machine"], int(owner["process"]), owner["started"]
    except (ValueError, TypeError, KeyError):
        return age > BEAT  # its process died while writing it, or is about to have written it
    if place != _machine():
        return age > SILENCE
    return bool(_start_of(process) != started)


def _me() -> dict[str, Any]:
    return {"machine": _machine(), "process": os.getpid(), "started": _start_of(os.getpid())}


def _machine() -> list[str]:
    """Name the machine, its boot, and the name space that process numbers hold in."""
    known = [platform.node()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        known.append(os.readlink("/proc/self/ns/pid"))
    return known


def _start_of(process: int) -> str | None:
    """Return when a process began, in the machine's own count, or None if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = text.rpartition(")")[2].split()
        return None if state in ("Z", "X") else rest[18]
    except (OSError, IndexError, ValueError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "alive"
