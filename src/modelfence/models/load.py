"""Saving classifiers and loading them back: safetensors and a JSON record, never a pickle."""

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError, InputError, first_line, nearest
from modelfence.files import atomic_write, parse_json, sealed, sha256, unsealed, usable_path, versions
from modelfence.masking.unwrap import require_network
from modelfence.models.weights import (
    apart,
    fill,
    parse_safetensors,
    read_weights,
    refuse_non_finite,
    without_wrappers,
)
from modelfence.models.zoo import check_model, create_model, require_known

WEIGHTS_FILE = "model.safetensors"
RECORD_FILE = "model.json"
FORMAT_VERSION = 1
Value = TypeVar("Value")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class LoadedModel:
    """A classifier with what is known about it.

    Args:
        model: The network in eval mode, on the CPU.
        image: What it eats.
        classes: Its number of classes.
        reference: The name or factory it was built by, as :func:`save_model` takes it.
        args: Arguments of that name or factory.
        extra: What was saved beside it.
    """

    model: nn.Module
    image: ImageSpec
    classes: int
    reference: str
    args: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class _Record:
    """The content of ``model.json``."""

    version: int
    reference: str | None
    args: dict[str, Any]
    classes: int
    image: ImageSpec
    sha256: str
    aliases: dict[str, str] = Field(default_factory=dict)  # of earlier files, where tied weights have one name alone
    extra: dict[str, Any] = Field(default_factory=dict)
    made_with: dict[str, str] = Field(default_factory=dict)


def save_model(
    folder: Path | str,
    model: nn.Module,
    *,
    reference: str | None,
    classes: int,
    image: ImageSpec,
    args: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a classifier as ``model.safetensors`` and ``model.json`` (with the SHA-256 of the former).

    Args:
        folder: Where; made when missing, files of these names are replaced.
        model: The network; wrappers of DDP and ``torch.compile`` are left out of the key names.
        reference: Name or ``"package.module:factory"`` that builds it; None when it was made otherwise;
            then it loads only as ``weights=`` of a reference named at that time.
        classes: Its number of classes.
        image: What it eats.
        args: Arguments of the name or factory, JSON values; ``pretrained`` is left out.
        extra: Anything to keep beside it, JSON values.

    Raises:
        InputError: Non-finite or missing weights, state that isn't a tensor, or values that JSON can't hold.
        ArtifactError: The folder can't be written.
    """
    folder = usable_path(folder)
    require_network(model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    state = model.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = type(value).__name__ if not isinstance(value, Tensor) else "on the meta device"
            raise InputError(f"model state {key!r} is {what}; only tensors with values can be saved")
    kept = apart(without_wrappers(state, "the model"))
    refuse_non_finite(kept, "the model")
    weights = safetensors_bytes(kept, metadata={"format": "pt"})
    record = {
        "version": FORMAT_VERSION,
        "reference": reference,
        "args": {key: value for key, value in (args or {}).items() if key != "pretrained"},
        "classes": classes,
        "image": asdict(image),
        "sha256": sha256(weights),
        "extra": dict(extra or {}),
        "made_with": versions(),
    }
    try:
        text = json.dumps(sealed(record), indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{RECORD_FILE}: args or extra aren't JSON values ({error}); change them") from error
    atomic_write(folder / WEIGHTS_FILE, weights)
    atomic_write(folder / RECORD_FILE, text + "\n")


def load_model(
    reference: str | Path,
    *,
    classes: int | None = None,
    image: ImageSpec | None = None,
    weights: str | Path | None = None,
    args: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load a trained classifier.

    Code runs only when the caller names it: a saved folder whose record names a factory is loaded by
    ``load_model("package.module:factory", weights=folder)``.

    Args:
        reference: A folder written by :func:`save_model`; a name that
            :func:`modelfence.models.zoo.create_model` knows; or ``"package.module:factory"``, a function that
            returns the network (modules in the current folder are found).
        classes: Number of classes; a saved folder knows it, and must agree.
        image: What the network eats; a saved folder knows it, and must agree.
        weights: A ``.safetensors``, ``.pt``, ``.pth`` or ``.bin`` file, or a saved folder. May be missing for
            folders, for factories that load weights themselves, and with ``pretrained=True`` in ``args``.
        args: Arguments of the name or factory; a saved folder knows them.

    Returns:
        The network in eval mode on the CPU, with what is known about it.

    Raises:
        InputError: Something is missing or doesn't fit; the text names the file, key or argument.
        ArtifactError: A file of a saved folder is missing, truncated or altered.

    Example:
        >>> spec = ImageSpec(channels=1, height=16, width=16, mean=(0.5,), std=(0.5,))
        >>> load_model("torch.nn:Flatten", classes=256, image=spec).reference
        'torch.nn:Flatten'
    """
    reference = str(usable_path(reference))
    weights = None if weights is None else usable_path(weights)
    folder = _saved_folder(reference, weights)
    record = _read_record(folder) if folder else None
    if record and folder and weights is None:
        reference = _own_reference(record, folder)
    if record:
        classes = _agreed("classes", classes, record.classes, folder)
        image = _agreed("image", image, record.image, folder)
        args = record.args if args is None else args
    is_factory = bool(_FACTORY.fullmatch(reference))
    if not is_factory:
        _require_network(reference)
    if classes is None or image is None:
        what = "classes" if classes is None else "image"
        raise InputError(f"model {reference!r}: {what}= is missing; only a saved folder knows it")
    args = dict(args or {})
    if weights is None and record is None and not is_factory and not args.get("pretrained"):
        raise InputError(f"model {reference!r} names an architecture without trained weights; give weights=")
    if weights is not None or record:
        args.pop("pretrained", None)
    model = _from_factory(reference, args) if is_factory else create_model(reference, classes, image, **args)
    _refuse_empty(model, reference)
    if record and folder:
        fill(model, _read_saved(folder, record), str(folder / WEIGHTS_FILE), keep_dtype=True)
    elif weights is not None:
        fill(model, read_weights(weights), str(weights))
    else:
        tensors = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
        refuse_non_finite(tensors, f"model {reference!r}")
    check_model(model, reference, classes=classes, image=image)
    return LoadedModel(model, image, classes, reference, args, dict(record.extra) if record else {})


def _saved_folder(reference: str, weights: str | Path | None) -> Path | None:
    """Return the folder written by :func:`save_model` that the arguments name, if one does."""
    if weights is not None:
        if (Path(reference) / RECORD_FILE).is_file():
            raise InputError(f"{reference}: a saved folder has its own weights; leave weights= out")
        return Path(weights) if Path(weights).is_dir() else None
    if (Path(reference) / RECORD_FILE).is_file():
        return Path(reference)
    looks_like_path = "/" in reference or "\\" in reference or reference.startswith(".")
    if not looks_like_path and not (Path(reference) / WEIGHTS_FILE).is_file():
        return None
    if Path(reference).is_dir():
        raise ArtifactError(f"{reference}: has no {RECORD_FILE}; name a folder that a model was saved to")
    raise InputError(f"model {reference!r}: no such folder; give a saved folder, a name or 'package.module:factory'")


def _own_reference(record: _Record, folder: Path) -> str:
    """Return the name in a record; a factory there would run code that the caller didn't name."""
    if record.reference is None:
        raise InputError(
            f"{folder}: was saved without a reference; name what builds it and give weights={str(folder)!r}"
        )
    if _FACTORY.fullmatch(record.reference):
        raise InputError(
            f"{folder}: is built by the factory {record.reference!r}, whose code would run; if you trust it, "
            f"give that as the model and weights={str(folder)!r}"
        )
    return record.reference


def _read_record(folder: Path) -> _Record:
    """Read and check ``model.json``."""
    path = folder / RECORD_FILE
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        found = unsealed(found) if isinstance(found, dict) else found
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror}); name a saved folder") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: truncated or altered ({error}); get the file again") from error
    version = found.get("version") if isinstance(found, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ArtifactError(f"{path}: has format version {version}; a newer modelfence is needed")
    try:
        return TypeAdapter(_Record).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "content"
        raise ArtifactError(f"{path}: {key}: {first['msg']}; get the file again") from error


def _read_saved(folder: Path, record: _Record) -> dict[str, Tensor]:
    """Read the weights of a saved folder after checking their digest, with the names of tied weights."""
    path = folder / WEIGHTS_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror}); get the file again") from error
    found = sha256(content)
    if found != record.sha256:
        raise ArtifactError(
            f"{path}: truncated or altered (SHA-256 {found[:12]}..., {RECORD_FILE} says "
            f"{record.sha256[:12]}...); get both files again"
        )
    state = parse_safetensors(content, path)
    for alias, name in record.aliases.items():
        if name not in state or alias in state:
            raise ArtifactError(
                f"{folder / RECORD_FILE}: aliases: {alias!r} -> {name!r} doesn't fit {WEIGHTS_FILE}; "
                "get both files again"
            )
    return {**state, **{alias: state[name] for alias, name in record.aliases.items()}}


