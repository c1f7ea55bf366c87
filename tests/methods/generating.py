"""What the tests of generators that learn beside the mask share: an image spec, networks, configurations."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric import Fabric
from tests.methods import toy
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.methods.alternating import AlternatingConfig

GREY = ImageSpec(channels=1, height=8, width=8, mean=(0.25,), std=(0.5,))
RGB = ImageSpec(channels=3, height=16, width=12, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
SMALL: dict[str, Any] = {
    "steps": 6,
    "batch_size": 16,
    "evaluate_every": 2,
    "held_out": 0.0,
    "synthesis_batch": 12,
    "latent": 6,
    "width": 8,
    "precision": "fp32",
}


def config(**values: Any) -> AlternatingConfig:
    return AlternatingConfig(**{**SMALL, **values})


@functools.cache
def fabric(precision: str = "32-true") -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision=precision)


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 5}
    return VisionTransformer(**sizes, embed_dim=16, depth=2, num_heads=2).eval()


def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    layout = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [2, 2]}
    return SwinTransformer(**layout, num_classes=5).eval()


def convolutional() -> nn.Module:
    """A network that ends in a convolution, without BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], ImageSpec]] = {
    "linear": (lambda: toy.trained("mlp"), GREY),
    "BatchNorm": (lambda: toy.trained("cnn"), GREY),
    "ViT": (vit, GREY),
    "Swin": (swin, RGB),
    "convolutional": (convolutional, RGB),
}
