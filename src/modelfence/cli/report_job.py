"""What ``modelfence report`` does: reads the output folder of a run and draws it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from modelfence.artifact import read_history, read_report, read_synthetic
from modelfence.cli.measured import measured_by
from modelfence.cli.parts import load_test
from modelfence.cli.runfile import Run, parse_toml, read_run
from modelfence.errors import InputError
from modelfence.evaluation.result import Evaluation
from modelfence.models.load import load_model
from modelfence.report.page import write_report
from modelfence.report.sheets import Sheets
from modelfence.results import RUN

_SAMPLES = 8


def make_report(folder: Path, *, samples: bool = False, title: str | None = None) -> Path:
    """Write ``report/report.html`` and ``report/figures/`` of a finished run.

    Args:
        folder: The run's output folder.
        samples: Show images of the run's domains, which must be at hand.
        title: Heading; by default it names the authorized domains.

    Returns:
        The path of the page.

    Raises:
        ArtifactError: A file of the folder is missing or altered.
        InputError: The run measured nothing, or a domain can't be had.
    """
    report = read_report(folder)
    if "method" not in report:
        raise InputError(f"{folder}: isn't the output of modelfence protect; name such a folder")
    recorded = report.get("evaluation")
    table = None if recorded is None else Evaluation.from_dict(recorded)
    names = ", ".join(score.name for score in table.authorized) if table is not None else ""
    run = read_run(folder / RUN)
    return write_report(
        folder / "report",
        evaluation=table,
        layers=[(str(name), int(kept), int(total)) for name, kept, total in report.get("mask", {}).get("layers", [])],
        history=read_history(folder),
        agreement=report.get("agreement", {}),
        samples=_images(folder, run) if samples else None,
        synthetic=_synthetic(folder, report),
        warnings=report["warnings"],
        config=parse_toml(folder / RUN),
        title=title or (f"A model confined to {names}" if names else "A confined model"),
        masked="mask" in report,
    )


def _synthetic(folder: Path, report: Mapping[str, Any]) -> Sheets | None:
    """Return what there is to show of a run's synthetic images."""
    samples = read_synthetic(folder)
    if not samples:
        return None
    record = report.get("synthetic", {})
    return Sheets(dict(samples), record.get("parts", {}), record.get("class_names"))


def _images(folder: Path, run: Run) -> dict[str, Tensor]:
    """Load a few images of every domain of a run, uint8 (N, C, H, W) by name."""
    spec = run.image or load_model(folder).image
    shown = {}
    for name, text in measured_by(run).domains.items():
        batch = next(iter(load_test(name, text, spec, labels=False).once(_SAMPLES, limit=_SAMPLES)))
        shown[name] = spec.denormalize(batch.images)
    return shown
