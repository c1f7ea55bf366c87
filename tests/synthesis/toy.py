"""Image specs and sources of randomness for tests of generated images."""

import torch

from modelfence.data.image_spec import ImageSpec


def spec(channels: int = 3, height: int = 32, width: int | None = None) -> ImageSpec:
    mean, std = (0.5, 0.4, 0.3, 0.2)[:channels], (0.2, 0.25, 0.3, 0.35)[:channels]
    return ImageSpec(channels=channels, height=height, width=width or height, mean=mean, std=std)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_unit(images: torch.Tensor, slack: float = 0.0) -> None:
    assert images.isfinite().all()
    assert images.min() >= -slack
    assert images.max() <= 1 + slack
