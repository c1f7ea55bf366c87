"""What ``modelfence demo`` does: train, protect and report on built-in domains, and say what came out."""

from pathlib import Path
from typing import Any

from modelfence.cli.console import Console
from modelfence.cli.protect_job import protect_model
from modelfence.cli.report_job import make_report
from modelfence.cli.runfile import read_run
from modelfence.cli.train_job import train_model
from modelfence.evaluation.result import Evaluation
from modelfence.files import prepare_output

_IMAGE = {"channels": 3, "height": 32, "width": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
_AUTHORIZED = "sklearn_digits"
_UNAUTHORIZED = ["photo_digits", "font_digits"]


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
    folder = prepare_output(Path(output), force=force)
    source, protected = folder / "source", folder / "protected"
    console.note("1/3  a source model: what an owner has")
    train_model(_run(source, {"model.name": "small_vgg_bn", "image": _IMAGE, "train.epochs": 12}), console, force=force)
    console.note("2/3  a mask: what the owner adds before shipping")
    run = _run(protected, {"model.path": str(source), "data.unauthorized": _UNAUTHORIZED})
    report = protect_model(run, console, force=force)
    console.note("3/3  a report")
    page = make_report(protected, samples=True, title="modelfence demo: digits confined to one look")
    return _told(Evaluation.from_dict(report["evaluation"]), report, folder, page), report


def _run(folder: Path, settings: dict[str, Any]) -> Any:
    """Return a run of the demo that writes to a folder."""
    tables = {"data.authorized": _AUTHORIZED, **settings, "output.folder": str(folder)}
    return read_run(None, options={key: ("demo", value) for key, value in tables.items()})


def _told(table: Evaluation, report: dict[str, Any], folder: Path, page: Path) -> str:
    """Say in plain words what the numbers show and what the files are."""
    return str(table)
