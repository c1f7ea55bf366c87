"""What ``modelfence demo`` does: train, protect and report on built-in domains, and say what came out."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from modelfence.cli.console import Console
from modelfence.cli.protect import warnings_of
from modelfence.cli.protect_job import protect_model
from modelfence.cli.reference import image_option
from modelfence.cli.report_job import make_report
from modelfence.cli.runfile import Run, read_run
from modelfence.cli.train_job import train_model
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent
from modelfence.files import output_folder, usable_path

_AUTHORIZED, _UNAUTHORIZED = "sklearn_digits", ["photo_digits", "font_digits"]
_EVERY = [_AUTHORIZED, *_UNAUTHORIZED]
_SOURCE = {
    "model.name": "small_vgg_bn",
    "image": image_option(32),
    "train.epochs": 20,
    "train.batch_size": 32,
    "train.learning_rate": 2e-3,
}
# Harder on the targets than the default recipes, which are made for larger networks and more images.
_MASKS: Mapping[str, Mapping[str, Any]] = {
    "source-available": {
        "data.authorized": _AUTHORIZED,
        "data.unauthorized": _UNAUTHORIZED,
        "method.steps": 400,
        "method.learning_rate": 3e-4,
        "method.limit": 2.5,
    },
    "source-free": {
        "data.unauthorized": _UNAUTHORIZED,
        "data.watch": _EVERY,
        "evaluate.authorized": _AUTHORIZED,
        "method.steps": 300,
        "method.generated": 1024,
        "method.translated": 1024,
        "method.restyled": 1024,
        "method.generator_steps": 150,
    },
    "data-free": {
        "data.watch": _EVERY,
        "evaluate.authorized": _AUTHORIZED,
        "method.steps": 200,
        "method.learning_rate": 5e-4,
        "method.source_weight": 2.0,
        "method.generated": 1024,
        "method.translated": 1024,
        "method.generator_steps": 60,
        "method.drawings": 1024,
        "method.neighbours": 4096,
    },
}
_LITTLE = 0.25  # closure below which a mask is said to achieve little


def run_demo(
    output: str, console: Console, *, setting: str = "source-available", force: bool = False
) -> tuple[str, dict[str, Any]]:
    """Run the demo.

    Args:
        output: The output folder; ``source`` and ``protected`` are made in it.
        console: Where progress goes.
        setting: "source-available", "source-free" or "data-free".
        force: Replace an earlier demo.

    Returns:
        What to tell a person, and the content of the protected model's ``report.json``.

    Raises:
        InputError: The folder isn't empty.
    """
    with output_folder(usable_path(output), force=force) as folder, _one_thread():
        report = _job(folder, console, setting, force=force)
    table = Evaluation.from_dict(report["evaluation"])
    cut = report["mask"]["cut_share"]
    lines = [str(table), "", *_numbers(table, setting, cut), *warnings_of(report), "", *_files(folder, report)]
    return "\n".join(lines), report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the network is too small for more, and the numbers don't depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _job(folder: Path, console: Console, setting: str, *, force: bool) -> dict[str, Any]:
    """Train, protect and report; return the content of the protected model's ``report.json``."""
    source, protected = folder / "source", folder / "protected"
    console.note("1 of 3: a source model, which is what an owner has")
    train_model(_run(source, {"data.authorized": _AUTHORIZED, **_SOURCE}), console, force=force)
    console.note(f"2 of 3: a mask, which the owner adds before shipping ({setting}: learned from {_FROM[setting]})")
    report = protect_model(_run(protected, {"model.path": str(source), **_MASKS[setting]}), console, force=force)
    console.note("3 of 3: a report")
    make_report(protected, samples=True, title="modelfence demo: handwritten digits only")
    return report


_FROM = {
    "source-available": "labelled images of all three domains",
    "source-free": "the model and unlabelled images of the unauthorized domains",
    "data-free": "the model alone",
}


def _run(folder: Path, settings: Mapping[str, Any]) -> Run:
    """Return a run of the demo that writes to a folder."""
    tables = {**settings, "output.folder": str(folder)}
    return read_run(None, options={key: ("demo", value) for key, value in tables.items()})


def _numbers(table: Evaluation, setting: str, cut_share: float) -> list[str]:
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
        if score.role == "unauthorized" and score.closure < _LITTLE:
            lines.append(
                f"    The mask achieves little here: {percent(score.closure)} % of what was above guessing is gone."
            )
    if setting != "source-available":
        lines += [
            f"  The mask was learned from {_FROM[setting]};",
            "  labels were used to measure it, and for nothing else.",
        ]
    return [
        *lines,
        f"  Guessing gives {percent(table.chance)} %. The mask sets {percent(cut_share)} % of the weights to zero.",
        "  This is a demonstration: one seed, and settings chosen on these very domains. A mask is no lock: whoever",
        "  has labelled images and time can retrain the model.",
    ]


def _files(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Say what the files are."""
    protected = folder / "protected"
    files = [
        (protected / "model.safetensors", "what an owner ships: an ordinary checkpoint of the same network"),
        (protected / "mask", "the owner's record: which weights were cut; never shipped"),
        (protected / "README.md", "the model card"),
        (protected / "report" / "report.html", "the report: open it in a browser; its figures are beside it"),
        (folder / "source", "the model before the mask"),
    ]
    if "synthetic" in report:
        files.insert(3, (protected / "synthetic", "some of the images that were synthesized, with what the model sees"))
    width = max(len(str(path)) for path, _ in files)
    again = f"modelfence evaluate {protected} {' '.join(_EVERY)} --before {folder / 'source'}"
    return [
        "What the files are",
        *[f"  {path!s:{width}}  {meaning}" for path, meaning in files],
        "",
        "To measure again",
        f"  {again}",
    ]
