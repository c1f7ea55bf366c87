"""The state of a run on disk, from which a killed run goes on to the same result."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from modelfence.errors import ArtifactError, InputError
from modelfence.files import atomic_write, parse_json, sha256, usable_path, writable_folder
from modelfence.masking.digest import digest_of_tensors

_STATE = re.compile(r"state(-\d+)?\.safetensors")


def states_of(folder: Path) -> list[Path]:
    """Return the files in a folder that have the name of a state: of the run, and of each of its masks.

    Args:
        folder: Where; it may be missing.
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _STATE.fullmatch(path.name) and path.is_file())


def is_state(path: Path) -> bool:
    """Say whether a file was written by :func:`save_state`, by its header; what else it holds may be altered.

    Raises:
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        return b'"facts"' in file.read(min(int.from_bytes(file.read(8), "little"), 2**24))


def state_file(folder: str | Path, *, resume: bool = False) -> Path:
    """Return where a run keeps its state, after a look at whether that can be written; nothing is made.

    Args:
        folder: The run's output folder.
        resume: The run goes on from the state there, which is looked at when it is read.

    Raises:
        InputError: Its name can't be a path, it is a file, or something that isn't a state has the name of one.
        ArtifactError: It can't be written.

    Example:
        >>> state_file("out").name
        'state.safetensors'
    """
    folder = writable_folder(folder, "output")
    for path in folder.iterdir() if folder.is_dir() else ():
        if _STATE.fullmatch(path.name) and path.is_dir():
            raise InputError(f"{path}: is a folder, and a state is kept under that name; move it away")
    for path in () if resume else states_of(folder):
        if not is_state(path):
            raise InputError(f"{path}: wasn't written by modelfence, and a state is kept under that name; move it away")
    return folder / "state.safetensors"


def save_state(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON facts as one file, atomically.

    Raises:
        ArtifactError: The file can't be written.
    """
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = {"facts": json.dumps(facts)}
    text["digest"] = _digest(plain, text["facts"])
    atomic_write(path, save_tensors(plain, metadata=text))


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and facts back.

    Raises:
        InputError: Its name can't be a path.
        ArtifactError: The file is truncated or altered.
    """
    usable_path(path)
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        facts: dict[str, Any] = {**parse_json(text["facts"])}  # of no mapping: a TypeError
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: truncated or altered ({error}); start again with --force") from error
    if _digest(tensors, text["facts"]) != text.get("digest"):
        raise ArtifactError(f"{path}: altered (digest doesn't fit its content); start again with --force")
    return tensors, facts


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    return sha256((digest_of_tensors(tensors) + facts).encode())


def require_same_run(path: Path, facts: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was started with another model or configuration.

    Raises:
        InputError: Something differs; the text names it.
    """
    for key, value in identity.items():
        if facts.get("identity", {}).get(key) != json.loads(json.dumps(value)):
            raise InputError(f"{path}: the saved run has another {key}; use the same, or start again with --force")


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a part, under the rest of their names.

    Example:
        >>> import torch
        >>> part_of({"a/b": torch.zeros(1), "c/b": torch.ones(1)}, "a")
        {'b': tensor([0.])}
    """
    start = f"{part}/"
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}
