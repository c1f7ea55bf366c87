"""The parts of a domain that a run learns on, chooses by and measures on; no image is in two of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from modelfence.cli.console import Console
from modelfence.cli.tables import DataTable
from modelfence.data import catalog
from modelfence.data.domain import IndexedDomain
from modelfence.data.files import local_path
from modelfence.data.image_spec import ImageSpec
from modelfence.data.named import from_text, path_of
from modelfence.data.records import Request
from modelfence.data.sources import as_domain
from modelfence.data.splits import protocol
from modelfence.errors import InputError

_TEST_SPLITS = ("test", "val", "valid", "validation", "dev")
_TEST_SHARE, _TEST_SEED = 1 / 6, 0  # of a domain that isn't divided; never changed, so that test images stay the same


@dataclass(frozen=True)
class Parts:
    """One domain in three parts.

    Attributes:
        train: To learn on.
        validation: To choose an epoch by.
        test: To measure on.
    """

    train: IndexedDomain
    validation: IndexedDomain
    test: IndexedDomain


def load_parts(name: str, text: str, data: DataTable, image: ImageSpec, classes: int | None = None) -> Parts:
    """Load a domain and divide it.

    The test part is the domain's own test split; an undivided folder gives a sixth of its images. Of the rest, seeded
    random images validate and train, as in the protocol of the paper (5,000 and 1,000); a small domain gives a sixth
    to validation and the rest to training.

    Args:
        name: What tables call it.
        text: A catalog name, a path, or ``hub:owner/name``.
        data: Sizes and seed.
        image: What the model eats.
        classes: The model's number of classes; None doesn't check it.

    Raises:
        InputError: The domain can't be had, an image can't be decoded, labels don't fit the classes, or the classes
            of its parts differ.
    """
    whole = _load(name, text, "train", image, classes)
    split = _test_split(text)
    if split is None:
        whole, test = whole.split(_TEST_SHARE, _TEST_SEED)
    else:
        test = _load(name, text, split, image, classes)
        if whole.classes is not None and test.classes is not None and whole.classes != test.classes:
            unlike = sorted(set(whole.classes) ^ set(test.classes)) or ["their order"]
            raise InputError(
                f"domain {name!r}: its parts 'train' and {split!r} don't have the same classes "
                f"({', '.join(unlike[:5])}); labels would be mixed up"
            )
    return Parts(*_divided(whole, data), test)


def load_images(name: str, text: str, data: DataTable, image: ImageSpec) -> IndexedDomain:
    """Load the images of a domain that :func:`load_parts` would train on, whose labels are neither read nor needed.

    Raises:
        InputError: The domain can't be had, or an image can't be decoded.
    """
    whole = _images(name, text, "train", image)
    if _is_undivided(text):
        whole, _ = whole.split(_TEST_SHARE, _TEST_SEED)
    return _divided(whole, data)[0]


def load_test(
    name: str, text: str, image: ImageSpec, classes: int | None = None, *, labels: bool = True
) -> IndexedDomain:
    """Load a domain's own test split; of one that isn't divided, all images. Without labels they aren't needed.

    Raises:
        InputError: As for :func:`load_parts`.
    """
    split = _test_split(text) or "train"
    return _load(name, text, split, image, classes) if labels else _images(name, text, split, image)


def note_undivided(domains: Mapping[str, str], console: Console) -> None:
    """Tell of domains that :func:`load_test` gives all images of: what a model learned from may be among them.

    Args:
        domains: Texts by name.
        console: Where to tell it.
    """
    names = [name for name, text in domains.items() if _test_split(text) is None]
    if names:
        console.note(
            f"{', '.join(names)}: not divided into parts to learn from and to test on, so all images are used. Keep "
            "images that the model or its mask learned from in another folder"
        )


def has_labels(text: str) -> bool:
    """Say whether a domain given as a text has labels, as far as its files tell; a catalog name has.

    Raises:
        InputError: It can't be had.
    """
    if text.startswith("hub:") or text in catalog.names():
        return True
    kind, files = local_path(path_of(text), "train")
    return kind != "folder" or any(entry.is_dir() and entry.name[0] != "." for entry in files[0].iterdir())


def _divided(whole: IndexedDomain, data: DataTable) -> tuple[IndexedDomain, IndexedDomain]:
    """Return the images to train on and those to validate on."""
    size = len(whole)
    if size < 2:
        raise InputError(
            f"domain {whole.name!r} has {size} image to learn on; one to learn on and one to validate are needed"
        )
    validation = min(data.validation_size, max(1, size // 6))
    wanted = size - validation if data.train_size == "whole" else min(int(data.train_size), size - validation)
    train_rows, validation_rows = protocol(size, wanted, validation, seed=data.seed)
    return whole.subset(train_rows), whole.subset(validation_rows)


def _images(name: str, text: str, split: str, image: ImageSpec) -> IndexedDomain:
    return cast("IndexedDomain", from_text(text, Request(name, image, split, labelled=False)))


def _load(name: str, text: str, split: str, image: ImageSpec, classes: int | None) -> IndexedDomain:
    domain = as_domain(text, name=name, image=image, split=split, classes=classes)
    if not isinstance(domain, IndexedDomain):
        raise InputError(f"domain {name!r}: is a stream; the command line needs images that can be counted")
    return domain


def _is_undivided(text: str) -> bool:
    """Say whether a domain is a local collection without a part to measure on."""
    try:
        return _test_split(text) is None
    except InputError:  # there is no test split; to learn from, none is needed
        return False


def _test_split(text: str) -> str | None:
    """Return the split to measure on, or None for a local collection that isn't divided.

    Raises:
        InputError: There is nothing of that name, or no such split.
    """
    if text.startswith("hub:") or text in catalog.names():
        return "test"
    path = path_of(text)
    if not path.is_dir():
        local_path(path, "train")  # raises where there is nothing
        return None
    for split in _TEST_SPLITS:
        try:
            found = local_path(path, split)
        except InputError:
            continue
        try:
            return split if found != local_path(path, "train") else None
        except InputError:  # there is this split alone
            return split
    local_path(path, "train")  # raises where splits can't be told from classes
    raise InputError(f"{text}: has no test split; name it one of {', '.join(_TEST_SPLITS)}")
