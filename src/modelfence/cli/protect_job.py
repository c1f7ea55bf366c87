"""What ``modelfence protect`` does: model and data, mask, measurement, output folder."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelfence.artifact import Artifact, peak_memory_mib, read_report, write_artifact
from modelfence.cli.console import Advance, Console
from modelfence.cli.engine import is_first, joined_fabric
from modelfence.cli.marks import require_free_names
from modelfence.cli.measured import measured_by
from modelfence.cli.output import Output, refuse_inside
from modelfence.cli.protect_data import RunData, load_data
from modelfence.cli.reference import load
from modelfence.cli.runfile import Run
from modelfence.cli.tables import DataTable
from modelfence.errors import InputError, Interrupted
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.table import evaluate
from modelfence.files import output_folder, usable_path
from modelfence.methods.config import LearnConfig, MaskConfig
from modelfence.methods.loop import WARNING
from modelfence.methods.registry import Method, method_for
from modelfence.models.load import WEIGHTS_FILE, LoadedModel
from modelfence.protect import Protection, protect
from modelfence.report.proxies import agreement_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TABLES = ("model", "image", "data", "method", "watermark", "key", "evaluate", "output")


def protect_model(run: Run, console: Console, *, resume: bool = False, force: bool = False) -> dict[str, Any]:
    """Learn a mask, measure it and write the output folder.

    Args:
        run: Needs model, output, and the domains of the method.
        console: Where progress goes.
        resume: Go on with the run in the folder; one that is finished is left as it is.
        force: Replace what is in the folder, once the new result is complete.

    Returns:
        The content of ``report.json``; empty in all but the first of several processes.

    Raises:
        InputError: Something is missing or doesn't fit; nothing was written or replaced.
        NonFiniteError: The loss became NaN or infinite.
        Interrupted: Stopped by the user after the state was saved.
    """
    if run.output is None:
        raise InputError("protect: output.folder: is missing; give it in a run file or as --output")
    method, config = _method(run)
    if resume and force:
        raise InputError("--resume goes on and --force starts anew: give one of them")
    folder = usable_path(run.output.folder)
    _keep_base(run, folder)
    for place in (folder, *([usable_path(run.output.cache)] if run.output.cache else [])):
        refuse_inside(place, measured_by(run).domains.values())
    run = replace(run, method=config)
    fabric = joined_fabric(config.precision)
    first = is_first(fabric)
    with output_folder(folder, force=force, resume=resume) if first else contextlib.nullcontext():
        output = Output(folder, run.tables(*_TABLES), resume=resume, writes=first)
        if output.finished:
            console.note(f"{output.folder}: is finished; nothing to do")
            return read_report(output.folder)
        if resume and output.new:
            console.note(f"{output.folder}: there is no run to go on with yet; starting it")
        try:
            return _run(run, method, config, output, console, fabric)
        except Interrupted as error:
            output.begin(state_saved=True)
            raise Interrupted(str(error).replace(str(output.work), str(output.folder))) from error
        except KeyboardInterrupt as error:
            if not output.begun:
                raise
            raise Interrupted(f"stopped; what was done is in {output.folder}: go on with --resume") from error


def _method(run: Run) -> tuple[Method, LearnConfig]:
    """Return the method of a run; refuse one that the domains don't fit."""
    data = run.data or DataTable()
    given = {
        "authorized": data.authorized is not None,
        "unauthorized": data.unauthorized is not None,
    }
    if run.marked and data.authorized is None:
        table = "key" if run.watermark is None else "watermark"
        raise InputError(f"protect: {table}: the authorized images get the mark; give data.authorized too")
    require_free_names(run, measured_by(run).domains)
    return method_for(run.method, given, marked=run.marked)


def _run(
    run: Run, method: Method, config: LearnConfig, output: Output, console: Console, fabric: "Fabric | None"
) -> dict[str, Any]:
    """Load, learn, measure and write; return the content of ``report.json``."""
    loaded = load(run.model, run.image, "protect")
    if loaded.classes < 2:
        raise InputError(f"model {loaded.reference!r} has 1 class; a classifier of at least 2 can be confined")
    data = load_data(run, loaded, labels=method.labels, note=console.note)
    config = config.for_network(loaded.model)
    learning, protection = _learn(run, loaded, data, config, output, console, fabric)
    if not is_first(fabric):
        return {}
    measuring, table = _measure(loaded, protection, data, run, console)
    tables = run.data or DataTable()
    artifact = Artifact(
        model=protection.model,
        mask=protection.mask,
        masks=protection.masks,
        history=protection.history,
        config=config,
        origin=loaded,
        evaluation=table,
        synthetic=protection.synthetic,
        warnings=(*protection.warnings, *data.warnings),
        facts={
            "authorized": list(tables.authorized or {}),
            "unauthorized": list(tables.unauthorized or {}),
            "agreement": agreement_of(protection.measured),
            **{
                name: mark.to_dict()
                for name, mark in (("watermark", run.watermark), ("key", run.key))
                if mark is not None
            },
            "seconds": {"learning": round(learning, 1), "measuring": round(measuring, 1)},
            "peak_memory_mib": peak_memory_mib(),
        },
    )
    return write_artifact(output.folder, artifact)


