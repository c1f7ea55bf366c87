"""The memory generator: replays images like those it was shown (Eq. 3)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.synthesis.decoder import Decoder, doublings, initialize
from modelfence.synthesis.draws import normal

_SLOPE = 0.2
_GROUPS = 8
_LOG_VARIANCES = 10.0  # the logarithm stays within +- this: no overflow, no vanishing


class MemoryGenerator(Decoder):
    """The generator G_m of MAP (CVPR 2024): the same network as the fresh generator.

    Args:
        image: What the classifier eats.
        latent: Length of a code.
        width: Channels of the first map.

    Raises:
        InputError: ``latent`` or ``width`` is below 1.

    Example:
        >>> spec = ImageSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.5,))
        >>> MemoryGenerator(spec, latent=8, width=16)(torch.randn(2, 8)).shape
        torch.Size([2, 1, 32, 32])
    """


class Encoder(nn.Module):
    """The encoder E_m of MAP (CVPR 2024): from images to a Gaussian over latent codes.

    Convolutions of stride 2, as many as the generator has doublings, and a linear layer. GroupNorm, so that the code of
    an image doesn't depend on the others of its batch. Initial weights come from torch's global generator.

    Args:
        image: What the classifier eats.
        latent: Length of a code, at least 1.
        width: Channels of the last map, at least 8; earlier ones have fewer.

    Raises:
        InputError: ``latent`` is below 1 or ``width`` below 8.

    Example:
        >>> spec = ImageSpec(channels=1, height=28, width=28, mean=(0.5,), std=(0.5,))
        >>> mean, log_variance = Encoder(spec, latent=16)(torch.zeros(2, 1, 28, 28))
        >>> mean.shape, log_variance.shape
        (torch.Size([2, 16]), torch.Size([2, 16]))
    """

    def __init__(self, image: ImageSpec, latent: int = 100, width: int = 128) -> None:
        super().__init__()
        if latent < 1 or width < _GROUPS:
            raise InputError(
                f"encoder: latent is {latent} and width {width}; at least 1 and at least {_GROUPS} are needed"
            )
        self.image = image
        self.latent = latent
        count = doublings(image)
        layers: list[nn.Module] = []
        inputs = image.channels
        for step in reversed(range(count)):
            outputs = max(width // 2**step // _GROUPS * _GROUPS, _GROUPS)
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride=2, padding=1),
                nn.GroupNorm(_GROUPS, outputs),
                nn.LeakyReLU(_SLOPE, inplace=True),
            ]
            inputs = outputs
        area = -(-image.height // 2**count) * -(-image.width // 2**count)
        self._layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * area, 2 * latent))
        initialize(self)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Turn normalized images (N, C, H, W) into mean and log variance of their codes, each (N, latent)."""
        mean, log_variance = self._layers(images).float().chunk(2, dim=1)
        return mean, _LOG_VARIANCES * torch.tanh(log_variance / _LOG_VARIANCES)


class Rebuilt(NamedTuple):
    """What a memory makes of images: they and the Gaussian of their codes, for the two losses of Eq. 3.

    Attributes:
        images: (N, C, H, W), normalized.
        mean: (N, latent).
        log_variance: (N, latent).
    """

    images: Tensor
    mean: Tensor
    log_variance: Tensor


class Memory(nn.Module):
    """An encoder and a generator: a variational autoencoder of the images shown to it.

    Args:
        encoder: From images to codes.
        generator: From codes to images.

    Raises:
        InputError: The lengths of their codes, or their images, differ.

    Example:
        >>> spec = ImageSpec(channels=1, height=28, width=28, mean=(0.5,), std=(0.5,))
        >>> memory = Memory(Encoder(spec, 16), MemoryGenerator(spec, 16)).eval()
        >>> memory.rebuild(torch.zeros(2, 1, 28, 28)).images.shape
        torch.Size([2, 1, 28, 28])
        >>> memory.sample(3, torch.Generator().manual_seed(0)).shape
        torch.Size([3, 1, 28, 28])
    """

    def __init__(self, encoder: Encoder, generator: Decoder) -> None:
        super().__init__()
        if encoder.latent != generator.latent or encoder.image != generator.image:
            raise InputError("memory: encoder and generator differ in image or in length of a code; give both the same")
        self.encoder = encoder
        self.generator = generator

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Rebuilt:
        """Encode and decode images; see :meth:`rebuild`."""
        mean, log_variance = self.encoder(images)
        codes = mean
        if generator is not None:
            codes = mean + (log_variance / 2).exp() * normal(generator, *mean.shape, device=mean.device)
        return Rebuilt(self.generator(codes), mean, log_variance)

    def rebuild(self, images: Tensor, generator: torch.Generator | None = None) -> Rebuilt:
        """Encode and decode images.

        Args:
            images: (N, C, H, W), normalized.
            generator: Draws the codes from their Gaussian, as training needs it; without one they are its mean.

        Returns:
            The images rebuilt, and mean and log variance of their codes.
        """
        rebuilt: Rebuilt = self(images, generator)
        return rebuilt

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Generate images (count, C, H, W) from codes drawn from N(0, 1).

        Args:
            count: How many; at least 2 in train mode.
            generator: The source of randomness.
        """
        return self.generator.sample(count, generator)
