"""Domains from torch datasets, which give images one by one."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelfence.data.domain import Batch, Domain, IndexedDomain
from modelfence.data.images import fits, from_memory, on_demand, to_pixels
from modelfence.data.records import Request
from modelfence.data.splits import sample
from modelfence.data.stream import IMAGE_KEYS, LABEL_KEYS, StreamDomain, unreadable
from modelfence.errors import InputError

_CHUNK = 64


def from_dataset(dataset: Any, request: Request) -> Domain:
    """Make a domain of a map-style dataset, reading it once; the images are kept if they fit into memory.

    Args:
        dataset: Has a length; its items are images, (image, label) pairs, or mappings. Images are PIL images,
            uint8 arrays (H, W[, C]) or tensors (C, H, W), which are converted to the spec, or floating-point
            tensors (C, H, W), which are taken to be what the model eats.
        request: What is asked for.

    Returns:
        The domain.

    Raises:
        InputError: There are no images, some have no label, or one doesn't fit.
    """
    try:
        length = len(dataset)
    except Exception as error:
        raise InputError(f"domain {request.name!r}: its length can't be had ({error}); add __len__") from error
    if length == 0:
        raise InputError(f"domain {request.name!r} has no images; check the path and the split")
    items = _Items(dataset, request)
    rows = sample(length, request.size or length).tolist()
    if _is_float(items.read(rows[0])):
        fetch = _model_ready_images(items, rows, request)
    elif fits(len(rows), request.spec(), request.memory_limit_gib):
        fetch = from_memory(items, rows, request.spec())
    else:
        for row in rows:  # the labels have to be known
            items.read(row)
        fetch = on_demand(items, rows, request.spec())
    names = getattr(dataset, "classes", None)
    return IndexedDomain(
        request.name,
        fetch,
        len(rows),
        classes=tuple(map(str, names)) if request.labelled and isinstance(names, list | tuple) and names else None,
        spec=request.image,
        labels=items.labels_of(rows),
    )


def from_iterable_dataset(dataset: Any, request: Request) -> Domain:
    """Make a domain of an iterable torch dataset, such as a WebDataset pipeline.

    Args:
        dataset: Its items are as in :func:`from_dataset`, or batches of images (N, C, H, W).
        request: What is asked for.

    Returns:
        The domain.

    Raises:
        InputError: It has no images, or they don't fit.
    """
    try:
        first = None if isinstance(dataset, Iterator) else next(iter(dataset), None)
    except Exception as error:
        raise unreadable(f"domain {request.name!r}: image 0", error) from error
    images = None if first is None else _pair(first, request.name)[0]
    if first is None or (isinstance(images, Tensor) and images.ndim == 4):
        return stream_of_batches(dataset, request)
    return stream_of_items(Pairs(dataset, lambda item: _pair(item, request.name)), request)


@dataclass(frozen=True)
class Pairs:
    """Images and labels of an iterable dataset, one by one.

    Attributes:
        items: The dataset.
        read: Takes one of its items and returns the image and the label (None when there is none).
    """

    items: Iterable[object]
    read: Callable[[Any], tuple[object, object]]


def stream_of_items(pairs: Pairs, request: Request, classes: tuple[str, ...] | None = None) -> StreamDomain:
    """Make a domain of an iterable dataset of single images.

    Args:
        pairs: The dataset.
        request: What is asked for.
        classes: Class names in label order, or None.

    Returns:
        The domain.

    Raises:
        InputError: There are no images, or the first ones don't fit.
    """
    return stream_of_batches(_Batched(pairs, request), request, classes)


def stream_of_batches(
    source: Iterable[object], request: Request, classes: tuple[str, ...] | None = None
) -> StreamDomain:
    """Make a domain of something that gives batches.

    Args:
        source: What a :class:`StreamDomain` takes.
        request: What is asked for.
        classes: Class names in label order, or None.

    Returns:
        The domain.

    Raises:
        InputError: There are no images, or the first ones don't fit.
    """
    return StreamDomain(
        source,
        request.name,
        classes=classes,
        spec=request.image,
        count=request.classes,
        size=request.size,
        labelled=request.labelled,
    )


@dataclass(frozen=True)
class _Batched:
    """Batches of converted images, from an iterable dataset of single ones."""

    pairs: Pairs
    request: Request

    def set_epoch(self, epoch: int) -> None:
        """Hand a pass's seed on to datasets that shuffle by it."""
        items: Any = self.pairs.items
        if hasattr(items, "set_epoch"):
            items.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        numbered = enumerate(map(self.pairs.read, self.pairs.items))
        while chunk := list(itertools.islice(numbered, _CHUNK)):
            images = torch.stack([self._image(image, row) for row, (image, _) in chunk])
            known = [(row, label) for row, (_, label) in chunk if label is not None and self.request.labelled]
            labels = [_label(label, self._where(row)) for row, label in known]
            if 0 < len(labels) < len(chunk):
                raise InputError(
                    f"domain {self.request.name!r}: some images have no label, others have; label or remove them"
                )
            yield Batch(images, torch.tensor(labels) if labels else None)

    def _where(self, row: int) -> str:
        return f"domain {self.request.name!r}: image {row} of a pass"

    def _image(self, image: object, row: int) -> Tensor:
        if _is_float(image):
            return _model_ready(image, self.request, self._where(row))
        return torch.tensor(to_pixels(image, self.request.spec(), self._where(row))).permute(2, 0, 1)


