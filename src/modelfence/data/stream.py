"""Domains that can only be passed through: data loaders and other things that give batches."""

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from modelfence.data.domain import Batch, check_batching, check_labels, to_device, too_small
from modelfence.data.image_spec import ImageSpec
from modelfence.data.splits import mixed_seed
from modelfence.errors import InputError

IMAGE_KEYS = ("images", "image", "pixel_values", "img", "x", "inputs")
LABEL_KEYS = ("labels", "label", "y", "targets", "target")
_END = object()  # stands for the end of a pass


class StreamDomain:
    """A domain made of anything that gives batches and can be iterated again and again.

    Each pass starts from random state that depends on the seed and the pass alone: the global generators of
    torch, numpy and Python, a loader's own generator, and ``set_epoch`` where there is one. Shuffling and
    augmentation are therefore new in each pass, and a run that stopped resumes by passing over what it has
    seen. The two parts that :meth:`split` makes are the exception: they see one order and one augmentation in every
    pass, which keeps them apart.

    Args:
        source: Gives batches: tensors, (images, labels) pairs, or mappings with ``images`` and ``labels``.
            Images (N, C, H, W): uint8 pixels, which are normalized by ``spec``, or floating point, which are
            taken to be in the model's range.
        name: What tables and errors call it.
        classes: Class names in label order, or None.
        spec: What the model eats; needed for uint8 images.
        count: Number of classes, checked against each batch's labels; by default that of ``classes``.
        size: Take at most so many images in each pass.
        labelled: Take the labels; else they aren't looked at.

    Raises:
        InputError: The source can't be iterated twice, is a loader with persistent workers (whose iterators are one
            and the same), or gives no batch of images.

    Example:
        >>> batches = [(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1]))] * 2
        >>> domain = StreamDomain(batches, "zeros")
        >>> [len(batch.images) for batch in domain.once(4)]
        [4, 2]
    """

    def __init__(
        self,
        source: Iterable[object],
        name: str,
        *,
        classes: tuple[str, ...] | None = None,
        spec: ImageSpec | None = None,
        count: int | None = None,
        size: int | None = None,
        labelled: bool = True,
    ) -> None:
        if isinstance(source, Iterator):
            raise InputError(
                f"domain {name!r} is an iterator, which is used up after one pass; "
                "give something that can be iterated again, such as a DataLoader or a list of batches"
            )
        if isinstance(source, DataLoader) and source.persistent_workers:
            raise InputError(
                f"domain {name!r}: a loader with persistent_workers hands out one and the same pass to all who iterate "
                "it; give one with persistent_workers=False"
            )
        self.name = name
        self.classes = classes
        self.spec = spec
        self._source = source
        self._count = count if count is not None or classes is None else len(classes)
        self._most = size
        self._share: tuple[int, int, bool] | None = None  # every k-th image from an offset; held out or not
        self._fixed_seed: int | None = None
        self._change: Callable[[Tensor], Tensor] | None = None
        self._takes_labels = labelled
        known = _images_per_pass(source)
        self.size: int | None = known if size is None or known is None else min(known, size)
        first = next(self._pass(0), None)
        if first is None:
            raise InputError(f"domain {name!r} has no images; check the split and the filters")
        to_device(first.images[:1], None, spec, torch.device("cpu"), name)
        self._labelled = first.labels is not None

    def expect_classes(self, count: int) -> None:
        """Check the labels of every batch against a number of classes, where none was given before."""
        if self._count is None:
            self._count = count

    def __repr__(self) -> str:
        return f"StreamDomain({self.name!r}, {'?' if self.size is None else self.size} images)"

    @property
    def labelled(self) -> bool:
        """Whether batches carry labels."""
        return self._labelled

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
        check_batching(batch_size, start=start, rank=rank, world=world)
        joint = batch_size * world
        if self.size is not None and self.size < joint:
            raise too_small(self.name, self.size, joint)
        if world > 1 and isinstance(getattr(self._source, "sampler", None), DistributedSampler):
            raise InputError(
                f"domain {self.name!r}: the loader already shares its images between processes; "
                "give one without DistributedSampler"
            )
        mine = (
            Batch(part.images[rank::world], None if part.labels is None else part.labels[rank::world])
            for part in self._endless(joint, seed, start)
        )
        return (to_device(*part, self.spec, torch.device(device), self.name) for part in mine)

    def _endless(self, joint: int, seed: int, start: int) -> Iterator[Batch]:
        """Hand out joint batch ``start`` and all that follow, on the CPU and before normalization."""
        steps = None if self.size is None else self.size // joint
        first_epoch, skip = (0, start) if steps is None else divmod(start, steps)
        for epoch in itertools.count(first_epoch):
            done = 0
            for part in _rechunk(self._pass(mixed_seed(seed, epoch)), joint):
                if len(part.images) < joint:
                    break
                done += 1
                if done > skip:
                    yield part
            if done == 0:
                raise InputError(
                    f"domain {self.name!r} gave fewer images in a pass than one batch of {joint}; use a "
                    "smaller batch_size, or give something that can be iterated again"
                )
            skip = max(skip - done, 0)

    def once(self, batch_size: int, *, limit: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Hand out one pass in the source's order: see :meth:`modelfence.data.domain.Domain.once`.

        With a ``limit`` below the size, the images are spread evenly over the pass, because sources are often sorted
        by class; where the size isn't known, they are the first ones.
        """
        check_batching(batch_size, limit=limit)
        known = self.size is not None and limit is not None and limit < self.size
        images = _spread(self._pass(0), limit, self.size) if known else _first(self._pass(0), limit)
        parts = _rechunk(images, batch_size)
        return (to_device(*part, self.spec, torch.device(device), self.name) for part in parts)

    def mapped(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> "StreamDomain":
        """Return the domain of the same images, each changed as it is read; both share the source.

        Args:
            function: From images (B, C, H, W), as the source gives them, to as many changed ones of the same shape.
            name: Name of the new domain; by default the same.

        Returns:
            A domain with the same labels, in the same order.

        Example:
            >>> domain = StreamDomain([torch.zeros(4, 1, 1, 1)], "zeros").mapped(lambda images: images + 1, "ones")
            >>> next(domain.once(4)).images.sum().item()
            4.0
        """
        changed, before = copy.copy(self), self._change
        changed.name = name or self.name
        changed._change = function if before is None else lambda images: function(before(images))
        return changed

    def without_labels(self) -> "StreamDomain":
        """Return the domain of the same images, whose labels aren't looked at; both share the source."""
        changed = copy.copy(self)
        changed.classes, changed._count = None, None
        changed._takes_labels = changed._labelled = False
        return changed

    def first(self, size: int) -> "StreamDomain":
        """Return the domain of at most so many images, the first of each pass; both share the source.

        Args:
            size: At least 1.

        Raises:
            InputError: This domain is itself a part.
        """
        if self._share is not None:
            raise InputError(f"domain {self.name!r} is a part of a stream; take its first images before it is split")
        changed = copy.copy(self)
        changed._most = size if self._most is None else min(size, self._most)
        changed.size = None if self.size is None else min(size, self.size)
        return changed

    def split(self, fraction: float, seed: int = 0) -> tuple["StreamDomain", "StreamDomain"]:
        """Hold out every k-th image, k being the nearest whole number to ``1 / fraction``.

        Each of the two parts passes over the whole source and keeps its own images. So that no image is in
        both, all passes of both parts use one order, the one that belongs to ``seed``.

        Args:
            fraction: Share to hold out, above 0 and at most a half.
            seed: Chooses the order, and which of each k images is held out.

        Returns:
            The rest and the held-out part.

        Raises:
            InputError: The fraction is out of range, this domain is itself a part, or a part would be empty.
        """
        if not 0 < fraction <= 0.5:
            raise InputError(
                f"domain {self.name!r}: held-out fraction is {fraction}; a stream needs one above 0 and at most 0.5"
            )
        if self._share is not None:
            raise InputError(f"domain {self.name!r} is a part of a stream and can't be split again")
        step = round(1 / fraction)
        rest, held_out = self._part(step, seed, held_out=False), self._part(step, seed, held_out=True)
        for part in (rest, held_out) if self.size is None or self.size < 2 else ():
            if next(part._pass(0), None) is None:
                raise InputError(
                    f"domain {self.name!r} has too few images for one in {step} to be held out; give more, or hold out "
                    "a larger share, or none"
                )
        return rest, held_out

    def _part(self, step: int, seed: int, *, held_out: bool) -> "StreamDomain":
        part = copy.copy(self)
        part._share = (step, mixed_seed(seed) % min(step, self.size or step), held_out)
        part._fixed_seed = mixed_seed(seed, 0)
        if self.size is not None:
            ours = len(range(part._share[1], self.size, step))
            part.size = ours if held_out else self.size - ours
        return part

    def _pass(self, seed: int) -> Iterator[Batch]:
        """Go through the source once, batch by batch as it gives them, checked and with our images only."""
        seed = seed if self._fixed_seed is None else self._fixed_seed
        _reseed(self._source, seed)
        seen = 0
        for part in _first(self._batches(seed), self._most):
            kept = self._ours(part, seen)
            seen += len(part.images)
            if len(kept.images):
                yield kept

    def _batches(self, seed: int) -> Iterator[Batch]:
        """Read what the source gives; whatever its own code raises names the domain and the place."""
        read = 0
        items = _seeded(self._source, seed)
        while True:
            try:
                item = next(items, _END)
            except InputError:
                raise
            except Exception as error:
                raise unreadable(f"domain {self.name!r}: after image {read} of a pass", error) from error
            if item is _END:
                return
            part = self._read(item)
            read += len(part.images)
            yield part

    def _ours(self, part: Batch, seen: int) -> Batch:
        if self._share is None:
            return part
        step, offset, held_out = self._share
        numbers = torch.arange(seen, seen + len(part.images))
        keep = (numbers % step == offset) == held_out
        return Batch(part.images[keep], None if part.labels is None else part.labels[keep])

    def _read(self, item: object) -> Batch:
        images, given = _images_and_labels(item, self.name)
        labels = torch.as_tensor(given) if self._takes_labels and given is not None else None
        if labels is not None:
            if len(labels) != len(images):
                raise InputError(f"domain {self.name!r}: {len(labels)} labels for {len(images)} images")
            check_labels(labels, self.name, count=self._count)
        return Batch(images if self._change is None else self._change(images), labels)


def unreadable(where: str, error: Exception) -> InputError:
    """Return the error for a user's data set that raises where an image is wanted.

    Args:
        where: Domain and image.
        error: What it raised; one of a loader's worker process ends with the line that says what was wrong.
    """
    if isinstance(error, InputError):
        return error
    lines = str(error).strip().splitlines()
    reason = lines[-1] if lines and "Traceback" in str(error) else f"{type(error).__name__}: {' '.join(lines)}"
    return InputError(f"{where} can't be read ({reason[:300]}); repair the data set or leave the image out")


def _images_and_labels(item: object, name: str) -> tuple[Tensor, object]:
    """Return what a batch of a loader holds."""
    images: object = item
    labels: object = None
    if isinstance(item, Mapping):
        images = next((item[key] for key in IMAGE_KEYS if key in item), None)
        labels = next((item[key] for key in LABEL_KEYS if key in item), None)
    elif isinstance(item, Sequence) and item:
        images = item[0]
        labels = item[1] if len(item) > 1 else None
    if not isinstance(images, Tensor) or images.ndim != 4:
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(
            f"domain {name!r} gave {found} for a batch; image tensors (N, C, H, W) are needed, alone, first in "
            f"a pair with labels, or under one of the keys {', '.join(IMAGE_KEYS)}"
        )
    return images, labels


def _seeded(source: Iterable[object], seed: int) -> Iterator[object]:
    """Iterate with random state of our own, and leave everyone else's as it was."""
    state = (
        torch.Generator().manual_seed(seed).get_state(),
        np.random.RandomState(seed % 2**32).get_state(),
        random.Random(seed).getstate(),  # noqa: S311 (no secret)
    )
    iterator: Iterator[object] | None = None
    while True:
        outside = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        _set_state(state)
        try:
            iterator = iter(source) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state = (torch.get_rng_state(), np.random.get_state(), random.getstate())
            _set_state(outside)
        yield item


def _set_state(state: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def _reseed(source: object, seed: int) -> None:
    """Seed the generators that a loader and its parts keep for themselves."""
    for part in (source, *(getattr(source, key, None) for key in ("dataset", "sampler", "batch_sampler"))):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(seed % 2**31)  # type: ignore[union-attr]  # looked for above


def _images_per_pass(source: object) -> int | None:
    """Return how many images a pass of a map-style loader gives, or None."""
    if not isinstance(source, DataLoader) or source.batch_size is None:
        return None
    try:
        images = len(source.sampler)  # type: ignore[arg-type]  # a sampler may lack a length: caught
    except TypeError:
        return None
    return images // source.batch_size * source.batch_size if source.drop_last else images


def _first(parts: Iterable[Batch], limit: int | None) -> Iterator[Batch]:
    """Cut a pass after so many images."""
    left = limit
    for images, labels in parts:
        if left is None or len(images) < left:
            yield Batch(images, labels)
            left = None if left is None else left - len(images)
        else:
            yield Batch(images[:left], None if labels is None else labels[:left])
            return


def _spread(parts: Iterable[Batch], limit: int | None, size: int | None) -> Iterator[Batch]:
    """Keep ``limit`` of ``size`` images at even distances."""
    wanted = torch.zeros(size or 0, dtype=torch.bool)
    wanted[torch.arange(limit or 0) * (size or 0) // (limit or 1)] = True
    start = 0
    for images, labels in parts:
        mine = wanted[start : start + len(images)].nonzero().flatten()
        start += len(images)
        if len(mine):
            yield Batch(images[mine], None if labels is None else labels[mine])


def _rechunk(parts: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Regroup batches of any sizes into batches of one size; the last one may be smaller."""
    held: list[Batch] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part.images)
        while count >= size:
            whole = _joined(held)
            yield _cut(whole, 0, size)
            count -= size
            held = [_cut(whole, size, size + count)] if count else []
    if count:
        yield _joined(held)


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts if part.labels is not None]
    if 0 < len(labels) < len(parts):
        raise InputError("some batches of a stream have labels, others don't; label all images or none")
    return Batch(torch.cat([part.images for part in parts]), torch.cat(labels) if labels else None)


def _cut(part: Batch, first: int, last: int) -> Batch:
    return Batch(part.images[first:last], None if part.labels is None else part.labels[first:last])
