"""Queries for a model that only answers: image pairs to hand out, and the answers that come back."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelfence.data.domain import labels_of
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.data.splits import permutation
from modelfence.errors import InputError
from modelfence.files import atomic_write, prepare_output, require_empty, usable_path
from modelfence.masking.digest import digest_of_tensors
from modelfence.ownership.answers import Answers
from modelfence.ownership.watermark import Watermark
from modelfence.results import remove

QUERIES, LIST, KEY = "queries", "queries.csv", "labels.csv"
_HEADERS = {f"{QUERIES}/{LIST}": ("image", "clean", "marked"), KEY: ("image", "label")}
_NO_LABELS = "has no column label; give --labels labels.csv, the key written with the queries, or add that column"
_IMAGE = re.compile(r"(clean|marked)/([0-9a-f]{8}-)?\d{5,}\.png")


def export_queries(
    domain: object,
    watermark: Watermark,
    folder: Path | str,
    *,
    image: ImageSpec | None = None,
    images: int = 200,
    seed: int = 0,
    force: bool = False,
) -> Path:
    """Write image pairs for somebody else to show to a model.

    ``folder/queries/`` is handed out: ``clean/<export>-00000.png``, ``marked/<export>-00000.png`` and so on, in random
    order, and ``queries.csv`` with the columns image, clean and marked, the latter two being paths. The answer is the
    same file with a class in place of each path. The name of an export follows from its pixels.
    ``folder/labels.csv`` is the key and stays with the owner.

    Args:
        domain: Labelled images, as for :func:`modelfence.ownership.verification.verify`; they are written at its size.
        watermark: The mark.
        folder: Where to; made when missing.
        image: What the model eats, for images that aren't a domain that knows it.
        images: How many, spread evenly over the domain.
        seed: Of the order.
        force: Write into a folder that has files in it; earlier queries there are removed.

    Returns:
        The key's path.

    Raises:
        InputError: The folder isn't empty, or has files of others where ours would be; the domain can't be had or has
            no labels, or its images can't be marked or written as PNG.
        ArtifactError: The folder can't be written.
    """
    root = usable_path(folder)
    if not force:
        require_empty(root, "replace queries in it with --force (force=True), or name another")
    earlier = _earlier(root) if force else []
    domain = as_domain(domain, image=image, split="test")
    spec = getattr(domain, "spec", None) or image
    if spec is None or spec.channels not in (1, 3):
        found = "doesn't say how its images are normalized" if spec is None else f"has {spec.channels} channels"
        raise InputError(f"domain {domain.name!r} {found}; grey or RGB images with an image spec can be written as PNG")
    batches = list(domain.once(250, limit=images))
    if not batches:
        raise InputError(f"domain {domain.name!r} has no images; check its split or path")
    labels = torch.cat([labels_of(batch, domain.name) for batch in batches])
    clean = torch.cat([spec.denormalize(batch.images) for batch in batches])
    order = permutation(len(labels), seed)
    clean, labels = clean[order], labels[order]
    shown = {"clean": clean, "marked": watermark.apply(clean)}
    prepare_output(root, force=force)
    remove(earlier)
    export = digest_of_tensors(shown)[:8]  # so that answers to others don't fit
    names = [f"{export}-{number:05d}" for number in range(len(labels))]
    rows = [(name, f"clean/{name}.png", f"marked/{name}.png") for name in names]
    atomic_write(root / QUERIES / LIST, _table(_HEADERS[f"{QUERIES}/{LIST}"], rows))
    for kind, pixels in shown.items():
        for name, one in zip(names, pixels, strict=True):
            atomic_write(root / QUERIES / kind / f"{name}.png", _png(one))
    atomic_write(root / KEY, _table(_HEADERS[KEY], zip(names, labels.tolist(), strict=True)))
    return root / KEY


def _earlier(root: Path) -> list[Path]:
    """Return the files of earlier queries in a folder; refuse others that have the names of ours."""
    handed = root / QUERIES
    images = [path for path in sorted(handed.rglob("*")) if _IMAGE.fullmatch(path.relative_to(handed).as_posix())]
    tables = [root / name for name in _HEADERS if (root / name).exists()]
    ours = [path for path in tables if _begins_with(path, ",".join(_HEADERS[path.relative_to(root).as_posix()]))]
    if ours:
        ours += images
    for path in (*tables, *images, *([handed] if handed.is_file() else [])):
        if path not in ours:
            raise InputError(f"{path}: wasn't written by modelfence; move it away, or name another folder")
    return ours


def _begins_with(path: Path, line: str) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline(200).strip() == line.encode()
    except OSError:
        return False


def read_predictions(path: Path | str, key: Path | str | None = None) -> Answers:
    """Read the answers of a model that was asked by somebody else.

    Args:
        path: A CSV file with the columns image (its name), clean and marked (the classes predicted, whole numbers from
            0), in any order of rows and columns.
        key: ``labels.csv`` as :func:`export_queries` wrote it; None for a file that has a fourth column, label.

    Returns:
        The answers, in the order of the key.

    Raises:
        InputError: A file can't be read, a column is missing or unknown, an image is unknown, missing or there twice,
            or a class isn't a whole number from 0; the text names file and line.
    """
    path = usable_path(path)
    columns = ("image", "clean", "marked") if key is not None else ("image", "clean", "marked", "label")
    answers = _read(path, columns, "" if key is not None else _NO_LABELS)
    rows = answers if key is None else _read(usable_path(key), ("image", "label"))
    labels = {name: row["label"] for name, row in rows.items()}
    for name in answers:
        if name not in labels:
            raise InputError(f"{path}: image {name!r} isn't in {key}; answer the images that were handed out")
    missing = [name for name in labels if name not in answers]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{path}: no row for image {missing[0]!r}{more}; every image of {key} needs an answer")
    return Answers(
        torch.tensor(list(labels.values())),
        torch.tensor([answers[name]["clean"] for name in labels]),
        torch.tensor([answers[name]["marked"] for name in labels]),
    )


def _read(path: Path, columns: tuple[str, ...], without_labels: str = "") -> dict[str, dict[str, int]]:
    """Return the numbers of each row by image; a text says what is wrong where the labels alone are missing."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = [(lines.line_num, row) for row in lines if row]
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}); check the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: isn't a CSV file in UTF-8 ({error})") from error
    wanted = ", ".join(columns)
    header = [name.strip() for name in rows[0][1]] if rows else []
    if without_labels and sorted([*header, "label"]) == sorted(columns):
        raise InputError(f"{path}: line 1: {without_labels}")
    if sorted(header) != sorted(columns):
        raise InputError(f"{path}: line 1: has the columns {', '.join(header) or 'none'}; {wanted} are needed")
    if len(rows) < 2:
        raise InputError(f"{path}: has no rows; one for each image is needed")
    found: dict[str, dict[str, int]] = {}
    for line, row in rows[1:]:
        where = f"{path}: line {line}"
        if len(row) != len(header):
            raise InputError(f"{where}: has {len(row)} values; {len(header)} are needed ({wanted})")
        values = dict(zip(header, (value.strip() for value in row), strict=True))
        name = values.pop("image")
        if name in found:
            raise InputError(f"{where}: image {name!r} is there twice; one row for each image is needed")
        found[name] = _numbers(values, where)
    return found


def _numbers(values: Mapping[str, str], where: str) -> dict[str, int]:
    for column, value in values.items():
        if not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise InputError(f"{where}: {column} is {value!r:.40}; a class, a whole number from 0, is needed")
    return {column: int(value) for column, value in values.items()}


def _png(pixels: Tensor) -> bytes:
    """Encode one image uint8 (C, H, W)."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).contiguous().cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(buffer, format="PNG")
    return buffer.getvalue()


def _table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()
