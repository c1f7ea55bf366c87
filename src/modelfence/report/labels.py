"""Labels of figures: short enough, and never one on top of another."""

import re
from collections.abc import Sequence

from modelfence.evaluation.text import shorten


def shorten_path(name: str, most: int = 28) -> str:
    """Shorten the words of a dotted name and leave its numbers, which tell layers apart.

    Args:
        name: A parameter's or module's name.
        most: Characters kept at most, at least 9.

    Returns:
        The name with every word cut to the same length where needed.

    Example:
        >>> shorten_path("stages.3.blocks.11.attention.projection")
        'stage.3.block.11.atten.proje'
    """
    for letters in range(len(name), 2, -1):
        shorter = re.sub(rf"([^\W\d]{{{letters}}})[^\W\d]+", r"\1", name)
        if len(shorter) <= most:
            return shorter
    return shorten(name, most)


def beside(place: float, *, avoid: float, width: float) -> float:
    """Move a label that would stand on a vertical line to the right of it.

    Args:
        place: Left end of the label.
        avoid: Where the line is.
        width: Width of the label, in the same unit.

    Returns:
        The left end to use.

    Example:
        >>> beside(7.0, avoid=10.0, width=6.0), beside(2.0, avoid=10.0, width=6.0)
        (10.8, 2.0)
    """
    return avoid + 0.8 if place < avoid + 0.8 and place + width > avoid else place


def spread(values: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move labels apart so that none covers another, by the least sum of squares.

    Args:
        values: Where the labels would stand.
        gap: Least distance between two labels; less where they don't fit otherwise.
        low: Lowest place.
        high: Highest place.

    Returns:
        A place for each value, in the same order from low to high.

    Example:
        >>> spread([10.0, 12.0, 50.0], gap=4.0, low=0.0, high=100.0)
        [9.0, 13.0, 50.0]
    """
    if len(values) > 1:
        gap = min(gap, (high - low) / (len(values) - 1))
    order = sorted(range(len(values)), key=values.__getitem__)
    # With the gaps taken out, "apart" reads "not decreasing": pool adjacent violators into their mean.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, size = values[index] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    level = [mean for mean, size in pools for _ in range(size)]
    top = high - gap * max(0, len(values) - 1)
    places = [0.0] * len(values)
    for rank, index in enumerate(order):
        places[index] = min(max(level[rank], low), top) + rank * gap
    return places
