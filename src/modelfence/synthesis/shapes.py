"""Dead leaves: coloured shapes that hide each other, a content prior with edges and occlusion."""

import math

import torch
from torch import Tensor

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.draws import uniform

_LEAVES = 12  # of an image
_SMALLEST, _LARGEST = 0.06, 0.45  # radius as a share of the side


def draw_shapes(count: int, image: ImageSpec, generator: torch.Generator) -> Tensor:
    """Draw ellipses, rectangles and triangles of one colour each, the later over the earlier.

    Radii follow the power law of the dead leaves model, so that structure is found at all scales.

    Args:
        count: How many images; memory grows with it.
        image: Their channels and size.
        generator: The source of randomness.

    Returns:
        (count, C, H, W), float32 on the scale 0..1, on the generator's device.

    Example:
        >>> spec = ImageSpec(channels=3, height=16, width=24, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> draw_shapes(2, spec, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 16, 24])
    """
    device = generator.device
    rows = torch.linspace(-0.5, 0.5, image.height, device=device).view(1, 1, -1, 1)
    columns = torch.linspace(-0.5, 0.5, image.width, device=device)
    each = (count, _LEAVES, 1, 1)
    down, right = (
        rows - uniform(generator, *each, low=-0.5, high=0.5),
        columns - uniform(generator, *each, low=-0.5, high=0.5),
    )
    # a density of r^-3 has the distribution function a - b r^-2
    share = uniform(generator, *each)
    radius = torch.lerp(torch.full_like(share, _LARGEST**-2), torch.full_like(share, _SMALLEST**-2), share).rsqrt()
    angle = uniform(generator, *each, high=2 * math.pi)
    longer = uniform(generator, *each, low=1, high=2)
    u = (angle.cos() * right + angle.sin() * down) / radius
    v = (angle.cos() * down - angle.sin() * right) / radius * longer
    kind = torch.randint(3, each, generator=generator, device=device)
    rectangle = torch.maximum(u.abs(), v.abs())
    triangle = torch.maximum(-v, v / 2 + u.abs() * math.sqrt(0.75)) * 2
    distance = torch.where(kind == 0, (u.square() + v.square()).sqrt(), torch.where(kind == 1, rectangle, triangle))
    inside = ((1 - distance) * radius * min(image.height, image.width) + 0.5).clamp(0, 1)
    colours = uniform(generator, count, _LEAVES + 1, image.channels, 1, 1)
    images = colours[:, 0].expand(count, *image.shape)
    for leaf in range(_LEAVES):
        images = torch.lerp(images, colours[:, leaf + 1], inside[:, leaf, None])
    return images
