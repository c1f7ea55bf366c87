"""The diversity generator: images in learned neighbour styles (Eqs. 5 and 6, Algorithm 2)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.synthesis.draws import normal

_KERNELS = (5, 9, 13, 17)
_FULL_SIDE = 32  # pixels from which on the kernels have their full size
_NOISE = 0.01  # of the learnable noise level
_SMALLEST_SUM = 0.5  # of the mixing weights, which are divided by it
_SMALLEST_SIDE = 8


class DiversityGenerator(nn.Module):
    """Restyles images by random convolutions between which learnable shifts lie.

    The style-complement module of Learning to Diversify (ICCV 2021), as MAP (CVPR 2024) uses it: in each of four
    branches a convolution without padding, instance normalization, a learnable factor and summand for every element of
    the map, the transposed convolution and tanh. Branches are mixed with random weights whose sum is 1, and the
    mixture is turned into an image by a sigmoid. The convolutions are drawn anew at every call; only the shifts and the
    level of the noise on the input are learned. Initial shifts come from torch's global generator.

    Args:
        image: What the classifier eats; at least 8 x 8 pixels.
        directions: How many groups the channels between the convolutions fall into; see
            :func:`drop_direction_gradients`.
        keep: Share of the original that is blended in, 0..1.

    Attributes:
        image: As given.
        directions: As given.
        keep: As given.

    Raises:
        InputError: The image is too small, ``directions`` is below 1 or ``keep`` isn't in 0..1.

    Example:
        >>> spec = ImageSpec(channels=1, height=28, width=28, mean=(0.5,), std=(0.5,))
        >>> images = spec.from_unit(torch.rand(2, 1, 28, 28))
        >>> styled = DiversityGenerator(spec)(images, torch.Generator().manual_seed(0))
        >>> styled.shape, bool(styled.abs().max() <= 1)
        (torch.Size([2, 1, 28, 28]), True)
    """

    def __init__(self, image: ImageSpec, directions: int = 4, keep: float = 0.4) -> None:
        super().__init__()
        side = min(image.height, image.width)
        if side < _SMALLEST_SIDE:
            raise InputError(
                f"diversity generator: images are {image.height} x {image.width}; at least 8 x 8 is needed"
            )
        if directions < 1 or not 0 <= keep <= 1:
            raise InputError(
                f"diversity generator: directions is {directions} and keep {keep}; at least 1 and 0..1 are needed"
            )
        self.image = image
        self.directions = directions
        self.keep = keep
        channels = directions * -(-image.channels // directions)
        self.branches = nn.ModuleList(_Branch(kernel, image, channels) for kernel in kernel_sizes(side))
        self.noise = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Restyle images.

        Args:
            images: (N, C, H, W), normalized.
            generator: Draws noise, convolutions and weights of the mixture.

        Returns:
            The same shape, normalized, with the original blended in; in the range of images if the input is.
        """
        noisy = images + _NOISE * self.noise * normal(generator, *images.shape, device=images.device)
        weights = normal(generator, len(self.branches), device=images.device)
        total = weights.sum()
        weights = weights / torch.where(total < 0, -1.0, 1.0).mul(total.abs().clamp_min(_SMALLEST_SUM))
        mixed = torch.zeros_like(images)
        for weight, branch in zip(weights, self.branches, strict=True):
            mixed = mixed + weight * branch(noisy, generator)
        styled = self.image.from_unit(torch.sigmoid(mixed.float()))
        return self.keep * images + (1 - self.keep) * styled


class _Branch(nn.Module):
    """Convolution, normalization, shifts, transposed convolution."""

    def __init__(self, kernel: int, image: ImageSpec, channels: int) -> None:
        super().__init__()
        self.down = (channels, image.channels, kernel, kernel)
        shape = (channels, image.height - kernel + 1, image.width - kernel + 1)
        self.mean = nn.Parameter(0.1 * torch.randn(shape))
        self.deviation = nn.Parameter(1 + 0.1 * torch.randn(shape))

    def forward(self, images: Tensor, generator: torch.Generator) -> Tensor:
        scale = 1 / math.sqrt(math.prod(self.down[1:])), 1 / math.sqrt(self.down[0] * math.prod(self.down[2:]))
        down, up = (one * normal(generator, *self.down, device=images.device).to(images.dtype) for one in scale)
        maps = F.instance_norm(F.conv2d(images, down)) * self.deviation + self.mean
        return torch.tanh(F.conv_transpose2d(maps, up))


def kernel_sizes(side: int) -> tuple[int, ...]:
    """Return the kernel sizes of the branches: 5, 9, 13 and 17, or less where images are smaller than 32 pixels.

    Args:
        side: The shorter side of the images in pixels, at least 8.

    Returns:
        Odd numbers from 3 on, below ``side``.

    Example:
        >>> kernel_sizes(224), kernel_sizes(28), kernel_sizes(8)
        ((5, 9, 13, 17), (5, 7, 11, 15), (3, 3, 3, 5))
    """
    scale = min(1.0, side / _FULL_SIDE)
    return tuple(max(3, 2 * round((size * scale - 1) / 2) + 1) for size in _KERNELS)


def drop_direction_gradients(module: nn.Module, direction: int, directions: int) -> None:
    """Drop what the first channels of every parameter have learned from the last backward pass, in place.

    So every direction is learned by other channels (MAP, CVPR 2024, after NTL, ICLR 2022). The gradient becomes zero
    rather than None, and no parameter is frozen: both would break distributed training. An optimizer with momentum or
    weight decay still moves what has a gradient of zero.

    Args:
        module: Its parameters have their channels in the first dimension, as shifts and convolutions do; scalars and
            parameters without a gradient are left alone.
        direction: 0 (nothing is dropped) to ``directions - 1``.
        directions: Of ``count`` channels the first ``count * direction // directions`` are dropped.

    Raises:
        InputError: The direction is out of range.

    Example:
        >>> layer = nn.Conv2d(1, 4, 1, bias=False)
        >>> layer(torch.ones(1, 1, 1, 1)).sum().backward()
        >>> drop_direction_gradients(layer, 1, 4)
        >>> layer.weight.grad.flatten().tolist()
        [0.0, 1.0, 1.0, 1.0]
    """
    if not 0 <= direction < directions:
        raise InputError(f"direction is {direction} of {directions}; a number from 0 to {directions - 1} is needed")
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.ndim:
            parameter.grad[: len(parameter) * direction // directions] = 0
