"""The mask on disk: ``mask.safetensors`` (bits) and ``mask.json`` (what they mean).

Every altered or missing byte is detected: ``mask.json`` holds the SHA-256 of the bit file and one of its own content,
and must be byte for byte what this module would write.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from modelfence.errors import ArtifactError, InputError
from modelfence.files import atomic_write, parse_json, sha256, usable_path
from modelfence.masking.packing import pack_bits, unpack_bits

if TYPE_CHECKING:
    from modelfence.masking.mask import Mask

FORMAT = 1
BITS = "mask.safetensors"
RECORD = "mask.json"


def save_mask(mask: "Mask", folder: Path) -> Path:
    """Write a mask; the record is written last, so that a killed save leaves no half mask that loads.

    Raises:
        InputError: The metadata isn't JSON.
        ArtifactError: The folder can't be written.
    """
    names = sorted(mask.kept)
    packed = [pack_bits(mask.kept[name]) for name in names]
    bits = save_tensors({"kept": torch.cat(packed) if packed else torch.zeros(0, dtype=torch.uint8)})
    record = {
        "format": FORMAT,
        "base_digest": mask.base_digest,
        "folded_digest": mask.folded_digest,
        "parameters": [
            {"name": name, "shape": list(mask.kept[name].shape), "kept": int(mask.kept[name].sum())} for name in names
        ],
        "aliases": dict(mask.aliases),
        "metadata": _plain(mask.metadata),
        "bits_sha256": sha256(bits),
    }
    atomic_write(folder / BITS, bits)
    atomic_write(folder / RECORD, _written(record))
    return folder


def load_mask(folder: Path) -> dict[str, Any]:
    """Read the fields of a :class:`Mask` back.

    Raises:
        InputError: The folder's name can't be a path.
        ArtifactError: A file is missing, truncated, altered, or of a newer format.
    """
    usable_path(folder)
    record = _read_record(folder / RECORD)
    bits = _read(folder / BITS)
    if sha256(bits) != record.get("bits_sha256"):
        raise ArtifactError(f"{folder / BITS}: truncated or altered (SHA-256 isn't the one in {RECORD})")
    try:
        packed = load_tensors(bits)["kept"]
    except (SafetensorError, KeyError) as error:
        raise ArtifactError(f"{folder / BITS}: not a mask file ({error})") from error
    try:
        fields = {name: record[name] for name in ("base_digest", "folded_digest", "aliases", "metadata")}
        return {"kept": _unpacked(packed, record["parameters"], folder), **fields}
    except ArtifactError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{folder / RECORD}: not a complete mask record ({error!r})") from error


def _unpacked(packed: Tensor, table: list[Mapping[str, Any]], folder: Path) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    start = 0
    for row in table:
        shape = tuple(row["shape"])
        size = -(-int(torch.Size(shape).numel()) // 8)
        kept[row["name"]] = unpack_bits(packed[start : start + size], shape)
        if int(kept[row["name"]].sum()) != row["kept"]:
            raise ArtifactError(f"{folder / RECORD}: count of {row['name']!r} doesn't fit its bits")
        start += size
    if start != packed.numel():
        raise ArtifactError(f"{folder / BITS}: {packed.numel() - start} bytes more than the record names")
    return kept


def _plain(metadata: Mapping[str, Any]) -> Any:
    """Return the metadata as it will be read back: texts for keys, lists for tuples."""
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"mask metadata can't be saved ({error}); give JSON values only") from error


def _written(record: Mapping[str, Any]) -> bytes:
    content = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False)
    body = {**record, "record_sha256": sha256(content.encode())}
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _read_record(path: Path) -> dict[str, Any]:
    raw = _read(path)
    try:
        record = parse_json(raw)
        form = int(record["format"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{path}: truncated or altered (not a mask record)") from error
    if form > FORMAT:
        raise ArtifactError(f"{path}: format {form} is newer than this modelfence reads ({FORMAT}); upgrade it")
    record.pop("record_sha256", None)
    try:
        same = _written(record) == raw
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise ArtifactError(f"{path}: truncated or altered (SHA-256 doesn't fit its content)")
    return dict(record)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror}); a mask folder has it") from error
