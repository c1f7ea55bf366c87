"""``modelfence demo``: the whole job on domains that need no download."""

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="demo", short_help="Do the whole job on built-in digits.")
@click.option(
    "--setting",
    type=click.Choice(["source-available", "source-free", "data-free"]),
    default="source-available",
    show_default=True,
    help="What the mask is learned from.",
)
@click.option("--output", metavar="FOLDER", help="Where results go; by default out/demo, or out/demo-SETTING.")
@options.force
@options.as_json
def command(setting: str, output: str | None, force: bool, as_json: bool) -> None:
    """Train a small model, confine it to its domain, measure it, and write a report: minutes, no download.

    The authorized domain is scanned handwritten digits; the unauthorized ones are printed digits and digits on
    photographs. The mask is learned from labelled images of all of them (source-available), from the model and
    unlabelled images of the unauthorized ones (source-free), or from the model alone (data-free).
    """
    from modelfence.cli.demo_job import run_demo

    console = Console(as_json=as_json)
    folder = output or ("out/demo" if setting == "source-available" else f"out/demo-{setting}")
    text, record = run_demo(folder, console, setting=setting, force=force)
    console.result(text, record)
