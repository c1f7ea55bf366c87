"""Batches of labelled images of both domains, and the size of each domain's part."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelfence.data.domain import Domain, IndexedDomain, labels_of, too_small
from modelfence.errors import InputError
from modelfence.methods.config import LearnConfig, MaskConfig
from modelfence.methods.loop import Session

_FEWEST = 2  # images of a domain a step
_LOOKED_AT = 8


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


def look_at_labelled(model: nn.Module, config: LearnConfig, session: Session) -> None:
    """Refuse domains of which a batch couldn't be filled, before anything is learned; warn of the source as a target.

    Args:
        model: Not looked at.
        config: Its ``batch_size``, and whether there is one mask for each domain.
        session: All domains, and the processes that share a batch.

    Raises:
        InputError: The batch is too small for so many domains, or a domain for its share of a batch.
    """
    del model
    alone = isinstance(config, MaskConfig) and config.masks == "one_each"
    half, *others = sizes_of(config, 1 if alone else len(session.unauthorized))
    sizes = [half, *(others * len(session.unauthorized) if alone else others)]
    for domain, size in zip([session.authorized, *session.unauthorized.values()], sizes, strict=True):
        require_enough(domain, size, session)
    for name, domain in session.unauthorized.items():
        if _is_like(domain, session.authorized):
            session.warn(
                f"unauthorized domain {name!r} has images of the authorized one ({_LOOKED_AT} were compared): what are "
                "the same images can't be separated, and keeping them wins; give another domain"
            )


def _is_like(domain: Domain, source: Domain | None) -> bool:
    """Whether two domains of one size have the same images at some places, spread over them.

    A domain that can be gone through once isn't looked at.
    """
    if not (isinstance(domain, IndexedDomain) and isinstance(source, IndexedDomain) and domain.size == source.size):
        return False
    first, second = (next(iter(one.once(_LOOKED_AT, limit=_LOOKED_AT))).images for one in (domain, source))
    return first.shape == second.shape and torch.equal(first, second)


def require_enough(domain: Domain | None, size: int, session: Session, *, left: int | None = None) -> None:
    """Refuse a domain that can't fill its share of one batch of all processes.

    Args:
        domain: With any number of images; one that doesn't say how many it has is let pass.
        size: Its share of a process's batch.
        session: Whose processes share a batch.
        left: How many images are left to learn on, where that isn't all.

    Raises:
        InputError: It has too few.
    """
    if domain is None or domain.size is None:
        return
    count, joint = domain.size if left is None else left, size * session.fabric.world_size
    if count < joint:
        raise too_small(domain.name, count, joint)


def sizes_of(config: LearnConfig, targets: int) -> list[int]:
    """Return how many images a step takes of the authorized domain, and of each unauthorized one.

    Args:
        config: Its ``batch_size``.
        targets: Number of unauthorized domains, at least 1.

    Raises:
        InputError: The batch is too small for so many domains.

    Example:
        >>> sizes_of(LearnConfig(batch_size=16), 3)
        [8, 3, 3, 2]
    """
    half = config.batch_size // 2
    if isinstance(config, MaskConfig):
        return [half, *shares(half, targets)]
    return [half, *shares(half, targets, remedy="raise batch_size, or leave domains out")]


def labelled_steps(config: LearnConfig, session: Session, start: int) -> Iterator[Step]:
    """Hand out half a batch of authorized images and a share of the other half from each unauthorized domain.

    Args:
        config: Its seed and ``batch_size``.
        session: Domains with labels, and the processes that share a batch.
        start: The step to begin with.

    Raises:
        InputError: The batch is too small for so many domains, or a domain has no labels, or too few images.
    """
    fabric = session.fabric
    domains = [session.authorized, *session.unauthorized.values()]
    sizes = sizes_of(config, len(session.unauthorized))
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
