"""What ``modelfence train`` does: data, network, epochs, folder."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelfence.artifact import FORMAT, machine, peak_memory_mib
from modelfence.cli.console import Console
from modelfence.cli.engine import is_first, joined_fabric
from modelfence.cli.output import refuse_inside
from modelfence.cli.parts import load_parts
from modelfence.cli.reference import image_option, load, load_untrained
from modelfence.cli.runfile import Run, write_toml
from modelfence.cli.tables import DataTable, ModelTable
from modelfence.data.class_names import without_images
from modelfence.data.domain import IndexedDomain, check_labels
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.evaluation.table import evaluate
from modelfence.files import atomic_write, output_folder, sealed, usable_path
from modelfence.methods.loop import WARNING
from modelfence.models.load import LoadedModel, save_model
from modelfence.models.training import train
from modelfence.results import REPORT, RUN, refuse_foreign, replacing

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TABLES = ("model", "image", "data", "train", "evaluate", "output")


def train_model(run: Run, console: Console, *, force: bool = False) -> dict[str, Any]:
    """Train a source model and write it to the output folder.

    Args:
        run: Needs model, data.authorized and output.
        console: Where progress goes.
        force: Replace what is in the folder.

    Returns:
        The content of ``report.json``; empty in all but the first of several processes.

    Raises:
        InputError: Something is missing or doesn't fit; nothing was written.
        NonFiniteError: The loss became NaN or infinite.
    """
    if run.model is None:
        raise InputError("train: model: is missing; give a table [model] or --network")
    if run.data is None or run.data.authorized is None:
        raise InputError("train: data.authorized: is missing; give it in a run file or as --domain")
    if run.output is None:
        raise InputError("train: output.folder: is missing; give it in a run file or as --output")
    folder = usable_path(run.output.folder)
    refuse_inside(folder, run.data.authorized.values())
    fabric = joined_fabric(run.train.precision)
    with output_folder(folder, force=force) if is_first(fabric) else contextlib.nullcontext():
        refuse_foreign(folder)
        return _train(run, run.model, run.data, folder, console, fabric)


def _train(
    run: Run, model: ModelTable, data: DataTable, folder: Path, console: Console, fabric: "Fabric | None"
) -> dict[str, Any]:
    """Load, train, measure and write; return the content of ``report.json``, its digest aside."""
    saved = load(model, run.image, "train") if model.path is not None else None
    image = saved.image if saved else run.image or ImageSpec(**(image_option(32) or {}))
    ((name, text),) = (data.authorized or {}).items()
    console.note(f"loading {name}")
    parts = load_parts(name, text, data, image, saved.classes if saved else model.classes)
    torch.manual_seed(run.train.seed)
    loaded = saved or load_untrained(model, image, model.classes or _classes(parts.train))
    for part in (parts.train, parts.validation, parts.test):
        if part.labels is not None:
            check_labels(part.labels, name, count=loaded.classes)
    for lacking in without_images(parts.train):
        console.note(f"  {WARNING}{name} has no training image of class {lacking!r}, which can't be learned")
    with console.progress(f"training {loaded.reference} on {len(parts.train):,} images", run.train.epochs) as advance:
        history = train(
            loaded.model,
            parts.train,
            parts.validation,
            run.train,
            fabric=fabric,
            progress=lambda row: advance(row["epoch"], _line(row)),
        )
    if not is_first(fabric):
        return {}
    table = evaluate(
        loaded.model,
        {name: parts.test},
        limit=run.evaluate.limit,
        batch_size=run.evaluate.batch_size,
        precision=run.evaluate.precision,
    )
    report = {
        "format": FORMAT,
        "domain": name,
        "images": {"train": len(parts.train), "validation": len(parts.validation), "test": table.scores[0].images},
        "test_accuracy": table.scores[0].accuracy,
        "evaluation": table.to_dict(),
        "history": history,
        "peak_memory_mib": peak_memory_mib(),
        "machine": machine(),
    }
    _write(folder, loaded, parts.train.classes, run, report)
    return report


def _write(
    folder: Path, loaded: LoadedModel, class_names: tuple[str, ...] | None, run: Run, report: Mapping[str, Any]
) -> None:
    with replacing(folder) as staged:
        save_model(
            staged,
            loaded.model,
            reference=loaded.reference,
            args=loaded.args,
            classes=loaded.classes,
            image=loaded.image,
            extra={"domain": report["domain"], "class_names": list(class_names or ())},
        )
        atomic_write(staged / RUN, write_toml(replace(run, image=loaded.image).tables(*_TABLES)))
        atomic_write(staged / REPORT, json.dumps(sealed(report), indent=1, allow_nan=False) + "\n")


def _classes(domain: IndexedDomain) -> int:
    """Return the number of classes that a domain's names or labels tell."""
    if domain.classes is not None:
        return len(domain.classes)
    if domain.labels is None:
        raise InputError(f"domain {domain.name!r} has no labels; training needs them")
    return int(domain.labels.max()) + 1


def _line(row: Mapping[str, float]) -> str:
    return (
        f"loss {row['loss']:.3f}  validation accuracy {100 * row['validation_accuracy']:.1f} %  {row['seconds']:.0f} s"
    )
