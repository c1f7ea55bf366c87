"""Source models (SL): trained once a domain, kept, and shared by all cells and processes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from modelfence.bench.budgets import Scale
from modelfence.bench.claims import claimed, is_claimed
from modelfence.bench.domains import domains, image_spec, parts_of
from modelfence.errors import ArtifactError, InputError
from modelfence.models.load import load_model, save_model
from modelfence.models.training import TrainConfig, train
from modelfence.models.zoo import create_model

STANDARD = Scale()
"""The scale whose source models have no mark of it in their folder's name."""
_PATCHES = 8
"""Patches along a side that a ViT of timm gets: its own 16 pixels leave two of them on an image of 32."""


class Busy(Exception):  # noqa: N818 (nothing went wrong)
    """Another process is at work on what is needed: come back later."""


@dataclass(frozen=True)
class SourceModel:
    """Which source model.

    Attributes:
        network: Of the zoo or of timm.
        domain: What it learns.
        size: Height and width of the images in pixels.
        classes: Number of classes.
        seed: Of weights, order and shifts, and of the choice of images.
        scale: How many images and epochs.
    """

    network: str
    domain: str
    size: int
    classes: int = 10
    seed: int = 0
    scale: Scale = STANDARD

    @property
    def epochs(self) -> int:
        """Passes over the training images."""
        return self.scale.epochs or (6 if "bn" in self.network or "resnet" in self.network else 12)

    @property
    def args(self) -> dict[str, int]:
        """What the network is built with beside its name."""
        return {"patch_size": max(1, self.size // _PATCHES)} if self.network.startswith("vit_") else {}

    def create(self) -> nn.Module:
        """Build the untrained network."""
        return create_model(self.network, self.classes, image_spec(self.size), **self.args)

    def folder(self, work: Path) -> Path:
        """Return where it is kept in a work folder."""
        name = f"{self.network}-{self.domain}-{self.size}-{self.seed}"
        if replace(self.scale, test_images=None) != STANDARD:
            name += f"-{self.scale.train_images}x{self.epochs}"
        return work / "sl" / name


def source_model(
    work: Path,
    wanted: SourceModel,
    *,
    wait: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> nn.Module:
    """Return a source model; it is trained by one process and kept in the work folder.

    Args:
        work: The work folder.
        wanted: Which one.
        wait: Wait while another process trains it, instead of raising :class:`Busy`.
        announce: Told in one line what is being done.

    Raises:
        Busy: Another process is training it.
        InputError: The domain can't be had, or there is no such network.
        ArtifactError: It can't be written.
        NonFiniteError: The loss became NaN or infinite.
    """
    folder = wanted.folder(work)
    while True:
        found = _finished(folder, announce)
        if found is not None:
            return found
        with claimed(folder) as mine:
            if mine:
                found = _finished(folder, lambda _: None)
                return found if found is not None else _trained(folder, wanted, announce)
        if not wait:
            raise Busy(str(folder))
        while is_claimed(folder):
            time.sleep(1)


def _finished(folder: Path, announce: Callable[[str], None]) -> nn.Module | None:
    if not (folder / "model.json").exists():
        return None
    try:
        return load_model(str(folder)).model
    except (ArtifactError, InputError) as error:
        announce(f"{error}; trained anew")
        return None


def _trained(folder: Path, wanted: SourceModel, announce: Callable[[str], None]) -> nn.Module:
    announce(f"training {wanted.network} on {wanted.domain} ({wanted.epochs} epochs)")
    torch.manual_seed(wanted.seed)
    scale = wanted.scale
    if wanted.seed == 0:
        parts = parts_of(wanted.domain, wanted.size, scale)
    else:  # independent of the others: other images too
        parts = domains(wanted.domain, wanted.size, wanted.seed, scale.train_images, scale.validation_images)
    image = image_spec(wanted.size)
    model = wanted.create()
    start = time.time()
    rate = scale.learning_rate or TrainConfig().learning_rate
    config = TrainConfig(epochs=wanted.epochs, learning_rate=rate, seed=wanted.seed)
    history = train(model, parts.train, parts.validation, config)
    seconds = round(time.time() - start, 1)
    extra = {"domain": wanted.domain, "seed": wanted.seed, "seconds": seconds, "history": history}
    save_model(
        folder, model, reference=wanted.network, args=wanted.args, classes=wanted.classes, image=image, extra=extra
    )
    best = max(row["validation_accuracy"] for row in history)
    announce(f"{wanted.network} on {wanted.domain}: {100 * best:.1f} %, {seconds:.0f} s")
    return model
