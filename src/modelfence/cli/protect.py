"""``modelfence protect``: a mask, and the confined model."""

from pathlib import Path

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="protect", short_help="Learn a mask, and write the confined model.")
@click.argument("run_file", metavar="[RUN.toml]", required=False)
@click.option("--model", help="A saved folder, a network of the zoo or of timm, or package.module:factory.")
@options.model_options
@click.option("--authorized", metavar="DOMAIN", help="Where it shall go on working.")
@click.option("--unauthorized", metavar="DOMAIN", multiple=True, help="Where it shall fail; may be given again.")
@options.output
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
    output: str | None,
    sets: tuple[str, ...],
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Learn a mask that confines a model, and write the confined model.

    The settings come from a run file, from options, or from both; options go before the file. A run that was stopped or
    killed goes on with --resume to the same mask.

    \b
    modelfence protect run.toml
    modelfence protect --model sl/ --authorized mnist --unauthorized usps --output out/
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
        "output.folder": ("--output", output),
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


def summary(report: dict[str, object], folder: str) -> str:
    """Return the table of a finished run and what its files are."""
    from modelfence.evaluation.result import Evaluation

    table = Evaluation.from_dict(report["evaluation"])  # type: ignore[arg-type]  # JSON
    where = Path(folder)
    return "\n".join(
        [
            str(table),
            "",
            f"{where / 'model.safetensors'}  is what to ship: an ordinary checkpoint of the same network",
            f"{where / 'mask'}  is the owner's record: never ship it",
        ]
    )
