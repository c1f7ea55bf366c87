"""What ``modelfence demo`` does: train, protect and report on built-in domains, and say what came out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from modelfence.cli.console import Console
from modelfence.cli.protect_job import protect_model
from modelfence.cli.reference import image_option
from modelfence.cli.report_job import make_report
from modelfence.cli.runfile import Run, read_run
from modelfence.cli.train_job import train_model
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent
from modelfence.files import output_folder, usable_path

_AUTHORIZED, _UNAUTHORIZED = "sklearn_digits", ["photo_digits", "font_digits"]
_SOURCE = {
    "model.name": "small_vgg_bn",
    "image": image_option(32),
    "train.epochs": 20,
    "train.batch_size": 32,
    "train.learning_rate": 2e-3,
}
# Harder on the targets than the default recipe, which is made for larger networks and more images.
_MASK = {
    "data.unauthorized": _UNAUTHORIZED,
    "method.steps": 400,
    "method.learning_rate": 3e-4,
    "method.limit": 2.5,
}


def run_demo(output: str, console: Console, *, force: bool = False) -> tuple[str, dict[str, Any]]:
    """Run the demo.

    Args:
        output: The output folder; ``source`` and ``protected`` are made in it.
        console: Where progress goes.
        force: Replace an earlier demo.

    Returns:
        What to tell a person, and the content of the protected model's ``report.json``.

    Raises:
        InputError: The folder isn't empty.
    """
    with output_folder(usable_path(output), force=force) as folder, _one_thread():
        report = _job(folder, console, force=force)
    table = Evaluation.from_dict(report["evaluation"])
    return "\n".join([str(table), "", *_numbers(table, report["mask"]["cut_share"]), "", *_files(folder)]), report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the network is too small for more, and the numbers don't depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _job(folder: Path, console: Console, *, force: bool) -> dict[str, Any]:
    """Train, protect and report; return the content of the protected model's ``report.json``."""
    source, protected = folder / "source", folder / "protected"
    console.note("1 of 3: a source model, which is what an owner has")
    train_model(_run(source, _SOURCE), console, force=force)
    console.note("2 of 3: a mask, which the owner adds before shipping")
    report = protect_model(_run(protected, {"model.path": str(source), **_MASK}), console, force=force)
    console.note("3 of 3: a report")
    make_report(protected, samples=True, title="modelfence demo: handwritten digits only")
    return report


def _run(folder: Path, settings: dict[str, Any]) -> Run:
    """Return a run of the demo that writes to a folder."""
    tables = {"data.authorized": _AUTHORIZED, **settings, "output.folder": str(folder)}
    return read_run(None, options={key: ("demo", value) for key, value in tables.items()})


def _numbers(table: Evaluation, cut_share: float) -> list[str]:
    """Say in plain words what the numbers show."""
    lines = ["What the numbers show"]
    for score in table.scores:
        kind = "its owner authorized" if score.role == "authorized" else "its owner did not authorize"
        before = percent(score.before.accuracy if score.before else None)
        lines.append(
            f"  {score.name}, a domain {kind}: {before} % right before the mask, {percent(score.accuracy)} % after."
        )
        if score.role == "unauthorized" and score.refreshed_accuracy is not None:
            back = percent(score.refreshed_accuracy)
            lines.append(f"    Whoever re-estimates BatchNorm statistics on unlabelled images of it gets {back} %.")
    return [
        *lines,
        f"  Guessing gives {percent(table.chance)} %. The mask sets {percent(cut_share)} % of the weights to zero.",
        "  This is a demonstration: one seed, and settings chosen on these very domains. A mask is no lock: whoever",
        "  has labelled images and time can retrain the model.",
    ]


def _files(folder: Path) -> list[str]:
    """Say what the files are."""
    protected = folder / "protected"
    files = [
        (protected / "model.safetensors", "what an owner ships: an ordinary checkpoint of the same network"),
        (protected / "mask", "the owner's record: which weights were cut; never shipped"),
        (protected / "README.md", "the model card"),
        (protected / "report" / "report.html", "the report: open it in a browser; its figures are beside it"),
        (folder / "source", "the model before the mask"),
    ]
    width = max(len(str(path)) for path, _ in files)
    again = f"modelfence evaluate {protected} {' '.join([_AUTHORIZED, *_UNAUTHORIZED])} --before {folder / 'source'}"
    return [
        "What the files are",
        *[f"  {path!s:{width}}  {meaning}" for path, meaning in files],
        "",
        "To measure again",
        f"  {again}",
    ]