class _Items:
    """The images of a map-style dataset; remembers the labels it comes across."""

    def __init__(self, dataset: Any, request: Request) -> None:
        self._dataset = dataset
        self._name = request.name
        self._labelled = request.labelled
        self._labels: dict[int, int] = {}

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        return [self.read(index) for index in indices]

    def read(self, index: int) -> object:
        try:
            item = self._dataset[index]
        except Exception as error:
            raise unreadable(self.where(index), error) from error
        image, label = _pair(item, self._name)
        if self._labelled and label is not None:
            self._labels[index] = _label(label, self.where(index))
        return image

    def where(self, index: int) -> str:
        return f"domain {self._name!r}: image {index}"

    def labels_of(self, rows: Sequence[int]) -> Tensor | None:
        """Return the labels of rows that have been read; None when none has one."""
        found = [self._labels[row] for row in rows if row in self._labels]
        if 0 < len(found) < len(rows):
            row = next(row for row in rows if row not in self._labels)
            raise InputError(f"{self.where(row)} has no label, others have; label or remove it")
        return torch.tensor(found) if found else None


def _pair(item: object, name: str) -> tuple[object, object]:
    """Return the image and the label (or None) in an item of a dataset."""
    if isinstance(item, Mapping):
        image = next((item[key] for key in IMAGE_KEYS if key in item), None)
        if image is None:
            keys = ", ".join(map(str, item))
            raise InputError(f"domain {name!r}: items have the keys {keys}; one of {', '.join(IMAGE_KEYS)} is needed")
        return image, next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        if not item:
            raise InputError(f"domain {name!r}: an item is empty; images or (image, label) pairs are needed")
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _label(value: object, where: str) -> int:
    """Return a label as a whole number."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}: label is {value!r}; a whole number is needed")
    return value


def _is_float(image: object) -> bool:
    if isinstance(image, Tensor):
        return image.is_floating_point()
    return isinstance(image, np.ndarray) and bool(np.issubdtype(image.dtype, np.floating))


def _model_ready(image: object, request: Request, where: str) -> Tensor:
    """Take a floating-point image as what the model eats: float32 (C, H, W)."""
    tensor = image.to(torch.float32) if isinstance(image, Tensor) else torch.tensor(image, dtype=torch.float32)
    if request.image is not None:
        request.image.check(tensor[None], where)
    elif tensor.ndim != 3:
        raise InputError(f"{where}: shape {tuple(tensor.shape)}; (channels, height, width) is needed")
    return tensor


def _model_ready_images(items: _Items, rows: Sequence[int], request: Request) -> Callable[[Tensor], Tensor]:
    """Read floating-point images once, for their labels, and keep them if they fit into memory."""
    first = _model_ready(items.read(rows[0]), request, items.where(rows[0]))

    def read(row: int) -> Tensor:
        tensor = _model_ready(items.read(row), request, items.where(row))
        if tensor.shape != first.shape:
            raise InputError(
                f"{items.where(row)}: shape {tuple(tensor.shape)}, the first has {tuple(first.shape)}; "
                "make all images the same size"
            )
        return tensor

    if len(rows) * first.numel() * 4 > request.memory_limit_gib * 2**30:
        for row in rows:
            read(row)
        return lambda indices: torch.stack([read(rows[index]) for index in indices.tolist()])
    store = torch.stack([read(row) for row in rows])
    return lambda indices: store.index_select(0, indices)
