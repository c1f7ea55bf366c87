"""Random tensors that depend on a generator's state alone, wherever they are used afterwards."""

from collections.abc import Sequence

import torch
from torch import Tensor


def uniform(
    generator: torch.Generator,
    *shape: int,
    low: float = 0.0,
    high: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw float32 numbers from low to high; they are drawn where the generator is, then moved.

    Args:
        generator: The source of randomness.
        *shape: Of the result.
        low: Smallest value.
        high: Bound above.
        device: Where the result lies; the generator's by default.

    Example:
        >>> uniform(torch.Generator().manual_seed(0), 2, 3, low=4, high=5).long().unique().tolist()
        [4]
    """
    drawn = torch.rand(shape, generator=generator, device=generator.device)
    return (low + (high - low) * drawn).to(device or generator.device)


def normal(generator: torch.Generator, *shape: int, device: torch.device | str | None = None) -> Tensor:
    """Draw float32 numbers from N(0, 1); see :func:`uniform`.

    Args:
        generator: The source of randomness.
        *shape: Of the result.
        device: Where the result lies; the generator's by default.

    Example:
        >>> normal(torch.Generator().manual_seed(0), 2, 3).shape
        torch.Size([2, 3])
    """
    return torch.randn(shape, generator=generator, device=generator.device).to(device or generator.device)


def whole(generator: torch.Generator, low: int, high: int) -> int:
    """Draw one whole number from low to high, both included.

    Args:
        generator: The source of randomness.
        low: Smallest value.
        high: Largest value.

    Example:
        >>> whole(torch.Generator().manual_seed(0), 3, 3)
        3
    """
    return int(torch.randint(low, high + 1, (), generator=generator, device=generator.device))


def order(generator: torch.Generator, count: int) -> list[int]:
    """Draw an order of 0..count - 1.

    Args:
        generator: The source of randomness.
        count: How many.

    Example:
        >>> sorted(order(torch.Generator().manual_seed(0), 4))
        [0, 1, 2, 3]
    """
    drawn: Sequence[int] = torch.randperm(count, generator=generator, device=generator.device).tolist()
    return list(drawn)
