"""``modelfence protect``: a mask, and the confined model."""

from pathlib import Path
from typing import Any

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="protect", short_help="Learn a mask, and write the confined model.")
@click.argument("run_file", metavar="[RUN.toml]", required=False)
@click.option("--model", help="A saved folder, a network of the zoo or of timm, or package.module:factory.")
@options.model_options
@click.option("--authorized", metavar="DOMAIN", help="Where it shall go on working.")
@click.option("--unauthorized", metavar="DOMAIN", multiple=True, help="Where it shall fail; may be given again.")
@click.option(
    "--watch", metavar="DOMAIN", multiple=True, help="Labelled; measured and never learned from; may be given again."
)
@click.option("--method", metavar="NAME", help="SAMap, SFMap, DFMap, ...; by default the domains choose it.")
@options.output
@click.option("--cache", metavar="FOLDER", help="Where synthetic images are kept for other runs with the same model.")
@options.sets
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@options.force
@options.as_json
def command(
    run_file: str | None,
    model: str | None,
    weights: str | None,
    classes: int | None,
    image_size: int | None,
    authorized: str | None,
    unauthorized: tuple[str, ...],
    watch: tuple[str, ...],
    method: str | None,
    output: str | None,
    cache: str | None,
    sets: tuple[str, ...],
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Learn a mask that confines a model, and write the confined model.

    The settings come from a run file, from options, or from both; options go before the file. A run that was stopped or
    killed goes on with --resume to the same mask.

    The domains given make the setting: both; the unauthorized one alone, whose labels aren't looked at; the authorized
    one alone; or none. --watch measures a labelled domain that isn't learned from, such as the source in those.

    \b
    modelfence protect run.toml
    modelfence protect --model sl/ --authorized mnist --unauthorized usps --output out/
    modelfence protect --model sl/ --unauthorized usps --watch mnist --watch usps --output out/
    modelfence protect --model sl/ --output out/
    modelfence protect --output out/ --resume
    """
    from modelfence.cli.output import run_file as saved_run
    from modelfence.cli.protect_job import protect_model
    from modelfence.cli.reference import image_option, model_option, named_domains
    from modelfence.cli.runfile import read_run
    from modelfence.errors import InputError
    from modelfence.files import usable_path

    given = {
        "model": ("--model", model_option(model) if model else None),
        "model.weights": ("--weights", weights),
        "model.classes": ("--classes", classes),
        "image": ("--image-size", image_option(image_size)),
        "data.authorized": ("--authorized", named_domains([authorized] if authorized else [])),
        "data.unauthorized": ("--unauthorized", named_domains(unauthorized)),
        "data.watch": ("--watch", named_domains(watch)),
        "method.name": ("--method", method),
        "output.folder": ("--output", output),
        "output.cache": ("--cache", cache),
    }
    if resume and run_file is None and output is not None:
        found = saved_run(usable_path(output))
        if found is None and not (sets or any(value for key, (_, value) in given.items() if key != "output.folder")):
            raise InputError(f"{output}: there is no run to go on with; give the settings of one without --resume")
        run_file = None if found is None else str(found)
    console = Console(as_json=as_json)
    run = read_run(run_file, options=given, sets=sets)
    report = protect_model(run, console, resume=resume, force=force)
    if report:
        console.result(summary(report, run.output.folder if run.output else ""), report)


def summary(report: dict[str, Any], folder: str) -> str:
    """Return what a finished run came to: the table, agreement where there are no labels, and what its files are."""
    from modelfence.evaluation.result import Evaluation
    from modelfence.report.proxies import agreements

    where = Path(folder)
    said = []
    if report["evaluation"] is None:
        said.append("No labelled domain was given, so there are no accuracies; --watch DOMAIN measures one.")
    else:
        said += [str(Evaluation.from_dict(report["evaluation"]))]
    said += ["", *agreed] if (agreed := agreements(report.get("agreement", {}))) else []
    said += ["", *warnings] if (warnings := warnings_of(report)) else []
    said += ["", f"{where / 'model.safetensors'}  is what to ship: an ordinary checkpoint of the same network"]
    if "mask" in report:
        said.append(f"{where / 'mask'}  is the owner's record: never ship it")
    if "synthetic" in report:
        said.append(f"{where / 'synthetic'}  shows some of the images that were synthesized")
    return "\n".join(said)


def warnings_of(report: dict[str, Any]) -> list[str]:
    """Return what was warned of in a run, a line each."""
    return [f"Warning: {warning}." for warning in report["warnings"]]
