"""Batches of labelled images of both domains, and the size of each domain's part."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from modelfence.data.domain import labels_of
from modelfence.errors import InputError
from modelfence.methods.config import LearnConfig
from modelfence.methods.loop import Session

_FEWEST = 2  # images of a domain a step


class Step(NamedTuple):
    """What one step learns from.

    Attributes:
        groups: Images (N, C, H, W) of the authorized domain, then of each unauthorized one.
        labels: Their classes (N,).
        number: Of the step, from 0.
    """

    groups: list[Tensor]
    labels: list[Tensor]
    number: int


def labelled_steps(config: LearnConfig, session: Session, sizes: list[int], start: int) -> Iterator[Step]:
    """Hand out half a batch of authorized images and a share of the other half from each unauthorized domain.

    Args:
        config: Its seed.
        session: Domains with labels, and the processes that share a batch.
        sizes: Images a step, of the authorized domain and of each unauthorized one.
        start: The step to begin with.

    Raises:
        InputError: A domain has no labels, or too few images.
    """
    fabric = session.fabric
    domains = [session.authorized, *session.unauthorized.values()]
    streams = [
        domain.batches(
            size,
            seed=config.seed + index,
            start=start,
            rank=fabric.global_rank,
            world=fabric.world_size,
            device=fabric.device,
        )
        for index, (size, domain) in enumerate(zip(sizes, domains, strict=True))
        if domain is not None
    ]
    names = [domain.name for domain in domains if domain is not None]
    number = start
    while True:
        batches = [next(stream) for stream in streams]
        labels = [labels_of(batch, name) for batch, name in zip(batches, names, strict=True)]
        yield Step([batch.images for batch in batches], labels, number)
        number += 1


def shares(half: int, targets: int, *, remedy: str = "raise batch_size, or use masks='one_each'") -> list[int]:
    """Return how many of the unauthorized half of a batch each unauthorized domain gets.

    Args:
        half: Images of the unauthorized half.
        targets: Number of unauthorized domains, at least 1.
        remedy: What the error tells to do.

    Raises:
        InputError: There are too few: one image alone has no batch statistics.

    Example:
        >>> shares(8, 3)
        [3, 3, 2]
    """
    found = [half // targets + (index < half % targets) for index in range(targets)]
    if min(found) < _FEWEST:
        raise InputError(
            f"batch_size {2 * half} leaves {min(found)} image(s) a step for each of {targets} unauthorized domains; "
            f"at least {_FEWEST} are needed: {remedy}"
        )
    return found


def image_shape(session: Session) -> tuple[int, ...]:
    """Return the shape (C, H, W) of the images that a session's authorized domain hands out."""
    assert session.authorized is not None  # noqa: S101 (for the type checker: methods that ask need it)
    return tuple(next(iter(session.authorized.once(2))).images.shape[1:])
