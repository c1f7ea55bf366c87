"""Two synthetic domains that are learned in a second, and networks that know both.

Class k is a bright blob at its own place on a dark 1 x 8 x 8 image; the other domain is the same with bright and dark
exchanged. A network trained on both is right on both, so a mask has something to take away.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10


def blobs(count: int = 400, *, inverted: bool = False, seed: int = 0, classes: int = CLASSES) -> TensorDataset:
    """Return float images (count, 1, 8, 8) and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    row = 3.5 + 2.5 * torch.tensor([math.sin(2 * math.pi * k / classes) for k in range(classes)])[labels]
    column = 3.5 + 2.5 * torch.tensor([math.cos(2 * math.pi * k / classes) for k in range(classes)])[labels]
    axis = torch.arange(8.0)
    rows = (axis[None, :, None] - row[:, None, None]).square()
    columns = (axis[None, None, :] - column[:, None, None]).square()
    images = 2 * torch.exp(-(rows + columns) / 2) - 0.5
    images = images + 0.3 * torch.randn(images.shape, generator=generator)
    return TensorDataset((-images if inverted else images)[:, None], labels)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def mlp_from(seed: int) -> nn.Module:
    """Return an untrained network, the same for the same seed, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp().eval()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(12 * 16, CLASSES),
    )


class Beside(nn.Module):
    """Has a layer that the logits don't depend on, as networks with auxiliary heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = mlp(), nn.Linear(CLASSES, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.main(x)
        return logits, self.side(logits)


def trained(kind: str = "mlp") -> nn.Module:
    """Return a fresh copy of a network that is right on both domains, in eval mode."""
    if kind == "beside":
        model = Beside()
        model.main.load_state_dict(_weights("mlp"))
        nn.init.ones_(model.side.weight)
        return model.eval()
    model = {"mlp": mlp, "cnn": cnn}[kind]()
    model.load_state_dict(_weights(kind))
    return model.eval()


@functools.cache
def _weights(kind: str) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = {"mlp": mlp, "cnn": cnn}[kind]().train()
        parts = [blobs(200, seed=90), blobs(200, inverted=True, seed=91)]
        images = torch.cat([part.tensors[0] for part in parts])
        labels = torch.cat([part.tensors[1] for part in parts])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    return float((model(images).argmax(1) == labels).float().mean())
