"""From encoded images to pixels: decoding, channels, size, and where the pixels are kept."""

import io
import math
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError

_CHUNK = 512  # images read at a time
_SLICE = 32  # images a thread converts at a time
_UNDECODABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)

Pixels = npt.NDArray[np.uint8]


class ImageSource(Protocol):
    """Images that can be read by number."""

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        """Read images: encoded bytes, paths, PIL images, arrays (H, W[, C]) or tensors (C, H, W)."""
        ...

    def where(self, index: int) -> str:
        """Say where an image comes from: its path, or its file and row."""
        ...


def to_pixels(image: object, spec: ImageSpec, where: str) -> Pixels:
    """Decode one image, give it the spec's channels, and resize it (PIL, bilinear).

    Args:
        image: Encoded bytes, a path, a PIL image, an array (H, W), (H, W, C) or a tensor (C, H, W) of uint8.
        spec: Channels and size wanted. Grey and colour are converted into each other, transparency is
            dropped, 16-bit greys are scaled to 8 bits.
        where: What errors call the image.

    Returns:
        uint8 (H, W, C).

    Raises:
        InputError: The image can't be decoded, or can't be given the spec's channels.

    Example:
        >>> spec = ImageSpec(channels=3, height=2, width=2, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> to_pixels(np.full((4, 4), 7, dtype=np.uint8), spec, "a grey square").shape
        (2, 2, 3)
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    if isinstance(image, np.ndarray):
        ready = _as_is(image, spec, where)
        if ready is not None:
            return ready
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
    try:
        if isinstance(image, bytes):
            image = Image.open(io.BytesIO(image))
        elif isinstance(image, str | Path):
            image = Image.open(image)
        if not isinstance(image, Image.Image):
            raise InputError(f"{where}: {type(image).__name__} isn't an image")
        image.load()
        picture = _with_channels(image, spec, where)
    except InputError:
        raise
    except _UNDECODABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{where}: image can't be decoded ({reason}); repair or remove it") from error
    if picture.size != (spec.width, spec.height):
        picture = picture.resize((spec.width, spec.height), Image.Resampling.BILINEAR)
    pixels: Pixels = np.asarray(picture)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _as_is(array: npt.NDArray[Any], spec: ImageSpec, where: str) -> Pixels | None:
    """Return an array that already has the spec's shape, or None where PIL has to convert it."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise InputError(
            f"{where}: {array.dtype} array of shape {array.shape}; uint8 pixels (H, W) or (H, W, channels) are needed"
        )
    array = array[..., None] if array.ndim == 2 else array
    if array.shape == (spec.height, spec.width, spec.channels):
        return array
    if array.shape[2] != spec.channels and not {array.shape[2], spec.channels} <= {1, 3}:
        raise _wrong_channels(where, str(array.shape[2]), spec)
    if array.shape[2] not in (1, 3):
        raise InputError(f"{where}: size {array.shape[:2]}; {spec.height} x {spec.width} is needed")
    return None


def _with_channels(image: Image.Image, spec: ImageSpec, where: str) -> Image.Image:
    if spec.channels not in (1, 3):
        raise _wrong_channels(where, f"mode {image.mode}", spec)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise InputError(f"{where}: floating-point image; store 8-bit or 16-bit pixels")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    wanted = "L" if spec.channels == 1 else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def _wrong_channels(where: str, found: str, spec: ImageSpec) -> InputError:
    return InputError(
        f"{where}: image with channels: {found}; the image spec needs {spec.channels}, and only grey (1) and "
        "colour (3) are converted into each other"
    )


def decode(source: ImageSource, indices: Sequence[int], spec: ImageSpec) -> Tensor:
    """Read and convert some images, with several threads where there are several processors.

    Args:
        source: The images.
        indices: Which ones.
        spec: Channels and size wanted.

    Returns:
        uint8 (B, H, W, C).

    Raises:
        InputError: See :func:`to_pixels`.
    """
    raw = source.read_many(indices)
    out = np.empty((len(indices), spec.height, spec.width, spec.channels), dtype=np.uint8)

    def convert(first: int) -> None:
        for position in range(first, min(first + _SLICE, len(indices))):
            out[position] = to_pixels(raw[position], spec, source.where(indices[position]))

    starts = range(0, len(indices), _SLICE)
    if len(starts) < 2 or _threads() < 2:
        for first in starts:
            convert(first)
    else:
        list(_pool().map(convert, starts))
    return torch.from_numpy(out)


def fits(count: int, spec: ImageSpec, memory_limit_gib: float) -> bool:
    """Say whether so many decoded images stay within a memory limit.

    Args:
        count: Number of images.
        spec: Their channels and size; one byte per value.
        memory_limit_gib: The limit in GiB (2**30 bytes).

    Returns:
        Whether they fit.
    """
    return count * math.prod(spec.shape) <= memory_limit_gib * 2**30


def from_memory(source: ImageSource, rows: Sequence[int], spec: ImageSpec) -> Callable[[Tensor], Tensor]:
    """Decode images now and keep their pixels.

    Args:
        source: The images.
        rows: Which of them, in the domain's order.
        spec: Channels and size wanted.

    Returns:
        What :class:`modelfence.data.domain.IndexedDomain` fetches with: uint8 (B, C, H, W), channels last.

    Raises:
        InputError: An image can't be decoded.
    """
    pixels = torch.empty((len(rows), spec.height, spec.width, spec.channels), dtype=torch.uint8)
    for first in range(0, len(rows), _CHUNK):
        part = rows[first : first + _CHUNK]
        pixels[first : first + len(part)] = decode(source, part, spec)
    return lambda indices: pixels.index_select(0, indices).permute(0, 3, 1, 2)


def on_demand(source: ImageSource, rows: Sequence[int], spec: ImageSpec) -> Callable[[Tensor], Tensor]:
    """Decode images each time they are asked for; the first one now, so that a wrong source shows at once.

    Args:
        source: The images.
        rows: Which of them, in the domain's order.
        spec: Channels and size wanted.

    Returns:
        What :class:`modelfence.data.domain.IndexedDomain` fetches with: uint8 (B, C, H, W), channels last.

    Raises:
        InputError: The first image can't be decoded; later ones raise when they are fetched.
    """
    decode(source, rows[:1], spec)
    return lambda indices: decode(source, [rows[i] for i in indices.tolist()], spec).permute(0, 3, 1, 2)


@cache
def _threads() -> int:
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="modelfence-decode")
