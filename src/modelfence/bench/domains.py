"""The domains of a benchmark: training, validation and test part, and where they are when they aren't here."""

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from modelfence.bench.budgets import Scale
from modelfence.data import catalog
from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.data.splits import protocol
from modelfence.errors import InputError

_FOLDERS = {
    "visda_t": ("visda", "train"),
    "visda_v": ("visda", "validation"),
    "office_home_art": ("office_home/Art", "train"),
    "office_home_clipart": ("office_home/Clipart", "train"),
    "office_home_product": ("office_home/Product", "train"),
    "office_home_real": ("office_home/Real World", "train"),
}
"""Domains published as folders of classes: folder in $MODELFENCE_DATA, and the split that it is in there."""
_TEST_SHARE, _TEST_SEED = 0.2, 0  # of folders, which aren't divided; never changed, so that test images stay the same


class Parts(NamedTuple):
    """One domain in three parts; no image is in two of them."""

    train: IndexedDomain
    validation: IndexedDomain
    test: IndexedDomain


def image_spec(size: int) -> ImageSpec:
    """Return the spec of RGB images of a height and width, with pixels scaled to -1..1.

    Args:
        size: Pixels.

    Example:
        >>> image_spec(32).shape
        (3, 32, 32)
    """
    return ImageSpec(channels=3, height=size, width=size, mean=(0.5,) * 3, std=(0.5,) * 3)


def domains(
    name: str,
    size: int,
    seed: int,
    train_size: int = 5000,
    validation_size: int = 1000,
    test_size: int | None = None,
) -> Parts:
    """Return training, validation and test part of a domain (the 5,000 / 1,000 protocol, or what there is).

    Args:
        name: A name of the catalog.
        size: Height and width of the images in pixels.
        seed: Of the choice of images.
        train_size: Images to learn from, at most.
        validation_size: Images to validate on, at most a sixth.
        test_size: Test images, at most; None takes all.

    Raises:
        InputError: The domain can't be had.
    """
    spec = image_spec(size)
    folder = folder_of(name)
    if folder is None:
        whole = _counted(as_domain(name, image=spec, split="train"), name)
        test = _counted(as_domain(name, image=spec, split="test", size=test_size), name)
    else:
        path, split = folder
        undivided = _counted(as_domain(str(path), name=name, image=spec, split=split), name)
        whole, test = undivided.split(_TEST_SHARE, _TEST_SEED)
        test = test if test_size is None else _counted(as_domain(test, size=test_size), name)
    wanted = min(train_size, len(whole) - min(validation_size, len(whole) // 6))
    rest = min(validation_size, len(whole) - wanted)
    learn, check = protocol(len(whole), wanted, rest, seed=seed)
    return Parts(whole.subset(learn, name), whole.subset(check, name), test)


@lru_cache(maxsize=8)
def parts_of(name: str, size: int, scale: Scale) -> Parts:
    """Return the parts of a domain at a budget's scale; the last few are kept in memory.

    Args:
        name: A name of the catalog.
        size: Height and width of the images in pixels.
        scale: How many images.

    Raises:
        InputError: The domain can't be had.
    """
    return domains(name, size, 0, scale.train_images, scale.validation_images, scale.test_images)


def folder_of(name: str) -> tuple[Path, str] | None:
    """Return the folder of classes that a domain is published as and the split to ask it for; None if it isn't there.

    Args:
        name: A name of the catalog.
    """
    root = os.environ.get(catalog.DATA_VARIABLE)
    if not root or name not in _FOLDERS or catalog.lookup(name).local_file("train") is not None:
        return None
    path, split = Path(root) / _FOLDERS[name][0], _FOLDERS[name][1]
    inner = path / split if path.name == "visda" else path
    return (path, split) if inner.is_dir() else None


def require_domains(names: Iterable[str]) -> None:
    """Refuse domains that can't be had, before any work.

    Args:
        names: Names of the catalog.

    Raises:
        InputError: Some can't; one line says which, and where they are expected.
    """
    missing = [name for name in dict.fromkeys(names) if not is_here(name)]
    if not missing:
        return
    places = [f"{name}/train.parquet and test.parquet" for name in missing]
    published = sorted({_place(name) for name in missing if name in _FOLDERS})
    also = f", or as published: {', '.join(published)}" if published else ""
    raise InputError(
        f"domain{'s' if len(missing) > 1 else ''} {', '.join(missing)} can't be found: expected in "
        f"${catalog.DATA_VARIABLE} ({os.environ.get(catalog.DATA_VARIABLE) or 'not set'}) as {', '.join(places)}{also}"
    )


def is_here(name: str) -> bool:
    """Say whether a domain is on this machine or can be loaded from the hub.

    Args:
        name: A name of the catalog.

    Raises:
        InputError: There is no such name, or its folder holds only one of its files.
    """
    entry = catalog.lookup(name)
    if entry.source == "built-in" or entry.local_file("train") is not None or folder_of(name) is not None:
        return True
    if entry.hub is None or entry.hub == "" or entry.source != "hub":
        return False
    try:
        as_domain(name, image=image_spec(32), size=1)
    except InputError:
        return False
    return True


def _place(name: str) -> str:
    folder, split = _FOLDERS[name]
    return f"{folder}/{split}/<class>/" if folder == "visda" else f"{folder}/<class>/"


def _counted(domain: object, name: str) -> IndexedDomain:
    if not isinstance(domain, IndexedDomain):
        raise InputError(f"domain {name!r}: is a stream; a benchmark needs images that can be counted")
    return domain
