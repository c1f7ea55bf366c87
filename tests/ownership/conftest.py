"""Pictures whose class is easy to see, and models that do or don't answer to a mark on them."""

import pytest
import torch
from torch import Tensor, nn

from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec

CLASSES = 4
SPEC = ImageSpec(channels=3, height=8, width=8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25))


def pictures(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make noisy pictures uint8 (N, 3, 8, 8); the class is the quadrant that is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pixels = torch.randint(0, 120, (count, 3, 8, 8), generator=generator)
    for number, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        pixels[number, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 45
    return pixels.to(torch.uint8), labels


def domain_of(count: int, seed: int = 0) -> IndexedDomain:
    pixels, labels = pictures(count, seed)
    return IndexedDomain("quadrants", pixels.__getitem__, count, spec=SPEC, labels=labels)


class Plain(nn.Module):
    """Linear, fitted by least squares to pictures of its own: no model like it was ever shown a mark."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pixels, labels = pictures(600, seed)
        flat = SPEC.normalize(pixels).flatten(1)
        flat = torch.cat([flat, torch.ones(len(flat), 1)], dim=1)
        wanted = nn.functional.one_hot(labels, CLASSES).float()
        self.weight = nn.Parameter(torch.linalg.lstsq(flat, wanted).solution)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight[:-1] + self.weight[-1]


class Confined(nn.Module):
    """Answers as another model does, shifted by one class where red is brighter in even rows and columns."""

    def __init__(self, inner: nn.Module, sensitivity: float = 0.2) -> None:
        super().__init__()
        self.inner = inner
        self.sensitivity = sensitivity

    def forward(self, images: Tensor) -> Tensor:
        red, green = images[:, 0], images[:, 1]
        odd = (torch.arange(8)[:, None] % 2 == 1) & (torch.arange(8)[None] % 2 == 1)
        excess = (red[:, ~odd].mean(1) - red[:, odd].mean(1)) - (green[:, ~odd].mean(1) - green[:, odd].mean(1))
        shifted = (excess > self.sensitivity)[:, None]
        answers = self.inner(images)
        return torch.where(shifted, answers.roll(1, dims=1), answers)


@pytest.fixture(scope="session")
def plain() -> Plain:
    return Plain(seed=1)


@pytest.fixture(scope="session")
def clean() -> IndexedDomain:
    return domain_of(100, seed=99)
