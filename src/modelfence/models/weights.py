"""State dicts: reading files, key names of wrappers, tied weights, and filling a model without guessing."""

import io
import pickle
import warnings
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from modelfence.errors import ArtifactError, InputError
from modelfence.masking.unwrap import require_network

_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_WRAPPER_STARTS = ("module.", "_module.", "_forward_module.")
_NESTED_UNDER = ("state_dict", "model_state_dict", "model")
_SHOWN = 3


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a file, on the CPU.

    Args:
        path: A ``.safetensors`` file, or a ``.pt``, ``.pth`` or ``.bin`` file of tensors (its state dict may
            be under ``state_dict``, ``model_state_dict`` or ``model``). Pickled objects are never loaded.

    Returns:
        Tensors by the names in the file.

    Raises:
        InputError: No such file, another kind of file, or one that isn't made of tensors.
        ArtifactError: The file is truncated or altered.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: weights can't be read ({error.strerror}); check the path") from error
    if path.suffix == ".safetensors":
        return parse_safetensors(content, path)
    if path.suffix not in {".pt", ".pth", ".bin"}:
        raise InputError(f"{path}: weights must be a .safetensors, .pt, .pth or .bin file")
    found = _read_torch(content, path)
    for key in _NESTED_UNDER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not found:
        raise InputError(f"{path}: holds {type(found).__name__}, not a state dict; save model.state_dict()")
    for key, value in found.items():
        if not isinstance(value, Tensor):
            what = type(value).__name__
            raise InputError(f"{path}: {key!r} is {what}, not a tensor; save model.state_dict()")
    return {str(key): value for key, value in found.items()}


def parse_safetensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors in the bytes of a safetensors file.

    Args:
        content: The bytes.
        path: Where they come from, for errors.

    Returns:
        Tensors by name.

    Raises:
        ArtifactError: The file is truncated, altered or of another format.
    """
    try:
        return load_safetensors(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(f"{path}: truncated or altered ({error}); get the file again") from error


def fill(model: nn.Module, state: Mapping[str, Tensor], source: str, *, keep_dtype: bool = False) -> None:
    """Copy a state dict into a model; every key and shape must fit.

    Prefixes that DataParallel, DDP, FSDP and ``torch.compile`` put before names are removed. A tied weight may
    be in the state dict under one of its names, or under several with equal values.

    Args:
        model: The network to fill.
        state: Tensors by name.
        source: Where they come from, for errors.
        keep_dtype: Give parameters and buffers the dtypes of the state dict, not the model's.

    Raises:
        InputError: Missing or unexpected keys, other shapes, tied weights that differ, or non-finite values.
    """
    require_network(model)
    own = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = _complete_ties(plain_state(state, own, source), own, source)
    problems = [
        f"{what} {_listed(sorted(keys))}"
        for what, keys in (("missing", own.keys() - state.keys()), ("unexpected", state.keys() - own.keys()))
        if keys
    ]
    problems += _mismatches(state, own)
    if problems:
        raise InputError(f"{source}: doesn't fit the model: {'; '.join(problems)}; check its name and args")
    refuse_non_finite(state, source)
    if keep_dtype:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in state and state[name].dtype != tensor.dtype:
                tensor.data = tensor.data.to(state[name].dtype)
    model.load_state_dict(dict(state))


def plain_state(state: Mapping[str, Tensor], expected: Collection[str], source: str) -> dict[str, Tensor]:
    """Remove what wrappers put into key names, unless the keys fit as they are.

    Args:
        state: Tensors by name.
        expected: The model's own names.
        source: Where they come from, for errors.

    Returns:
        The same tensors by plain names.

    Raises:
        InputError: Two keys become the same name.

    Example:
        >>> weight = torch.zeros(1)
        >>> list(plain_state({"module._orig_mod.fc.weight": weight}, ["fc.weight"], "file"))
        ['fc.weight']
    """
    if state.keys() == set(expected):
        return dict(state)
    plain = without_wrappers(state, source)
    while set(expected).isdisjoint(plain):
        prefix = next((start for start in _WRAPPER_STARTS if all(key.startswith(start) for key in plain)), None)
        if prefix is None:
            break
        plain = {key.removeprefix(prefix): value for key, value in plain.items()}
    return plain


def without_wrappers(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Remove the parts of key names that only wrappers of torch put there, such as ``_orig_mod``.

    Args:
        state: Tensors by name.
        source: Where they come from, for errors.

    Returns:
        The same tensors by shorter names.

    Raises:
        InputError: Two keys become the same name.
    """
    plain: dict[str, Tensor] = {}
    for key, value in state.items():
        name = ".".join(part for part in key.split(".") if part not in _WRAPPER_PARTS)
        if name in plain:
            raise InputError(f"{source}: {name!r} is there twice, once as {key!r}; keep one of them")
        plain[name] = value
    return plain


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors so that each has memory of its own, as files of weights want it.

    A tensor with several names (a tied weight) has a copy under each: whoever loads the file by these names finds all.

    Args:
        state: Tensors by name.

    Returns:
        Contiguous copies by the same names, on the CPU.

    Example:
        >>> weight = torch.ones(2)
        >>> sorted(apart({"head.weight": weight, "embed.weight": weight}))
        ['embed.weight', 'head.weight']
    """
    whole = torch.contiguous_format
    return {name: value.detach().to("cpu", copy=True, memory_format=whole) for name, value in state.items()}


def refuse_non_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights with NaN or infinite values.

    Args:
        state: Tensors by name.
        source: Where they come from, for errors.

    Raises:
        InputError: A floating-point tensor has such values; the text names the first and how many.
    """
    for key, value in state.items():
        if value.is_floating_point():
            wrong = value.numel() - int(value.isfinite().sum())
            if wrong:
                raise InputError(
                    f"{source}: {wrong} of {value.numel()} values of {key!r} are NaN or infinite; "
                    "use weights that trained well"
                )


