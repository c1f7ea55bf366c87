"""Local image collections: parquet files, folders of classes, and WebDataset shards."""

import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from modelfence.data.records import Records
from modelfence.errors import InputError
from modelfence.files import parse_json

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_SPLIT_NAMES = ("train", "test", "val", "valid", "validation", "dev")


def local_path(path: Path, split: str) -> tuple[str, list[Path]]:
    """Find out what a path is and which of its files belong to a split.

    A collection that isn't divided into splits is used whole, whatever the split.

    Args:
        path: A parquet file, a tar file, a pattern of tar files, or a folder.
        split: The split wanted, such as ``train``.

    Returns:
        ``"parquet"``, ``"tar"`` or ``"folder"``, and its files; for a folder, the folder with the classes in it.

    Raises:
        InputError: There is nothing there, it has other splits, they can't be told from classes, or nothing in it is
            known.
    """
    if path.is_file() or (not path.is_dir() and any(letter in path.name for letter in "*?[")):
        found = [path] if path.is_file() else sorted(path.parent.glob(path.name))
        kinds = {file.suffix for file in found}
        if kinds in ({".parquet"}, {".tar"}):
            return kinds.pop()[1:], found
        problem = "no such files" if not found else "neither .parquet files nor .tar shards"
        raise InputError(f"{path}: {problem}; give parquet files, uncompressed .tar shards, or a folder")
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    for suffix in (".parquet", ".tar"):
        for pattern in (f"{split}{suffix}", f"{split}-*{suffix}", f"{split}/*{suffix}", f"data/{split}-*{suffix}"):
            found = sorted(path.glob(pattern))
            if found:
                return suffix[1:], found
    divided = _split_folders(path)
    if split in divided or (split not in _SPLIT_NAMES and (path / split).is_dir()):
        return "folder", [path / split]
    return _whole(path, split, divided)


def _split_folders(path: Path) -> list[str]:
    """Return the names of those sub-folders that are splits; a class may have such a name too, of vehicles "train".

    Raises:
        InputError: They can't be told apart.
    """
    folders = _folders_in(path)
    found = [folder for folder in folders if folder.name in _SPLIT_NAMES]
    names = [folder.name for folder in found]
    if len(found) == len(folders) or any(_folders_in(folder) for folder in found):
        return names
    if len(found) > 1:
        raise InputError(
            f"{path}: {', '.join(names)} can be splits or classes; move what is beside them away, or name the one to "
            "use"
        )
    return []


def _whole(path: Path, split: str, divided: Sequence[str]) -> tuple[str, list[Path]]:
    """Take a folder as it is, unless it holds other splits."""
    files = {entry.name.split(".")[0].split("-")[0] for entry in path.iterdir() if entry.suffix in (".parquet", ".tar")}
    others = sorted({*divided, *(files & set(_SPLIT_NAMES))})
    if others:
        raise InputError(f"{path}: has no split {split!r}; it has {', '.join(others)}")
    for suffix in (".parquet", ".tar"):
        found = sorted(path.glob(f"*{suffix}"))
        if found:
            return suffix[1:], found
    return "folder", [path]


