"""Domains from Hugging Face datasets, map-style or streamed."""

from collections.abc import Mapping
from typing import Any

from modelfence.data.domain import Domain
from modelfence.data.items import Pairs, from_dataset, stream_of_items
from modelfence.data.records import Request, domain_of
from modelfence.data.tables import class_names, encoded, find_image_column, find_label_column, table_records
from modelfence.errors import InputError

_SHUFFLE_BUFFER = 1000


def is_hugging_face(thing: object) -> bool:
    """Say whether an object comes from the ``datasets`` library, without importing it.

    Args:
        thing: Any object.

    Returns:
        Whether its class is defined there.
    """
    return type(thing).__module__.split(".")[0] == "datasets"


def from_hugging_face(thing: Any, request: Request) -> Domain:
    """Make a domain of a Hugging Face ``Dataset``, ``IterableDataset`` or a dictionary of them by split.

    Args:
        thing: The dataset. A function given by ``set_transform`` is applied, once per image.
        request: What is asked for.

    Returns:
        The domain; a streamed one is shuffled by shards and a buffer of 1,000 images.

    Raises:
        InputError: The split or a column is missing, there are no images, or they can't be decoded.
    """
    import datasets

    if isinstance(thing, Mapping):
        if request.split not in thing:
            raise InputError(
                f"domain {request.name!r} has no split {request.split!r}; it has {', '.join(map(str, thing))}"
            )
        thing = thing[request.split]
    if isinstance(thing, datasets.IterableDataset):
        return _streamed(thing, request)
    if not isinstance(thing, datasets.Dataset):
        raise InputError(f"datasets.{type(thing).__name__} can't be a domain; give a Dataset or IterableDataset")
    if thing.format["type"] == "custom":  # set_transform: the user's function makes the images
        return from_dataset(thing, request)
    records = table_records(
        thing,
        f"domain {request.name!r}",
        image_column=request.image_column,
        label_column=request.label_column,
        labelled=request.labelled,
    )
    return domain_of(records, request)


def _streamed(thing: Any, request: Request) -> Domain:
    from datasets import Image

    where = f"domain {request.name!r}"
    features = thing.features or dict.fromkeys(next(iter(thing), {}))
    if not features:
        raise InputError(f"{where} has no images; check the split and the filters")
    image = find_image_column(features, where, request.image_column)
    label = find_label_column(features, where, request.label_column) if request.labelled else None
    if request.size is not None:  # the same images in each pass, however they are shuffled
        thing = thing.take(request.size)
    if isinstance(features[image], Image):
        thing = thing.cast_column(image, Image(decode=False))

    def pair(item: Mapping[str, object]) -> tuple[object, object]:
        return encoded(item[image], where), None if label is None else item[label]

    shuffled = thing.shuffle(seed=0, buffer_size=_SHUFFLE_BUFFER)  # set_epoch makes each pass differ
    classes = None if label is None else class_names(features[label])
    return stream_of_items(Pairs(shuffled, pair), request, classes)