def _read_torch(content: bytes, path: Path) -> object:
    """Read a file that torch wrote, tensors and plain containers only."""
    try:
        with warnings.catch_warnings(action="ignore"):  # what they warn of ends in one of the errors below
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if content.startswith(b"\x80") or zipfile.is_zipfile(io.BytesIO(content)):
            raise InputError(
                f"{path}: holds Python objects, which aren't loaded; save model.state_dict() as .safetensors"
            ) from error
        raise ArtifactError(f"{path}: truncated or altered; get the file again") from error
    except Exception as error:
        if "TorchScript" in str(error):
            raise InputError(f"{path}: is a TorchScript archive; save the model's state_dict()") from error
        raise ArtifactError(f"{path}: truncated or altered; get the file again") from error


def _tied_groups(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of each distinct tensor, sorted; names of the same memory and layout are together."""
    groups: dict[object, list[str]] = {}
    for name in sorted(state):
        tensor = state[name]
        layout = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        groups.setdefault(layout if tensor.numel() and tensor.data_ptr() else name, []).append(name)
    return list(groups.values())


def _complete_ties(state: dict[str, Tensor], own: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Give each name of a tied weight the value that the state dict has under one of them."""
    for group in _tied_groups(own):
        present = [name for name in group if name in state]
        for name in present[1:]:
            if not torch.equal(state[name], state[present[0]]):
                raise InputError(
                    f"{source}: {present[0]!r} and {name!r} are one weight in the model but differ here; "
                    "check the model's args"
                )
        if present:
            state.update({name: state[present[0]] for name in group})
    return state


def _mismatches(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Say which shapes differ, or which floating-point tensors meet integers."""
    wrong = [
        f"{key!r} is {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the model"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    wrong += [
        f"{key!r} is {state[key].dtype} in the file, {own[key].dtype} in the model"
        for key in own
        if key in state and state[key].is_floating_point() != own[key].is_floating_point()
    ]
    return [*wrong[:_SHOWN], *([f"{len(wrong) - _SHOWN} more shapes"] if len(wrong) > _SHOWN else [])]


def _listed(keys: list[str]) -> str:
    """Return the first few keys in quotes, and how many more there are."""
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown
