"""Which precision a device computes fast in, and the context that uses it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from modelfence.errors import InputError

Precision = Literal["auto", "bf16", "fp32"]
Resolved = Literal["fp32", "bf16"]


def default_precision(device: torch.device | str = "cpu") -> Resolved:
    """Return the faster precision that a device computes natively.

    Args:
        device: Where the model runs.

    Returns:
        ``"bf16"`` on CPUs with AVX512-BF16 or AMX instructions and on CUDA devices with native bfloat16,
        ``"fp32"`` everywhere else.

    Example:
        >>> default_precision("cpu") in ("bf16", "fp32")
        True
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if kind == "cpu" and (_cpu_has("_is_avx512_bf16_supported") or _cpu_has("_is_amx_tile_supported")):
        return "bf16"
    return "fp32"


def resolve_precision(precision: str, device: torch.device | str = "cpu") -> Resolved:
    """Turn ``"auto"`` into the precision that suits a device.

    Args:
        precision: ``"auto"``, ``"bf16"`` or ``"fp32"``.
        device: Where the model runs.

    Returns:
        ``"bf16"`` or ``"fp32"``.

    Raises:
        InputError: The precision is none of the three.

    Example:
        >>> resolve_precision("fp32", "cpu")
        'fp32'
    """
    if precision == "auto":
        return default_precision(device)
    if precision == "bf16":
        return "bf16"
    if precision == "fp32":
        return "fp32"
    raise InputError(f"precision {precision!r} isn't known; use 'auto', 'bf16' or 'fp32'")


def autocast(device: torch.device | str, precision: str = "auto") -> contextlib.AbstractContextManager[object]:
    """Return a context in which matrix products and convolutions run in the given precision.

    Weights, their gradients and everything outside the context stay as they are. On a CPU attention runs in float32
    (:func:`attention_in_float32`).

    Args:
        device: Where the model runs.
        precision: ``"auto"``, ``"bf16"`` or ``"fp32"``; the last turns an outer autocast off.

    Returns:
        A context manager that can be entered once.

    Raises:
        InputError: The precision is none of the three.

    Example:
        >>> layer, images = torch.nn.Linear(4, 2), torch.zeros(3, 4)
        >>> with autocast("cpu", "bf16"):
        ...     layer(images).dtype
        torch.bfloat16
    """
    kind = torch.device(device).type
    if resolve_precision(precision, device) == "fp32":
        return torch.autocast(kind, enabled=False)
    return _bf16_on_cpu() if kind == "cpu" else torch.autocast(kind, dtype=torch.bfloat16)


@contextlib.contextmanager
def _bf16_on_cpu() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), attention_in_float32("cpu"):
        yield


def attention_in_float32(device: torch.device | str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast leaves attention on a CPU in float32, whose kernel is the faster one there.

    torch's fused attention on CPUs takes several times as long backward in bfloat16 as in float32. Where there is no
    autocast, and on other devices, nothing changes.

    Args:
        device: Where the model runs.

    Example:
        >>> heads = torch.ones(1, 1, 3, 4)
        >>> with attention_in_float32("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        ...     F.scaled_dot_product_attention(heads, heads, heads).dtype
        torch.bfloat16
    """
    return _AttentionInFloat32() if torch.device(device).type == "cpu" else contextlib.nullcontext()


class _AttentionInFloat32(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is not F.scaled_dot_product_attention or not torch.is_autocast_enabled("cpu"):
            return func(*args, **given)
        with torch.autocast("cpu", enabled=False):
            found = func(*map(_float32, args), **{name: _float32(value) for name, value in given.items()})
        return found.to(torch.get_autocast_dtype("cpu"))


def _float32(value: Any) -> Any:
    """Return a tensor of floating point numbers in float32; everything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _cpu_has(check: str) -> bool:
    """Ask torch whether the processor has an instruction set; torch versions without the question say no."""
    ask = getattr(torch.cpu, check, None)
    try:
        return bool(ask and ask())
    except (AttributeError, RuntimeError):
        return False
