"""``modelfence demo``: the whole job on domains that need no download."""

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="demo", short_help="Do the whole job on built-in digits.")
@click.option("--output", metavar="FOLDER", default="out/demo", show_default=True, help="Where results go.")
@options.force
@options.as_json
def command(output: str, force: bool, as_json: bool) -> None:
    """Train a small model, confine it to its domain, measure it, and write a report: about a minute, no download.

    The authorized domain is scanned handwritten digits; the unauthorized ones are printed digits and digits on
    photographs.
    """
    from modelfence.cli.demo_job import run_demo

    console = Console(as_json=as_json)
    text, record = run_demo(output, console, force=force)
    console.result(text, record)