class _Paths:
    """Image files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        return [self._paths[index] for index in indices]

    def where(self, index: int) -> str:
        return str(self._paths[index])


def folder_records(root: Path) -> Records:
    """List the images of a folder that has one sub-folder for each class.

    Args:
        root: The folder; the classes are its sub-folders in alphabetical order. Hidden ones are left out; an empty one
            is a class that the domain has no image of.

    Returns:
        The images, class by class and each class in alphabetical order.

    Raises:
        InputError: There are no class folders, or no images in them.
    """
    folders = _folders_in(root)
    if not folders:
        raise InputError(f"{root}: no class folders; one sub-folder of images for each class is needed")
    paths: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = _images_in(folder)
        paths += found
        labels += [label] * len(found)
    if not paths:
        raise InputError(f"{root}: no images in its {len(folders)} class folders; add some")
    return Records(_Paths(paths), len(paths), torch.tensor(labels), tuple(folder.name for folder in folders))


def loose_records(root: Path) -> Records:
    """List the images of a folder whose sub-folders say nothing about classes.

    They are the images in its sub-folders, the same in the same order as :func:`folder_records` gives, so that both
    divide a domain alike; only where these have none, those beside them.

    Args:
        root: The folder. Hidden sub-folders are left out.

    Returns:
        The images in alphabetical order, without labels.

    Raises:
        InputError: There are none.
    """
    paths = [path for folder in _folders_in(root) for path in _images_in(folder)] or _images_in(root, deep=False)
    if not paths:
        raise InputError(f"{root}: no images; add some, or name another folder")
    return Records(_Paths(paths), len(paths))


def _folders_in(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images_in(folder: Path, *, deep: bool = True) -> list[Path]:
    entries = folder.rglob("*") if deep else folder.iterdir()
    return sorted(file for file in entries if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())


class _TarMembers:
    """Images in uncompressed tar files, read at their place without unpacking."""

    def __init__(self, members: Sequence[tuple[Path, str, int, int]]) -> None:
        self._members = members

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        return [self._read(*self._members[index]) for index in indices]

    @staticmethod
    def _read(shard: Path, _name: str, offset: int, size: int) -> bytes:
        with shard.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def where(self, index: int) -> str:
        shard, name, _, _ = self._members[index]
        return f"{shard}: {name}"


def tar_records(shards: Sequence[Path], *, labelled: bool = True) -> Records:
    """List the samples of WebDataset shards.

    Args:
        shards: Uncompressed tar files, whose samples are files with one name and several suffixes: an image, and a
            label in ``.cls`` (a whole number) or ``.json`` (with the key ``label``).
        labelled: Take the labels; else they aren't looked at.

    Returns:
        The images in the shards' order; labels are None when no sample has one.

    Raises:
        InputError: A shard can't be read, a sample lacks its label or its label isn't a number.
    """
    members: list[tuple[Path, str, int, int]] = []
    labels: list[int | None] = []
    for shard in shards:
        for name, offset, size, label in _samples(shard, labelled):
            members.append((shard, name, offset, size))
            labels.append(label)
    if not members:
        raise InputError(f"{shards[0]}: no images in {len(shards)} shards; samples need .png, .jpg or the like")
    known = [label for label in labels if label is not None]
    if known and len(known) < len(labels):
        shard, name, _, _ = members[labels.index(None)]
        raise InputError(f"{shard}: {name} has no label; add a .cls file to the sample or remove it")
    return Records(_TarMembers(members), len(members), torch.tensor(known) if known else None)


def _samples(shard: Path, labelled: bool) -> Iterator[tuple[str, int, int, int | None]]:
    """Go through a shard: image name, place, length and label of each sample that has an image."""
    samples: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                stem, _, suffix = path.name.partition(".")
                sample = samples.setdefault(str(path.parent / stem), {})
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    sample["image"] = (member.name, member.offset_data, member.size)
                elif labelled and member.isfile() and suffix in ("cls", "json"):
                    content = tar.extractfile(member)
                    label = _label(content.read() if content else b"", suffix, shard, member.name)
                    if None not in (label, sample.get("label")) and label != sample["label"]:
                        raise InputError(f"{shard}: {stem} has two labels, {sample['label']} and {label}; keep one")
                    sample["label"] = sample.get("label") if label is None else label
    except (tarfile.TarError, OSError) as error:
        raise InputError(
            f"{shard}: can't be read as an uncompressed tar file ({error}); make the shard again"
        ) from error
    return ((*sample["image"], sample.get("label")) for sample in samples.values() if "image" in sample)


def _label(content: bytes, suffix: str, shard: Path, name: str) -> int | None:
    try:
        if suffix == "cls":
            return _whole_number(content.decode())
        found = parse_json(content)
        label = found.get("label", found.get("cls")) if isinstance(found, dict) else found
        return None if label is None else _whole_number(label)
    except ValueError as error:
        raise InputError(f"{shard}: {name} has no whole number (of 64 bits) as its label; write one") from error


def _whole_number(value: object) -> int:
    """Read a whole number, such as 3, 3.0 or "3"; nothing else is taken for one, neither 2.7 nor true."""
    written = isinstance(value, str) and re.fullmatch(r"[-+]?\d+", value.strip(), re.ASCII)
    if written or (isinstance(value, float) and value.is_integer()):
        value = int(value)  # type: ignore[call-overload]  # a text of digits or a float
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    raise ValueError(f"{value!r:.40} is no whole number of 64 bits")