def _agreed(what: str, given: Value | None, recorded: Value, folder: Path | None) -> Value:
    """Return the recorded value after checking that it is the one given."""
    if given is not None and given != recorded:
        raise InputError(f"{folder}: {what} is {recorded}, not {given} as asked for; leave {what}= out")
    return recorded


def _from_factory(reference: str, args: Mapping[str, Any]) -> nn.Module:
    """Import and call ``package.module:factory``."""
    module_name, _, function_name = reference.partition(":")
    with _current_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"model {reference!r}: {module_name!r} can't be imported ({reason})") from error
        factory = getattr(module, function_name, None)
        if not callable(factory):
            close = nearest(function_name, dir(module))
            raise InputError(f"model {reference!r}: no function {function_name!r} in {module_name!r}.{close}")
        try:
            model = factory(**args)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"model {reference!r}: the factory failed ({reason}); check its args") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model {reference!r}: the factory returned {type(model).__name__}, not a Module")
    return model


def _require_network(reference: str) -> None:
    """Refuse a text that is neither a saved folder, which was looked for before, nor the name of a network."""
    try:
        require_known(reference)
    except InputError as error:
        raise InputError(f"{error}; no folder {reference!r} either") from error


def _refuse_empty(model: nn.Module, reference: str) -> None:
    """Refuse a network that has weights without values."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise InputError(f"model {reference!r}: {name!r} is lazy; run one batch through it in the factory")
        if value.is_meta:
            raise InputError(f"model {reference!r}: {name!r} is on the meta device, without values; make it on the CPU")


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Let modules in the current folder be imported, after all installed ones."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
