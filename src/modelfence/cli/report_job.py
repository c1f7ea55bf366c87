"""What ``modelfence report`` does: reads the output folder of a run and draws it."""

from pathlib import Path

from torch import Tensor

from modelfence.artifact import read_history, read_report
from modelfence.cli.parts import load_test
from modelfence.cli.runfile import parse_toml, read_run
from modelfence.errors import InputError
from modelfence.evaluation.result import Evaluation
from modelfence.models.load import load_model
from modelfence.report.page import write_report
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
    if not isinstance(report.get("evaluation"), dict) or "mask" not in report:
        raise InputError(f"{folder}: isn't the output of modelfence protect; name such a folder")
    table = Evaluation.from_dict(report["evaluation"])
    names = ", ".join(score.name for score in table.authorized)
    return write_report(
        folder / "report",
        evaluation=table,
        layers=[(str(name), int(kept), int(total)) for name, kept, total in report["mask"]["layers"]],
        history=read_history(folder),
        samples=_images(folder) if samples else None,
        config=parse_toml(folder / RUN),
        title=title or f"A model confined to {names}",
    )


def _images(folder: Path) -> dict[str, Tensor]:
    """Load a few images of every domain of a run, uint8 (N, C, H, W) by name."""
    run = read_run(folder / RUN)
    spec = run.image or load_model(folder).image
    shown = {}
    for name, text in (run.data.named if run.data else {}).items():
        batch = next(iter(load_test(name, text, spec).once(_SAMPLES, limit=_SAMPLES)))
        shown[name] = spec.denormalize(batch.images)
    return shown
