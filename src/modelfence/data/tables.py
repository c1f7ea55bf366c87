"""Images in tables: Hugging Face datasets, and the parquet files they are stored in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelfence.data.records import Records
from modelfence.errors import InputError

IMAGE_COLUMNS = ("image", "img", "images", "pixel_values", "png", "jpg", "jpeg", "webp")
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class", "target", "y")
_ONE_LINE = 300


class _Rows:
    """The images of a table's column, as they are stored."""

    def __init__(self, dataset: Any, column: str, where: str) -> None:
        self._dataset = dataset.select_columns([column])
        self._column = column
        self._where = where

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        values = self._dataset[list(indices)][self._column]
        return [encoded(value, self.where(index)) for index, value in zip(indices, values, strict=True)]

    def where(self, index: int) -> str:
        return f"{self._where}: row {index}"


def encoded(value: object, where: str) -> object:
    """Return what a stored image holds: bytes where there are some, else its path.

    Args:
        value: A mapping with ``bytes`` and ``path``, nested lists of pixels, or anything else, which is returned.
        where: Where it comes from, for the error.

    Returns:
        Bytes, a path, an array uint8, or the value.

    Raises:
        InputError: Pixels aren't whole numbers 0..255.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        return value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.zeros(0)
    if array.dtype.kind not in "iu" or not array.size or not 0 <= int(array.min()) <= int(array.max()) <= 255:
        raise InputError(
            f"{where}: pixels in lists have to be whole numbers 0..255; store them so, or give float images by a torch "
            "Dataset"
        )
    return array.astype(np.uint8)


def table_records(
    dataset: Any,
    where: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    labelled: bool = True,
) -> Records:
    """Take the images and labels of a Hugging Face ``Dataset``.

    Args:
        dataset: The dataset; its format and transforms are left aside.
        where: What errors call it.
        image_column: Name of the image column; found by type and name when None.
        label_column: Name of the label column; found by name and type when None. Without one, the images are
            unlabelled.
        labelled: Take the labels; else they aren't looked at.

    Returns:
        The images, undecoded, with their labels and class names.

    Raises:
        InputError: A column is missing or a row has no label.
    """
    from datasets import Image

    dataset = dataset.with_format(None)
    features = dataset.features
    column = find_image_column(features, where, image_column)
    if isinstance(features[column], Image):
        dataset = dataset.cast_column(column, Image(decode=False))
    labels, classes = None, None
    found = find_label_column(features, where, label_column) if labelled else None
    if found is not None:
        labels = _labels(dataset, found, where)
        classes = class_names(features[found])
    return Records(_Rows(dataset, column, where), len(dataset), labels, classes)


def find_image_column(features: Mapping[str, Any], where: str, wanted: str | None = None) -> str:
    """Name the column that holds the images.

    Args:
        features: Column types by name.
        where: What errors call the table.
        wanted: The user's choice, or None.

    Returns:
        The name.

    Raises:
        InputError: There is no such column, or none that looks like images.
    """
    from datasets import Image

    if wanted is not None:
        return _present(features, where, wanted)
    images = [name for name, kind in features.items() if isinstance(kind, Image)]
    named = [name for name in IMAGE_COLUMNS if name in (images or features)]
    if named or images:
        return (named or images)[0]
    raise InputError(f"{where}: no image column among {', '.join(features)}; name it with image_column")


def find_label_column(features: Mapping[str, Any], where: str, wanted: str | None = None) -> str | None:
    """Name the column that holds the labels, or return None.

    Args:
        features: Column types by name.
        where: What errors call the table.
        wanted: The user's choice, or None.

    Returns:
        The name, or None.

    Raises:
        InputError: The column chosen isn't there, or there are several class columns to choose from.
    """
    from datasets import ClassLabel

    if wanted is not None:
        return _present(features, where, wanted)
    named = [name for name in LABEL_COLUMNS if name in features]
    classes = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    if not named and len(classes) > 1:
        raise InputError(f"{where}: several class columns ({', '.join(classes)}); name one with label_column")
    return next(iter(named or classes), None)


def class_names(feature: object) -> tuple[str, ...] | None:
    """Return the class names of a label column, where it has them.

    Args:
        feature: The column's type.

    Returns:
        Names in label order, or None.
    """
    names = getattr(feature, "names", None)
    return tuple(str(name) for name in names) if names else None


def _present(features: Mapping[str, Any], where: str, wanted: str) -> str:
    if wanted not in features:
        raise InputError(f"{where}: no column {wanted!r}; there are {', '.join(features)}")
    return wanted


def _labels(dataset: Any, column: str, where: str) -> Tensor:
    import pyarrow as pa

    values = dataset.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        row = next(row for row, value in enumerate(values) if not value.is_valid)
        raise InputError(f"{where}: row {row} has no label; remove the row or label it")
    if not pa.types.is_integer(values.type):
        raise InputError(
            f"{where}: column {column!r} holds {values.type}; whole numbers are needed as labels: "
            "encode them (class_encode_column) or name another column with label_column"
        )
    return torch.from_numpy(values.to_numpy().astype(np.int64))


def read_parquet(paths: Sequence[Path], memory_limit_gib: float) -> Any:
    """Open parquet files as one Hugging Face ``Dataset``.

    Files below the memory limit are read into memory; larger ones go through the ``datasets`` cache, which is
    memory-mapped.

    Args:
        paths: The files.
        memory_limit_gib: Most bytes to read into memory, in GiB.

    Returns:
        The dataset.

    Raises:
        InputError: A file can't be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset, concatenate_datasets
    from datasets.table import InMemoryTable

    if sum(path.stat().st_size for path in paths) > memory_limit_gib * 2**30:
        return Dataset.from_parquet([str(path) for path in paths])
    parts = []
    for path in paths:
        try:
            parts.append(Dataset(InMemoryTable(pq.read_table(path))))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"{path}: can't be read as parquet ({one_line(error)}); copy or make the file again"
            ) from error
    return concatenate_datasets(parts)


def load_hub(repository: str, config: str | None, split: str, name: str) -> Any:
    """Load a split of a data set from the Hugging Face hub, or from its cache.

    Args:
        repository: ``owner/name``.
        config: The data set's configuration, or None.
        split: Name of the split there.
        name: What errors call the domain.

    Returns:
        A ``Dataset``, memory-mapped from the cache.

    Raises:
        InputError: It doesn't exist, has no such split, or the hub can't be reached.
    """
    import datasets

    try:
        return datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"domain {name!r}: split {split!r} of hub data set {repository!r} can't be loaded "
            f"({one_line(error)}); check the name and the network, or put the files where MODELFENCE_DATA points"
        ) from error


def one_line(error: Exception) -> str:
    """Return an error's text on one line, shortened.

    Args:
        error: Any exception.

    Returns:
        Its text, or its type where it has none.
    """
    text = " ".join(str(error).split())
    return (text[:_ONE_LINE] + "..." if len(text) > _ONE_LINE else text) or type(error).__name__
