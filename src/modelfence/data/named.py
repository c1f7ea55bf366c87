"""Domains by name: the catalog's, data sets on the hub, and local paths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelfence.data import catalog, embedded
from modelfence.data.domain import Domain, check_labels
from modelfence.data.files import folder_records, local_path, loose_records, tar_records
from modelfence.data.records import Records, Request, domain_of
from modelfence.data.splits import holdout
from modelfence.data.tables import load_hub, read_parquet, table_records
from modelfence.errors import InputError, nearest
from modelfence.files import usable_path

_SPLIT_SEED = 0  # of test splits that a data set lacks; never changed, so that they stay the same


def from_text(text: str, request: Request) -> Domain:
    """Make a domain of a catalog name, ``hub:owner/name``, or a path.

    Args:
        text: The text; a catalog name goes before a path of the same name.
        request: What is asked for.

    Returns:
        The domain.

    Raises:
        InputError: There is no such thing, it has no such split, or its images or labels don't fit.
    """
    records = _records(text, request)
    return domain_of(records if request.labelled else replace(records, labels=None, classes=None), request)


def path_of(text: str) -> Path:
    """Return the path that a text stands for which is neither a catalog name nor ``hub:owner/name``.

    Args:
        text: The text; ``~`` in front is the home folder.

    Returns:
        The path; there may be nothing there, or a pattern in its place.

    Raises:
        InputError: It can't be a path, or it looks like a catalog name that isn't one; the text has the nearest.

    Example:
        >>> path_of("scans/ward-7").name
        'ward-7'
    """
    path = usable_path(text).expanduser()
    if not path.exists() and not any(letter in text for letter in "/\\*?[") and not path.suffix:
        catalog.lookup(text)  # raises, with the nearest names
    return path


def _records(text: str, request: Request) -> Records:
    if text.startswith("hub:"):
        repository, _, config = text.removeprefix("hub:").partition(":")
        if repository.count("/") != 1 or not all(repository.split("/")):
            raise InputError(f"{text!r}: hub:owner/name or hub:owner/name:config is needed")
        dataset = load_hub(repository, config or None, request.split, request.name)
        return _table(dataset, f"hub {repository}", request)
    if text in catalog.names():
        return _cataloged(catalog.lookup(text), request)
    return _local(path_of(text), request)


def _local(path: Path, request: Request) -> Records:
    kind, files = local_path(path, request.split)
    if kind == "folder":
        return folder_records(files[0]) if request.labelled else loose_records(files[0])
    if kind == "tar":
        return tar_records(files, labelled=request.labelled)
    where = str(path if len(files) > 1 else files[0])
    return _table(read_parquet(files, request.memory_limit_gib), where, request)


def _table(dataset: Any, where: str, request: Request) -> Records:
    return table_records(
        dataset,
        where,
        image_column=request.image_column,
        label_column=request.label_column,
        labelled=request.labelled,
    )


def _cataloged(entry: catalog.CatalogEntry, request: Request) -> Records:
    splits = entry.splits or {"train": "train", "test": "test"}
    if request.split not in splits:
        raise InputError(
            f"domain {entry.name!r} has no split {request.split!r}.{nearest(request.split, splits)} "
            f"It has {', '.join(splits)}"
        )
    if entry.source == "built-in":
        pixels, labels = embedded.build(entry.name, request.split)
        return Records(embedded.Arrays(entry.name, pixels), len(pixels), labels, entry.classes)
    file = entry.local_file(request.split)
    if file is not None:
        return _table(read_parquet([file], request.memory_limit_gib), str(file), request)
    if entry.hub is None:
        raise InputError(
            f"domain {entry.name!r} isn't on the hub as far as we know; put its train.parquet and test.parquet "
            f"into a folder {entry.name} where {catalog.DATA_VARIABLE} points"
        )
    return _from_hub(entry, splits[request.split], request)


def _from_hub(entry: catalog.CatalogEntry, split: str, request: Request) -> Records:
    """Load a catalog entry from the hub: choose its rows, make the test split it lacks, reorder its labels."""
    dataset = load_hub(entry.hub or "", entry.config, split, entry.name)
    for column, value in (entry.where or {}).items():
        dataset = _rows_with(dataset, column, value, entry)
    if entry.held_out is not None:
        rest, test = holdout(len(dataset), entry.held_out, _SPLIT_SEED)
        dataset = dataset.select((test if request.split == "test" else rest).tolist())
    image_column, label_column = entry.columns
    records = table_records(
        dataset,
        f"hub {entry.hub}",
        image_column=image_column,
        label_column=label_column,
        labelled=request.labelled,
    )
    labels, classes = records.labels, records.classes
    if entry.label_map and labels is not None:
        check_labels(labels, entry.name, count=len(entry.label_map))
        labels = torch.tensor(entry.label_map)[labels]
    return replace(records, labels=labels, classes=entry.classes or classes)


def _rows_with(dataset: Any, column: str, value: str, entry: catalog.CatalogEntry) -> Any:
    """Choose the rows that have a value, or the class of that name, in a column."""
    found = dataset.features.get(column)
    names = getattr(found, "names", None)
    wanted: object = names.index(value) if names and value in names else value
    values = [] if found is None else dataset.select_columns([column]).with_format(None)[:][column]
    rows = [row for row, present in enumerate(values) if present == wanted]
    if not rows:
        raise InputError(
            f"domain {entry.name!r}: hub data set {entry.hub!r} has no rows with {column} = {value!r}; "
            "the catalog doesn't fit it any more: load it with hub: and choose the rows"
        )
    return dataset.select(rows)
