"""Domains: named sets of images that hand out batches a run can repeat and resume."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from modelfence.data.image_spec import ImageSpec
from modelfence.data.splits import holdout, permutation
from modelfence.errors import InputError


class Batch(NamedTuple):
    """Images and, where they are known, their labels.

    Attributes:
        images: float32 (B, C, H, W), normalized, on the device asked for.
        labels: int64 (B,) on the same device, or None.
    """

    images: Tensor
    labels: Tensor | None


@runtime_checkable
class Domain(Protocol):
    """A named set of images.

    Attributes:
        name: What tables and errors call it.
        classes: Class names in label order, or None when they aren't known.
        size: Number of images, or None when it isn't known.
    """

    name: str
    classes: tuple[str, ...] | None
    size: int | None

    @property
    def labelled(self) -> bool:
        """Whether batches carry labels."""
        ...

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
        """Hand out batches without end, in a new random order each epoch.

        Batch t depends on the seed and t alone, so a run that stopped goes on with ``start=t``. The
        incomplete batch at the end of an epoch is dropped.

        Args:
            batch_size: Images per process and batch.
            seed: Seed of the order.
            start: Number of the first batch handed out.
            rank: This process among ``world``: it gets the images ``rank::world`` of the joint batch.
            world: Processes that share each joint batch of ``batch_size * world`` images.
            device: Where the batches shall be.

        Returns:
            An endless iterator.

        Raises:
            InputError: A number is out of range, or the domain is smaller than one joint batch.
        """
        ...

    def once(self, batch_size: int, *, limit: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Hand out each image once, in order; the last batch may be smaller.

        Args:
            batch_size: Images per batch.
            limit: Hand out so many images, spread evenly; the first ones of a stream of unknown length.
            device: Where the batches shall be.

        Returns:
            An iterator over one pass.

        Raises:
            InputError: A number is out of range.
        """
        ...


