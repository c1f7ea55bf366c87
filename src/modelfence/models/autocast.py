"""Which precision a device computes fast in, and the context that uses it."""

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from modelfence.errors import InputError

Precision = Literal["auto", "bf16", "fp32"]
Resolved = Literal["fp32", "bf16"]


def default_precision(device: torch.device | str = "cpu") -> Resolved:
    """Return the precision that a device is taken to learn faster in.

    Args:
        device: Where the model runs.

    Returns:
        ``"bf16"`` on CPUs with AMX, on those with AVX512-BF16 that aren't Intel's, and on CUDA devices with native
        bfloat16; ``"fp32"`` everywhere else. An Intel Xeon with AVX512-BF16 and without AMX (a
        virtual machine) learned more slowly in bfloat16 (``benchmarks/speed.py``).

    Example:
        >>> default_precision("cpu") in ("bf16", "fp32")
        True
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if kind == "cpu" and _cpu_has("_is_amx_tile_supported"):
        return "bf16"
    if kind == "cpu" and _cpu_has("_is_avx512_bf16_supported") and "intel" not in processor().lower():
        return "bf16"
    return "fp32"


@functools.cache
def processor() -> str:
    """Return the name of the CPU, empty where it can't be had.

    Example:
        >>> isinstance(processor(), str)
        True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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

    Weights, their gradients and everything outside the context stay as they are. In a loop that learns, see
    :func:`attention_in_float32` too.

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


@contextlib.contextmanager
def attention_in_float32(device: torch.device | str, precision: str) -> Iterator[None]:
    """Return a context for a loop in which bfloat16 autocast on a CPU leaves attention in float32.

    torch's fused attention on CPUs is slower in bfloat16 than in float32 (``benchmarks/speed.py``, vit_tiny). Inside
    the context ``torch.nn.functional.scaled_dot_product_attention``, which timm's networks and
    ``nn.MultiheadAttention`` call, is replaced in the whole process by a function that computes in float32 where
    autocast is on, and is the same elsewhere. Put it around the backward pass too: a checkpointed network computes
    again there. In other precisions and on other devices the context does nothing.

    Args:
        device: Where the model runs.
        precision: "bf16", or Fabric's word "bf16-mixed"; all others mean that there is no bfloat16 autocast.

    Example:
        >>> heads = torch.ones(1, 1, 3, 4)
        >>> with attention_in_float32("cpu", "bf16"), torch.autocast("cpu", dtype=torch.bfloat16):
        ...     F.scaled_dot_product_attention(heads, heads, heads).dtype
        torch.bfloat16
    """
    if torch.device(device).type != "cpu" or precision not in ("bf16", "bf16-mixed"):
        yield
        return
    fused = F.scaled_dot_product_attention

    @functools.wraps(fused)
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not torch.is_autocast_enabled("cpu") or any(value.dtype == torch.float64 for value in tensors):
            return fused(*args, **kwargs)  # autocast leaves float64 alone too
        with torch.autocast("cpu", enabled=False):
            found = fused(*map(_float32, args), **{name: _float32(value) for name, value in kwargs.items()})
        return found.to(torch.get_autocast_dtype("cpu"))

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = fused


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
