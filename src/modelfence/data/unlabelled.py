"""Domains whose labels aren't to be looked at."""

from collections.abc import Iterator

import torch

from modelfence.data.domain import Batch, Domain, IndexedDomain
from modelfence.data.stream import StreamDomain


class _Unlabelled:
    """The images of a domain of any class."""

    labelled = False
    classes: tuple[str, ...] | None = None

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.name, self.size, self.spec = domain.name, domain.size, getattr(domain, "spec", None)

    def batches(
        self,
        batch_size: int,
        *,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> Iterator[Batch]:
        """Hand out batches without end: see :meth:`modelfence.data.domain.Domain.batches`."""
        found = self._domain.batches(batch_size, seed=seed, start=start, rank=rank, world=world, device=device)
        return (Batch(batch.images, None) for batch in found)

    def once(self, batch_size: int, *, limit: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Hand out one pass: see :meth:`modelfence.data.domain.Domain.once`."""
        return (Batch(batch.images, None) for batch in self._domain.once(batch_size, limit=limit, device=device))


def without_labels(domain: Domain) -> Domain:
    """Return the domain of the same images in the same order, which doesn't know their labels.

    Args:
        domain: Any domain; it isn't changed.

    Example:
        >>> domain = IndexedDomain("ramp", torch.zeros(2, 1, 1, 1).__getitem__, 2, labels=torch.tensor([0, 1]))
        >>> next(without_labels(domain).once(2)).labels is None
        True
    """
    if isinstance(domain, IndexedDomain | StreamDomain):
        return domain.without_labels()
    return _Unlabelled(domain)