def _keep_base(run: Run, folder: Path) -> None:
    """Refuse to write over the only copy of the base: without it the mask can't be used."""
    for given in (run.model.path, run.model.weights) if run.model is not None else ():
        if given is not None and Path(given).resolve() in (folder.resolve(), (folder / WEIGHTS_FILE).resolve()):
            raise InputError(f"{folder}: the output folder holds the model to be masked; name another output folder")


def _learn(
    run: Run,
    loaded: LoadedModel,
    data: RunData,
    config: LearnConfig,
    output: Output,
    console: Console,
    fabric: "Fabric | None",
) -> tuple[float, Protection]:
    """Learn the mask, or retrain; return the seconds it took and the result."""
    start = time.monotonic()
    each = isinstance(config, MaskConfig) and config.masks == "one_each"
    marks = {"the images without the key": run.key, "the watermark": run.watermark}
    names = [*data.unauthorized, *(name for name, mark in marks.items() if mark is not None)]
    against = ", ".join(names) if len(names) <= 2 else f"{len(names)} domains"
    what = "learning a mask" if isinstance(config, MaskConfig) else "retraining the model"

    def say(text: str) -> None:
        if not text.startswith(WARNING):  # images are about to be kept; a refusal may still follow a warning
            output.begin()
        console.note(f"  {text}")

    steps = config.steps * (len(names) if each else 1)
    with console.progress(f"{what} against {against or 'synthesized images'}", steps) as advance:
        protection = protect(
            loaded.model,
            authorized=data.authorized,
            unauthorized=data.unauthorized or None,
            image=loaded.image,
            method=config,
            ownership=run.watermark,
            key=run.key,
            watch=data.watch or None,
            output=output.work,
            resume=output.resume,
            cache=run.output.cache if run.output else None,
            progress=_reporter(output, advance, config.steps),
            announce=say,
            fabric=fabric,
        )
    return time.monotonic() - start, protection


def _reporter(output: Output, advance: Advance, steps: int) -> Callable[[Mapping[str, float]], None]:
    """Return what is told each row of the history: it begins the output folder and moves the progress bar."""
    done = {"before": 0.0, "last": 0.0}

    def report(row: Mapping[str, float]) -> None:
        output.begin()
        if row["step"] <= done["last"]:  # the next of several masks
            done["before"] += steps
        done["last"] = row["step"]
        advance(done["before"] + row["step"], _line(row))

    return report


def _measure(
    loaded: LoadedModel, protection: Protection, data: RunData, run: Run, console: Console
) -> tuple[float, Evaluation | None]:
    """Measure both models on the test images; return the seconds it took and the table, if there are such images."""
    start = time.monotonic()
    if not data.tests:
        return 0.0, None
    console.note("measuring both models on the test images")
    table = evaluate(
        protection.model,
        data.tests,
        before=loaded.model,
        authorized=list(data.roles),
        limit=run.evaluate.limit,
        batch_size=run.evaluate.batch_size,
        refresh_images=run.evaluate.refresh_images,
        precision=run.evaluate.precision,
        device="cuda" if torch.cuda.is_available() else None,
    )
    return time.monotonic() - start, table


_SAID = {
    "source_accuracy": "authorized",
    "target_accuracy": "",
    "watch": "watched",
    "source_agreement": "agreement near the source",
    "target_agreement": "on",
}


def _line(row: Mapping[str, float]) -> str:
    """Say how a run stands: loss, accuracies, what is watched, and agreement with the original where it stands in."""
    parts = [f"loss {row['loss']:.3f}"]
    for key, value in row.items():
        kind, _, name = key.partition(":")
        if kind in _SAID:
            parts.append(f"{_SAID[kind]} {name} {100 * value:.1f} %".replace("  ", " ").strip())
    kept = [f"kept {100 * row['kept']:.2f} %"] if "kept" in row else []
    return "  ".join([*parts, *kept, f"{row['seconds']:.0f} s"])
