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
from modelfence.cli.output import Output, refuse_inside
from modelfence.cli.parts import Parts, check_class_names, load_parts
from modelfence.cli.reference import load
from modelfence.cli.runfile import Run
from modelfence.errors import InputError, Interrupted
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.table import evaluate
from modelfence.files import output_folder, usable_path
from modelfence.methods.config import MaskConfig
from modelfence.methods.registry import method_for
from modelfence.models.load import WEIGHTS_FILE, LoadedModel
from modelfence.protect import Protection, protect

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_TABLES = ("model", "image", "data", "method", "evaluate", "output")


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
    given = {name: run.data is not None and bool(getattr(run.data, name)) for name in ("authorized", "unauthorized")}
    _, config = method_for(run.method, given)
    if not all(given.values()):
        missing = " and ".join(f"data.{name}" for name, there in given.items() if not there)
        raise InputError(
            f"protect: {missing} is missing; the command line learns from both domains, the settings without one are "
            "in Python so far: modelfence.protect"
        )
    if resume and force:
        raise InputError("--resume goes on and --force starts anew: give one of them")
    folder = usable_path(run.output.folder)
    _keep_base(run, folder)
    refuse_inside(folder, run.data.named.values() if run.data else ())
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
            return _run(run, config, output, console, fabric)
        except Interrupted as error:
            output.begin(state_saved=True)
            raise Interrupted(str(error).replace(str(output.work), str(output.folder))) from error
        except KeyboardInterrupt as error:
            if not output.begun:
                raise
            raise Interrupted(f"stopped; what was done is in {output.folder}: go on with --resume") from error


def _run(run: Run, config: MaskConfig, output: Output, console: Console, fabric: "Fabric | None") -> dict[str, Any]:
    """Load, learn, measure and write; return the content of ``report.json``."""
    loaded = load(run.model, run.image, "protect")
    if loaded.classes < 2:
        raise InputError(f"model {loaded.reference!r} has 1 class; a classifier of at least 2 can be confined")
    authorized, unauthorized = _domains(run, loaded, console)
    learning, protection = _learn(loaded, authorized, unauthorized, config, output, console, fabric)
    if not is_first(fabric):
        return {}
    measuring, table = _measure(loaded, protection, {**authorized, **unauthorized}, run, console)
    artifact = Artifact(
        model=protection.model,
        mask=protection.mask,
        masks=protection.masks,
        history=protection.history,
        config=config,
        origin=loaded,
        evaluation=table,
        facts={
            "authorized": list(authorized),
            "unauthorized": list(unauthorized),
            "seconds": {"learning": round(learning, 1), "measuring": round(measuring, 1)},
            "peak_memory_mib": peak_memory_mib(),
        },
    )
    return write_artifact(output.folder, artifact)


def _domains(run: Run, loaded: LoadedModel, console: Console) -> tuple[dict[str, Parts], dict[str, Parts]]:
    """Load the authorized and the unauthorized domains of a run, by name."""
    data = run.data
    assert data is not None  # noqa: S101 (for the type checker: the method has its domains)
    found: list[dict[str, Parts]] = []
    for named in (data.authorized or {}, data.unauthorized or {}):
        parts = {}
        for name, text in named.items():
            console.note(f"loading {name}")
            parts[name] = load_parts(name, text, data, loaded.image, loaded.classes)
        found.append(parts)
    tests = [parts.test for group in found for parts in group.values()]
    check_class_names(tests, loaded.extra.get("class_names"))
    return found[0], found[1]


def _keep_base(run: Run, folder: Path) -> None:
    """Refuse to write over the only copy of the base: without it the mask can't be used."""
    for given in (run.model.path, run.model.weights) if run.model is not None else ():
        if given is not None and Path(given).resolve() in (folder.resolve(), (folder / WEIGHTS_FILE).resolve()):
            raise InputError(f"{folder}: the output folder holds the model to be masked; name another output folder")


def _learn(
    loaded: LoadedModel,
    authorized: Mapping[str, Parts],
    unauthorized: Mapping[str, Parts],
    config: MaskConfig,
    output: Output,
    console: Console,
    fabric: "Fabric | None",
) -> tuple[float, Protection]:
    """Learn the mask; return the seconds it took and the result."""
    start = time.monotonic()
    targets = {name: parts.train for name, parts in unauthorized.items()}
    runs = len(targets) if config.masks == "one_each" else 1
    against = ", ".join(targets) if len(targets) <= 2 else f"{len(targets)} domains"
    with console.progress(f"learning a mask against {against}", config.steps * runs) as advance:
        protection = protect(
            loaded.model,
            authorized=next((parts.train for parts in authorized.values()), None),
            unauthorized=targets or None,
            image=loaded.image,
            method=config,
            output=output.work,
            resume=output.resume,
            progress=_reporter(output, advance, config.steps),
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
    loaded: LoadedModel, protection: Protection, domains: Mapping[str, Parts], run: Run, console: Console
) -> tuple[float, Evaluation]:
    """Measure both models on the test images; return the seconds it took and the table."""
    start = time.monotonic()
    console.note("measuring both models on the test images")
    table = evaluate(
        protection.model,
        {name: parts.test for name, parts in domains.items()},
        before=loaded.model,
        authorized=list((run.data.authorized if run.data else None) or {}),
        limit=run.evaluate.limit,
        batch_size=run.evaluate.batch_size,
        refresh_images=run.evaluate.refresh_images,
        precision=run.evaluate.precision,
        device="cuda" if torch.cuda.is_available() else None,
    )
    return time.monotonic() - start, table


def _line(row: Mapping[str, float]) -> str:
    parts = [f"loss {row['loss']:.3f}"]
    for key, value in row.items():
        kind, _, name = key.partition(":")
        if kind in ("source_accuracy", "target_accuracy"):
            parts.append(f"{name or 'authorized'} {100 * value:.1f} %")
    return "  ".join([*parts, f"kept {100 * row['kept']:.2f} %", f"{row['seconds']:.0f} s"])