class IndexedDomain:
    """A domain whose images can be fetched by number: in memory, or decoded from disk on demand.

    Args:
        name: What tables and errors call it.
        fetch: Takes indices int64 (B,) on the CPU and returns images (B, C, H, W): uint8 pixels, which are
            normalized by ``spec`` on the device, or float32 that the model eats as they are.
        size: Number of images.
        classes: Class names in label order, or None.
        spec: What the model eats; needed for uint8 images.
        labels: int64 (size,), or None for a domain without labels.
        ahead: Batches fetched in the background while earlier ones are used; more than 0 only where ``fetch`` may
            run in another thread.

    Raises:
        InputError: There are no images, or the labels don't fit (see :func:`check_labels`).

    Example:
        >>> pixels = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
        >>> spec = ImageSpec(channels=1, height=1, width=1, mean=(0.0,), std=(1 / 255,))
        >>> labels = torch.tensor([0, 1, 0, 1])
        >>> domain = IndexedDomain("ramp", pixels.__getitem__, 4, spec=spec, labels=labels)
        >>> [batch.labels.tolist() for batch in domain.once(3)]
        [[0, 1, 0], [1]]
        >>> rest, held_out = domain.split(0.25, seed=0)
        >>> rest.size, held_out.size
        (3, 1)
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[Tensor], Tensor],
        size: int,
        *,
        classes: tuple[str, ...] | None = None,
        spec: ImageSpec | None = None,
        labels: Tensor | None = None,
        ahead: int = 0,
    ) -> None:
        if size < 1:
            raise InputError(f"domain {name!r} has no images; check the path, the split and the filters")
        if labels is not None:
            check_labels(labels, name, count=len(classes) if classes else None, size=size)
            labels = labels.to("cpu", torch.int64)
        self.name = name
        self.size: int | None = size
        self.classes = classes
        self.spec = spec
        self.labels = labels
        self._length = size
        self._fetch = fetch
        self._ahead = ahead

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"IndexedDomain({self.name!r}, {self._length} images)"

    @property
    def labelled(self) -> bool:
        """Whether batches carry labels."""
        return self.labels is not None

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
        """Hand out batches without end: see :meth:`Domain.batches`."""
        check_batching(batch_size, start=start, rank=rank, world=world)
        joint = batch_size * world
        if joint > self._length:
            raise too_small(self.name, self._length, joint)
        mine = (part[rank::world] for part in self._joint_indices(joint, seed, start))
        return self._hand_out(mine, torch.device(device))

    def _joint_indices(self, joint: int, seed: int, start: int) -> Iterator[Tensor]:
        """Hand out the indices of joint batch ``start`` and all that follow."""
        steps = self._length // joint
        first_epoch, first = divmod(start, steps)
        for epoch in itertools.count(first_epoch):
            order = permutation(self._length, seed, epoch)
            for step in range(first, steps):
                yield order[step * joint : (step + 1) * joint]
            first = 0

    def once(self, batch_size: int, *, limit: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Hand out each image once, in order: see :meth:`Domain.once`.

        With a ``limit`` below the size, the images are spread evenly over the domain, because files are often
        sorted by class.
        """
        check_batching(batch_size, limit=limit)
        count = self._length if limit is None else min(limit, self._length)
        indices = torch.arange(count) * self._length // count
        parts = (indices[first : first + batch_size] for first in range(0, count, batch_size))
        return self._hand_out(parts, torch.device(device))

    def _hand_out(self, parts: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
        for indices, images in self._fetched(parts):
            labels = None if self.labels is None else self.labels[indices]
            yield to_device(images, labels, self.spec, device, self.name)

    def _fetched(self, parts: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Fetch images for one set of indices after the other, some sets ahead of what is asked for."""
        if self._ahead == 0:
            for indices in parts:
                yield indices, self._fetch(indices)
            return
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        pool = ThreadPoolExecutor(1, thread_name_prefix="modelfence-fetch")
        try:
            for indices in parts:
                waiting.append((indices, pool.submit(self._fetch, indices)))
                if len(waiting) > self._ahead:
                    first, images = waiting.popleft()
                    yield first, images.result()
            for first, images in waiting:
                yield first, images.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def subset(self, indices: Tensor, name: str | None = None) -> "IndexedDomain":
        """Return the domain of some of the images, without copying any.

        Args:
            indices: int64 (M,), each from 0 to size - 1.
            name: Name of the new domain; by default the same.

        Returns:
            A domain of M images in the order given.

        Raises:
            InputError: An index is out of range, or there is none.
        """
        indices = indices.to("cpu", torch.int64)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self._length:
            raise InputError(f"domain {self.name!r}: a subset needs indices from 0 to {self._length - 1}")
        fetch = self._fetch
        return IndexedDomain(
            name or self.name,
            lambda chosen: fetch(indices[chosen]),
            len(indices),
            classes=self.classes,
            spec=self.spec,
            labels=None if self.labels is None else self.labels[indices],
            ahead=self._ahead,
        )

    def mapped(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> "IndexedDomain":
        """Return the domain of the same images, each changed as it is fetched; nothing is copied.

        Args:
            function: From images (B, C, H, W), as ``fetch`` returns them, to as many changed ones of the same shape.
            name: Name of the new domain; by default the same.

        Returns:
            A domain with the same labels, in the same order.

        Example:
            >>> zeros = torch.zeros(4, 1, 1, 1)
            >>> domain = IndexedDomain("zeros", zeros.__getitem__, 4).mapped(lambda images: images + 1, "ones")
            >>> next(domain.once(4)).images.sum().item()
            4.0
        """
        fetch = self._fetch
        return IndexedDomain(
            name or self.name,
            lambda indices: function(fetch(indices)),
            self._length,
            classes=self.classes,
            spec=self.spec,
            labels=self.labels,
            ahead=self._ahead,
        )

    def without_labels(self) -> "IndexedDomain":
        """Return the domain of the same images, which doesn't know their labels."""
        return IndexedDomain(self.name, self._fetch, self._length, spec=self.spec, ahead=self._ahead)

    def split(self, fraction: float, seed: int) -> tuple["IndexedDomain", "IndexedDomain"]:
        """Hold out a random part of the images.

        Args:
            fraction: Share to hold out, above 0 and below 1.
            seed: Seed of the choice.

        Returns:
            The rest and the held-out part; no image is in both.

        Raises:
            InputError: The fraction is out of range or there are fewer than two images.
        """
        if self._length < 2:
            raise InputError(f"domain {self.name!r} has 1 image, which can't be divided; give more")
        rest, held_out = holdout(self._length, fraction, seed)
        return self.subset(rest), self.subset(held_out)


def to_device(images: Tensor, labels: Tensor | None, spec: ImageSpec | None, device: torch.device, name: str) -> Batch:
    """Move images to a device and make them what the model eats.

    Args:
        images: (B, C, H, W): uint8 pixels, normalized after the move, or floating point, taken as they are.
        labels: int64 (B,), or None.
        spec: What the model eats; may be None for floating-point images.
        device: Where the batch shall be.
        name: The domain, for errors.

    Returns:
        The batch.

    Raises:
        InputError: The shape doesn't fit the spec, or pixels come without a spec.
    """
    if spec is not None:
        spec.check(images, f"domain {name!r}")
    elif not images.is_floating_point():
        raise InputError(
            f"domain {name!r} has {str(images.dtype).removeprefix('torch.')} pixels; "
            "give image=ImageSpec(...) so that they can be normalized as the model was trained"
        )
    if device.type == "cuda" and images.device.type == "cpu":
        images = images.pin_memory()
        labels = None if labels is None else labels.pin_memory()
    images = images.to(device, non_blocking=True)
    labels = None if labels is None else labels.to(device, torch.int64, non_blocking=True)
    if images.is_floating_point() or spec is None:
        return Batch(images.to(torch.float32), labels)
    return Batch(spec.normalize(images), labels)


def check_labels(labels: Tensor, name: str, *, count: int | None = None, size: int | None = None) -> None:
    """Refuse labels that aren't whole numbers from 0 to ``count - 1``, one per image.

    Args:
        labels: (N,) of any type.
        name: The domain, for errors.
        count: Number of classes, or None when it isn't known.
        size: Number of images, or None when it isn't known.

    Raises:
        InputError: The wrong shape or type, or a label out of range; the text names domain, row and label.

    Example:
        >>> check_labels(torch.tensor([0, 1, 12]), "digits", count=10)
        Traceback (most recent call last):
        modelfence.errors.InputError: domain 'digits': label 12 of image 2 is outside 0..9; ...
    """
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(
            f"domain {name!r}: labels are {str(labels.dtype).removeprefix('torch.')} of shape "
            f"{tuple(labels.shape)}; one whole number per image is needed"
        )
    if size is not None and len(labels) != size:
        raise InputError(f"domain {name!r}: {len(labels)} labels for {size} images; one per image is needed")
    wrong = labels < 0 if count is None else (labels < 0) | (labels >= count)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        label = int(labels[row])
        problem = f"outside 0..{count - 1}; check the number of classes and the label map" if count else "negative"
        if label < 0:
            problem = "negative; remove images without a label"
        raise InputError(f"domain {name!r}: label {label} of image {row} is {problem}")


def check_batching(batch_size: int, *, start: int = 0, rank: int = 0, world: int = 1, limit: int | None = None) -> None:
    """Refuse numbers that no batch can be made of.

    Args:
        batch_size: At least 1.
        start: At least 0.
        rank: From 0 to ``world - 1``.
        world: At least 1.
        limit: None, or at least 1.

    Raises:
        InputError: A number is out of range.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; at least 1 is needed")
    if start < 0:
        raise InputError(f"start is {start}; at least 0 is needed")
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} of {world} processes; a rank from 0 to world - 1 is needed")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; at least 1 image is needed")


def too_small(name: str, size: int, joint: int) -> InputError:
    """Return the error for a domain that can't fill one batch.

    Args:
        name: The domain.
        size: Its number of images.
        joint: Images in one batch of all processes.

    Returns:
        The error, to be raised.
    """
    return InputError(
        f"domain {name!r} has {size} images, fewer than one batch of {joint}; use a smaller batch_size or more images"
    )


def labels_of(batch: Batch, name: str) -> Tensor:
    """Return a batch's labels, int64 (B,).

    Args:
        batch: A batch of the domain.
        name: The domain's name, for the error.

    Raises:
        InputError: The domain has no labels.
    """
    if batch.labels is None:
        raise InputError(f"domain {name!r} has no labels; this setting needs labelled images")
    return batch.labels
