"""A network that modelfence knows nothing about; own-network.toml names its function ``build``."""

from torch import nn


def build(classes: int, width: int) -> nn.Module:
    """Return the network with random weights; modelfence loads the weights file into it.

    Args:
        classes: Number of logits.
        width: Channels of the first convolution.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(2 * width * 16, classes),
    )
