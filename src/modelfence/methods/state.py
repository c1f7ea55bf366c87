"""The state of a run on disk, from which a killed run goes on to the same result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from modelfence.errors import ArtifactError, InputError
from modelfence.files import atomic_write, sha256
from modelfence.masking.digest import digest_of_tensors


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
        ArtifactError: The file is truncated or altered.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        facts: dict[str, Any] = json.loads(text["facts"])
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
