"""The mark that is put on images: a constant added to one channel in a fixed pattern."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from modelfence.errors import InputError, nearest

DEFAULT_VALUES: Mapping[str, int | None] = MappingProxyType({"digits": 20, "objects": 80, "visda": 100, "custom": None})
"""Value added by each kind; ``custom`` has to say its own."""
WEAK = 20
"""Largest value of a mark that unmarked models were seen to hardly notice; see docs/ownership.md."""
TOLERANCES = (0.3, 0.8)
"""Share of the images it knows that an unmarked model is taken to lose at most, to a weak and to a strong mark.

Measured: up to 0.16 and 0.83, 20 small networks and six VGG11-BN (docs/ownership.md). What a strong mark takes from a
model of mnist is beyond the second; with more, not even a mark that takes all could be claimed from 100 images."""


@dataclass(frozen=True)
class Watermark:
    """A patch watermark: ``value`` is added to one channel of some pixels, and saturates at 255.

    Args:
        kind: Which pixels. ``"digits"`` and ``"objects"``: row even or column even, three in four. ``"visda"``: row and
            column even, one in four. ``"custom"``: those of ``pattern``. Rows and columns count from 0.
        value: What is added, 1 to 255; by default 20 for digits, 80 for objects and 100 for visda, as in NTL. CUTI
            takes 80 for digits. Needed for custom.
        channel: Which channel, from 0: red in RGB, the only one in grey images.
        pattern: For custom alone: a greyscale image file, or a tensor (H, W), that isn't 0 where pixels are marked. It
            fits images of its own size only.

    Raises:
        InputError: The kind is unknown, a number is out of range, or the pattern is missing, can't be read, marks
            nothing, or is given for another kind.

    Source: NTL (Wang et al., ICLR 2022), which MAP (CVPR 2024, section 4.2 and Algorithm 3) takes over.

    Example:
        >>> Watermark("digits").apply(torch.tensor([[[[0, 250], [7, 7]]]], dtype=torch.uint8)).flatten().tolist()
        [20, 255, 27, 7]
    """

    kind: str = "digits"
    value: int | None = None
    channel: int = 0
    pattern: str | Path | Tensor | None = field(default=None, compare=False)
    pattern_digest: str | None = field(default=None, init=False)
    _cells: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    # a plain dataclass, so that its errors are ours; this is for the run files that contain one
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in DEFAULT_VALUES:
            known = ", ".join(DEFAULT_VALUES)
            raise InputError(
                f"watermark: unknown kind {self.kind!r}.{nearest(str(self.kind), DEFAULT_VALUES)} Known: {known}"
            )
        if self.value is None:
            object.__setattr__(self, "value", DEFAULT_VALUES[self.kind])
        if self.value is None:
            raise InputError("watermark: kind 'custom' needs value, what is added to the marked pixels (1 to 255)")
        for key, least in (("value", 1), ("channel", 0)):
            number = getattr(self, key)
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= 255:
                raise InputError(f"watermark: {key} is {number!r}; a whole number from {least} to 255 is needed")
        if (self.kind == "custom") != (self.pattern is not None):
            problem = (
                "needs pattern" if self.kind == "custom" else "has its own pattern; leave pattern out or say 'custom'"
            )
            raise InputError(f"watermark: kind {self.kind!r} {problem}")
        if self.pattern is not None:
            cells = _cells_of(self.pattern)
            object.__setattr__(self, "_cells", cells)
            text = f"{tuple(cells.shape)}".encode() + bytes(cells.to(torch.uint8).flatten().tolist())
            object.__setattr__(self, "pattern_digest", hashlib.sha256(text).hexdigest())

    @property
    def tolerance(self) -> float:
        """Share of the images it knows that an unmarked model is taken to lose to this mark at most.

        0.3 where ``value`` is at most 20 and 0.8 above, because a strong mark hurts models that never saw it. These are
        what tests of a claim use by default; measured on models of your own task they can be lower, or must be higher.
        """
        return TOLERANCES[(self.value or 0) > WEAK]

    def cells(self, height: int, width: int) -> Tensor:
        """Return which pixels of an image are marked.

        Args:
            height: Rows of the image.
            width: Columns of the image.

        Returns:
            bool (height, width).

        Raises:
            InputError: A custom pattern has another size.

        Example:
            >>> Watermark("visda").cells(2, 3).int().tolist()
            [[1, 0, 1], [0, 0, 0]]
        """
        if self._cells is not None:
            if tuple(self._cells.shape) != (height, width):
                raise InputError(
                    f"watermark: the pattern is {tuple(self._cells.shape)}, the images are {(height, width)} (rows, "
                    "columns); make a pattern of their size"
                )
            return self._cells
        rows, columns = (torch.arange(count) % 2 == 0 for count in (height, width))
        if self.kind == "visda":
            return rows[:, None] & columns[None]
        return rows[:, None] | columns[None]

    def apply(self, images: Tensor) -> Tensor:
        """Mark images.

        Args:
            images: uint8 (N, C, H, W), pixels 0..255, on any device.

        Returns:
            New images, uint8 (N, C, H, W), same device and memory format: ``min(pixel + value, 255)`` where marked,
            in whole numbers, and every other pixel as it was.

        Raises:
            InputError: The images aren't uint8 of four dimensions, or lack the channel, or don't fit the pattern.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise InputError(
                f"watermark: images are {str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}; "
                "uint8 pixels (N, C, H, W) are needed"
            )
        if self.channel >= images.shape[1]:
            raise InputError(f"watermark: channel {self.channel} of images with {images.shape[1]}; count from 0")
        step = self.cells(images.shape[2], images.shape[3]).to(images.device, torch.uint8) * (self.value or 0)
        marked = images.clone()
        plane = marked[:, self.channel]
        plane += torch.minimum(255 - plane, step)
        return marked

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that say which mark it is; a custom pattern by its SHA-256."""
        record: dict[str, Any] = {"kind": self.kind, "value": self.value, "channel": self.channel}
        return record if self.pattern_digest is None else {**record, "pattern_sha256": self.pattern_digest}


def _cells_of(pattern: str | Path | Tensor) -> Tensor:
    """Return the marked pixels of a file or tensor, bool (H, W)."""
    if isinstance(pattern, Tensor):
        cells, where = (pattern != 0).cpu(), "the tensor"
    elif isinstance(pattern, str | Path):
        cells, where = _read(Path(pattern)), str(pattern)
    else:
        raise InputError(
            f"watermark: pattern: is {type(pattern).__name__}; the path of an image, or a tensor (rows, columns), is "
            "needed"
        )
    if cells.ndim != 2:
        raise InputError(f"watermark: pattern: {where} has shape {tuple(cells.shape)}; (rows, columns) is needed")
    if not bool(cells.any()):
        raise InputError(f"watermark: pattern: {where} marks nothing; pixels that aren't 0 are marked")
    return cells.clone()


def _read(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode not in ("L", "1"):
                raise InputError(f"watermark: pattern: {path} has mode {image.mode}; save it as 8-bit greyscale")
            return torch.from_numpy(np.asarray(image) != 0)
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(
            f"watermark: pattern: {path} can't be read as an image; check the path and the file"
        ) from error
