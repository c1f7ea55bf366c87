"""From whatever a user has to a domain: names, paths, data loaders, datasets."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from modelfence.data import catalog
from modelfence.data.class_names import SAME_CLASSES
from modelfence.data.domain import Domain, IndexedDomain, check_labels
from modelfence.data.hugging_face import from_hugging_face, is_hugging_face
from modelfence.data.image_spec import ImageSpec
from modelfence.data.items import from_dataset, from_iterable_dataset, stream_of_batches
from modelfence.data.named import from_text
from modelfence.data.records import Request
from modelfence.data.splits import sample
from modelfence.data.stream import StreamDomain
from modelfence.data.unlabelled import without_labels
from modelfence.errors import InputError


def as_domain(
    thing: object,
    *,
    name: str | None = None,
    image: ImageSpec | None = None,
    split: str = "train",
    size: int | None = None,
    classes: int | None = None,
    memory_limit_gib: float = 4.0,
    image_column: str | None = None,
    label_column: str | None = None,
    labelled: bool = True,
) -> Domain:
    """Make a domain of whatever a user has.

    Encoded images and uint8 pixels are converted to the spec's channels and size, kept as uint8 while they fit
    into the memory limit and decoded on demand when they don't, and normalized when they are handed out.
    Floating-point images are taken to be what the model eats. A map-style dataset is read once, so its random
    augmentations are frozen; give a ``DataLoader`` to have them new in each pass.

    Args:
        thing: A domain (returned as it is), a ``DataLoader`` or list of batches, a torch ``Dataset``, a Hugging
            Face dataset, or a text: a catalog name, ``hub:owner/name`` or ``hub:owner/name:config``, or the path
            of a folder of classes, a parquet file, ``.tar`` shards, or a folder that holds any of these by split.
        name: What tables and errors call it; by default the text, or the object's type.
        image: What the model eats; needed unless the images are floating point.
        split: Which part of a named data set or a divided folder; undivided ones are used whole.
        size: Use at most so many images: a random choice that is always the same, or the first of each pass of a
            data loader or stream.
        classes: Number of classes the model has; labels and class names are checked against it.
        memory_limit_gib: Most memory for decoded images, in GiB.
        image_column: Name of the image column of a table; found by type and name when None.
        label_column: Name of the label column of a table; found by name and type when None.
        labelled: Take the labels; else they are neither looked at nor needed, the domain has none, and a folder may
            hold images without class folders.

    Returns:
        The domain.

    Raises:
        InputError: The thing can't be a domain, doesn't exist, is empty, can't be decoded, or its labels don't
            fit the classes.

    Example:
        >>> spec = ImageSpec(channels=1, height=16, width=16, mean=(0.5,), std=(0.5,))
        >>> domain = as_domain("sklearn_digits", image=spec, split="test", size=100, classes=10)
        >>> next(domain.once(8)).images.shape
        torch.Size([8, 1, 16, 16])
    """
    if name is None:
        name = thing if isinstance(thing, str) else str(getattr(thing, "name", type(thing).__name__))
    request = Request(name, image, split, size, classes, memory_limit_gib, image_column, label_column, labelled)
    if image is not None and not isinstance(image, ImageSpec):
        raise InputError(f"image= is {type(image).__name__}; an ImageSpec is needed")
    if size is not None and size < 1:
        raise InputError(f"domain {name!r}: size is {size}; at least one image is needed")
    domain = _dispatch(thing, request)
    _check_classes(domain, request)
    return domain


def _dispatch(thing: object, request: Request) -> Domain:
    if isinstance(thing, Domain):
        thing = thing if request.labelled else without_labels(thing)
        if isinstance(thing, IndexedDomain) and request.size is not None:
            return thing.subset(sample(len(thing), request.size))
        return thing.first(request.size) if isinstance(thing, StreamDomain) and request.size is not None else thing
    if isinstance(thing, str | Path):
        return from_text(str(thing), request)
    if is_hugging_face(thing):
        return from_hugging_face(thing, request)
    return _from_torch(thing, request)


def _from_torch(thing: Any, request: Request) -> Domain:
    if isinstance(thing, IterableDataset):
        return from_iterable_dataset(thing, request)
    if isinstance(thing, Dataset):
        return from_dataset(thing, request)
    if isinstance(thing, Iterable) and not isinstance(thing, Mapping | Tensor):
        return stream_of_batches(thing, request)
    if hasattr(thing, "__getitem__") and hasattr(thing, "__len__") and not isinstance(thing, Mapping | Tensor):
        return from_dataset(thing, request)
    raise InputError(
        f"{type(thing).__name__} can't be a domain; give a DataLoader, a torch or Hugging Face dataset, a path, "
        f"hub:owner/name, or one of the catalog's names: {', '.join(catalog.names())}"
    )


def _check_classes(domain: Domain, request: Request) -> None:
    if request.classes is None:
        return
    if domain.classes is not None and len(domain.classes) != request.classes:
        names = ", ".join(domain.classes[:5]) + (", ..." if len(domain.classes) > 5 else "")
        raise InputError(
            f"domain {request.name!r} has {len(domain.classes)} classes ({names}), the model {request.classes}; "
            + SAME_CLASSES
        )
    if isinstance(domain, IndexedDomain) and domain.labels is not None:
        check_labels(domain.labels, request.name, count=request.classes)
