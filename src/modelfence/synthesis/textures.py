"""Textures: random fields with the spectrum of natural images, and gratings."""

import math

import torch
from torch import Tensor

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.draws import normal, uniform

_WAVES = 3  # of a grating
_GRATINGS = 0.4  # share of the images


def draw_textures(count: int, image: ImageSpec, generator: torch.Generator) -> Tensor:
    """Draw noise whose amplitude falls with a power of the frequency (0.5 to 2), and sums of a few waves.

    Args:
        count: How many images; memory grows with it.
        image: Their channels and size.
        generator: The source of randomness.

    Returns:
        (count, C, H, W), float32 on the scale 0..1, on the generator's device; every pattern runs between two random
        colours.

    Example:
        >>> spec = ImageSpec(channels=3, height=16, width=24, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> draw_textures(2, spec, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 16, 24])
    """
    fields, waves = _fields(count, image, generator), _waves(count, image, generator)
    pattern = torch.where(uniform(generator, count, 1, 1, 1) < _GRATINGS, waves, fields)
    low, high = pattern.amin(dim=(1, 2, 3), keepdim=True), pattern.amax(dim=(1, 2, 3), keepdim=True)
    share = (pattern - low) / (high - low).clamp_min(1e-6)
    one, other = (uniform(generator, count, image.channels, 1, 1) for _ in range(2))
    return torch.lerp(one, other, share)


def _fields(count: int, image: ImageSpec, generator: torch.Generator) -> Tensor:
    """Return noise (N, C, H, W) of a falling spectrum; the channels share half of it."""
    device = generator.device
    frequency = torch.hypot(
        torch.fft.fftfreq(image.height, device=device)[:, None],
        torch.fft.rfftfreq(image.width, device=device)[None, :],
    )
    frequency[0, 0] = 1  # the mean, which the stretch to 0..1 takes away
    power = uniform(generator, count, 1, 1, 1, low=0.5, high=2)
    real, imaginary = (
        normal(generator, count, image.channels, *frequency.shape) + normal(generator, count, 1, *frequency.shape)
        for _ in range(2)
    )
    spectrum = torch.complex(real, imaginary) * frequency**-power
    noise: Tensor = torch.fft.irfft2(spectrum, s=(image.height, image.width))
    return noise


def _waves(count: int, image: ImageSpec, generator: torch.Generator) -> Tensor:
    """Return sums of waves (N, 1, H, W) of 1 to 8 periods a side, some of them squared off."""
    device = generator.device
    each = (count, _WAVES, 1, 1)
    angle, phase = (uniform(generator, *each, high=2 * math.pi) for _ in range(2))
    periods = torch.exp2(uniform(generator, *each, high=3))
    rows = torch.linspace(0, 1, image.height, device=device).view(1, 1, -1, 1)
    columns = torch.linspace(0, 1, image.width, device=device)
    along = 2 * math.pi * periods * (angle.cos() * columns + angle.sin() * rows) + phase
    strength, steep = uniform(generator, *each), uniform(generator, count, 1, 1, 1, low=0.5, high=4)
    return torch.tanh(steep * (strength * along.sin()).sum(dim=1, keepdim=True))
