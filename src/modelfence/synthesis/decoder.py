"""The network from latent codes to images that the fresh and the memory generator share."""

import itertools

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.synthesis.draws import normal

_SMALLEST_START = 6  # pixels on the longer side before the first doubling
_SLOPE = 0.2


class Decoder(nn.Module):
    """From latent codes to images of any size, normalized as a classifier takes them.

    After DAFL (ICCV 2019): a linear layer to a small map, then blocks of doubling, convolution, BatchNorm and leaky
    ReLU; as many blocks as bring a map of 6 to 12 pixels to the size of the image, whose surplus is cut off at the
    borders. A sigmoid keeps every image a possible one. Initial weights come from torch's global generator.

    Args:
        image: What the classifier eats.
        latent: Length of a code, at least 1.
        width: Channels of the first map; later ones have fewer.

    Attributes:
        image: As given.
        latent: As given.

    Raises:
        InputError: ``latent`` or ``width`` is below 1.

    Example:
        >>> spec = ImageSpec(channels=1, height=28, width=28, mean=(0.5,), std=(0.5,))
        >>> Decoder(spec, latent=16)(torch.randn(4, 16)).shape
        torch.Size([4, 1, 28, 28])
    """

    def __init__(self, image: ImageSpec, latent: int = 100, width: int = 128) -> None:
        super().__init__()
        for key, value in (("latent", latent), ("width", width)):
            if value < 1:
                raise InputError(f"generator: {key} is {value}; at least 1 is needed")
        self.image = image
        self.latent = latent
        blocks = doublings(image)
        self._start = tuple(-(-side // 2**blocks) for side in (image.height, image.width))
        widths = [width, *(max(width // 2**step, min(width, 16)) for step in range(blocks))]
        self._linear = nn.Linear(latent, width * self._start[0] * self._start[1])
        self._blocks = nn.Sequential(
            nn.BatchNorm2d(width), *(_block(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))
        )
        self._last = nn.Conv2d(widths[-1], image.channels, 3, padding=1)
        initialize(self)

    def forward(self, codes: Tensor) -> Tensor:
        """Turn codes (N, latent) into normalized images (N, C, H, W)."""
        maps = self._linear(codes).view(len(codes), -1, *self._start)
        images = torch.sigmoid(self._last(self._blocks(maps)).float())
        top, left = ((images.shape[axis] - self.image.shape[axis - 1]) // 2 for axis in (2, 3))
        return self.image.from_unit(images[:, :, top : top + self.image.height, left : left + self.image.width])

    def codes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes (count, latent) from N(0, 1), on the device of the weights.

        Args:
            count: How many.
            generator: The source of randomness.
        """
        return normal(generator, count, self.latent, device=self._linear.weight.device)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Generate images (count, C, H, W) from codes drawn from N(0, 1).

        Args:
            count: How many; at least 2 in train mode.
            generator: The source of randomness.
        """
        images: Tensor = self(self.codes(count, generator))
        return images


def doublings(image: ImageSpec) -> int:
    """Return how often a small map is doubled to reach the size of an image.

    Args:
        image: What the classifier eats.

    Example:
        >>> [doublings(ImageSpec(1, side, side, (0.5,), (0.5,))) for side in (8, 28, 32, 33, 96, 224)]
        [1, 2, 2, 2, 4, 5]
    """
    longer, count = max(image.height, image.width), 1
    while longer / 2 ** (count + 1) >= _SMALLEST_START:
        count += 1
    return count


def initialize(network: nn.Module) -> None:
    """Give convolutions and linear layers He's initial weights for leaky ReLU, in place.

    Args:
        network: Its weights are drawn from torch's global generator.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, a=_SLOPE, nonlinearity="leaky_relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(_SLOPE, inplace=True),
    )
