"""Which precision a device computes fast in, and the context that uses it."""

import contextlib
from typing import Literal

import torch

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

    Weights, their gradients and everything outside the context stay as they are.

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
    return torch.autocast(kind, dtype=torch.bfloat16)


def _cpu_has(check: str) -> bool:
    """Ask torch whether the processor has an instruction set; torch versions without the question say no."""
    ask = getattr(torch.cpu, check, None)
    try:
        return bool(ask and ask())
    except (AttributeError, RuntimeError):
        return False
