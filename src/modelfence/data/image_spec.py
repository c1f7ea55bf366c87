"""What a model eats: channels, size and normalization of its images."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from modelfence.errors import InputError

_MOST_CHANNELS = 1024
_MOST_PIXELS = 8192


@dataclass(frozen=True)
class ImageSpec:
    """Shape and normalization of a model's input.

    Args:
        channels: Number of channels, 1 (grey) or 3 (RGB) for encoded images; any other number for tensors.
        height: Height in pixels.
        width: Width in pixels.
        mean: One value per channel on the scale 0..1, subtracted from the pixels divided by 255.
        std: One positive value per channel, the divisor afterwards.

    Raises:
        InputError: A size isn't a positive whole number, or ``mean`` and ``std`` don't have one usable value
            per channel.

    Example:
        >>> ImageSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3).shape
        (3, 32, 32)
    """

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    # a plain dataclass, so that its errors are ours; this is for the run files that contain one
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for key, most in (("channels", _MOST_CHANNELS), ("height", _MOST_PIXELS), ("width", _MOST_PIXELS)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InputError(f"image spec: {key} is {value!r}; a whole number from 1 to {most} is needed")
        for key in ("mean", "std"):
            object.__setattr__(self, key, self._per_channel(key, getattr(self, key)))
        if min(self.std) <= 0:
            raise InputError(f"image spec: std is {self.std}; positive numbers are needed")

    def _per_channel(self, key: str, values: object) -> tuple[float, ...]:
        """Return the values as finite floats, one per channel."""
        if not isinstance(values, Sequence) or not all(_is_finite(value) for value in values):
            raise InputError(f"image spec: {key} is {values!r}; a list of finite numbers is needed")
        if len(values) != self.channels:
            raise InputError(
                f"image spec: {key} has {len(values)} values for {self.channels} channels; one each is needed"
            )
        return tuple(float(value) for value in values)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    def normalize(self, images: Tensor) -> Tensor:
        """Turn pixels into what the model eats: ``(pixels / 255 - mean) / std``.

        Args:
            images: uint8 (N, C, H, W) with values 0..255, on any device.

        Returns:
            float32 (N, C, H, W) on the same device and in the same memory format; bit for bit what
            torchvision's ``ToTensor`` and ``Normalize`` give.

        Raises:
            InputError: The images aren't uint8 or have another shape than the spec.

        Example:
            >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
            >>> spec.normalize(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
            tensor([[[[-1.,  1.]]]])
        """
        if images.dtype != torch.uint8:
            raise InputError(f"images are {images.dtype}; uint8 pixels 0..255 are needed to normalize")
        self.check(images)
        if self.channels > 1 and images.is_contiguous(memory_format=torch.channels_last):
            # rows of width x channels numbers: several times as quick as a broadcast over the channels alone
            mean, std = _constants(self.mean, self.std, images.device, self.width)
            rows = images.permute(0, 2, 3, 1).to(torch.float32).flatten(2)
            rows.div_(255).sub_(mean).div_(std)
            return rows.view(len(images), self.height, self.width, self.channels).permute(0, 3, 1, 2)
        mean, std = _constants(self.mean, self.std, images.device)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def denormalize(self, images: Tensor) -> Tensor:
        """Turn normalized images back into pixels; values beyond 0..255 are clipped.

        Args:
            images: floating point (N, C, H, W).

        Returns:
            uint8 (N, C, H, W), rounded to the nearest pixel value.

        Raises:
            InputError: The images have another shape than the spec.

        Example:
            >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
            >>> spec.denormalize(torch.tensor([[[[-1.0, 1.0]]]]))
            tensor([[[[  0, 255]]]], dtype=torch.uint8)
        """
        self.check(images)
        mean, std = _constants(self.mean, self.std, images.device)
        return images.float().mul(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)

    def from_unit(self, images: Tensor) -> Tensor:
        """Turn images on the scale 0..1 into what the model eats; differentiable, for generated images.

        Args:
            images: floating point (N, C, H, W), black 0, white 1.

        Returns:
            The same shape and dtype: ``(images - mean) / std``.

        Raises:
            InputError: The images have another shape than the spec.

        Example:
            >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
            >>> spec.from_unit(torch.tensor([[[[0.0, 1.0]]]]))
            tensor([[[[-1.,  1.]]]])
        """
        self.check(images)
        mean, std = _constants(self.mean, self.std, images.device)
        return (images - mean.to(images.dtype)) / std.to(images.dtype)

    def to_unit(self, images: Tensor) -> Tensor:
        """Turn what the model eats into images on the scale 0..1: the inverse of :meth:`from_unit`, not clipped.

        Args:
            images: floating point (N, C, H, W), normalized.

        Returns:
            The same shape and dtype: ``images * std + mean``.

        Raises:
            InputError: The images have another shape than the spec.

        Example:
            >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.5,), std=(0.5,))
            >>> spec.to_unit(torch.tensor([[[[-1.0, 1.0]]]]))
            tensor([[[[0., 1.]]]])
        """
        self.check(images)
        mean, std = _constants(self.mean, self.std, images.device)
        return images * std.to(images.dtype) + mean.to(images.dtype)

    def check(self, images: Tensor, where: str = "images") -> None:
        """Refuse images that don't have the spec's shape.

        Args:
            images: (N, C, H, W) of any type.
            where: What the error calls them.

        Raises:
            InputError: Another number of dimensions, channels, rows or columns.
        """
        if images.ndim != 4 or tuple(images.shape[1:]) != self.shape:
            raise InputError(
                f"{where}: shape {tuple(images.shape)} doesn't fit the image spec, which needs "
                f"(N, {self.channels}, {self.height}, {self.width}); "
                "resize or convert the images, or change the spec"
            )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@functools.lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean and std as (C, 1, 1), or repeated for a row of pixels as (width * C,).

    They are kept, so that a training step copies nothing to the device.
    """
    with torch.inference_mode(False):
        pair = [torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std)]
        first, second = (one.view(-1, 1, 1) if width is None else one.repeat(width) for one in pair)
        return first, second
