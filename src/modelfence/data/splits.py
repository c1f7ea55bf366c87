"""Seeded choices of images: the same seed gives the same images on every machine."""

import hashlib

import torch
from torch import Tensor

from modelfence.errors import InputError

MOST_SEED = 2**53
"""The largest seed that a configuration takes; what is added to one, and multiplied, stays a number torch takes."""


def mixed_seed(*parts: int) -> int:
    """Return one seed that depends on several numbers, such as a run's seed and an epoch.

    Args:
        parts: Whole numbers of any size.

    Returns:
        A number from 0 to 2**63 - 1; neighbouring parts give unrelated seeds.

    Example:
        >>> mixed_seed(0, 1) == mixed_seed(0, 1), mixed_seed(0, 1) == mixed_seed(1, 0)
        (True, False)
    """
    digest = hashlib.sha256(":".join(str(int(part)) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def permutation(n: int, *parts: int) -> Tensor:
    """Return the numbers 0..n-1 in an order that depends on the seed parts alone.

    Args:
        n: How many numbers.
        parts: The seed, or several that are mixed.

    Returns:
        int64 (n,).

    Example:
        >>> sorted(permutation(4, 0).tolist())
        [0, 1, 2, 3]
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed(mixed_seed(*parts)))


def protocol(n: int, train: int = 5000, validation: int = 1000, seed: int = 2022) -> tuple[Tensor, Tensor]:
    """Return disjoint random training and validation images, as NTL and CUTI draw them.

    Both parts come from the data set's training images: a random permutation whose first ``validation``
    entries validate and whose next ``train`` entries train.

    Args:
        n: Images in the data set.
        train: Training images.
        validation: Validation images.
        seed: Seed of the permutation.

    Returns:
        Indices int64 (train,) and int64 (validation,).

    Raises:
        InputError: The data set has too few images.

    Example:
        >>> train, validation = protocol(6000)
        >>> len(train), len(validation), len(set(train.tolist()) & set(validation.tolist()))
        (5000, 1000, 0)
    """
    if train < 1 or validation < 0:
        raise InputError(f"split of {train} training and {validation} validation images; use 1 and 0 or more")
    if train + validation > n:
        raise InputError(
            f"split of {train} training and {validation} validation images needs {train + validation}, "
            f"but there are {n}; ask for fewer"
        )
    order = permutation(n, seed)
    return order[validation : validation + train], order[:validation]


def holdout(n: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split a whole set into the rest and a random held-out part, both in ascending order.

    Args:
        n: Images in the set.
        fraction: Share to hold out, above 0 and below 1; rounded to whole images, at least one on each side.
        seed: Seed of the choice.

    Returns:
        Indices of the rest and of the held-out images, int64; together every image once.

    Raises:
        InputError: The fraction isn't between 0 and 1, or there are fewer than two images.

    Example:
        >>> rest, held_out = holdout(10, 0.2, seed=0)
        >>> len(rest), len(held_out)
        (8, 2)
    """
    if not 0 < fraction < 1:
        raise InputError(f"held-out fraction is {fraction}; a number between 0 and 1 is needed")
    if n < 2:
        raise InputError(f"a set of {n} images can't be split in two")
    count = min(max(round(n * fraction), 1), n - 1)
    order = permutation(n, seed)
    return order[count:].sort().values, order[:count].sort().values


def sample(n: int, size: int, seed: int = 0) -> Tensor:
    """Choose random images without repetition, in ascending order; all of them when there are fewer.

    Args:
        n: Images to choose from.
        size: How many to choose.
        seed: Seed of the choice.

    Returns:
        Indices int64 (min(size, n),).

    Raises:
        InputError: ``size`` isn't positive.

    Example:
        >>> sample(3, 10).tolist()
        [0, 1, 2]
    """
    if size < 1:
        raise InputError(f"size is {size}; at least one image is needed")
    return torch.arange(n) if size >= n else permutation(n, seed)[:size].sort().values
