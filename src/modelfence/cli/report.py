"""``modelfence report``: figures and one HTML page of a finished run."""

from pathlib import Path

import click

from modelfence.cli.console import Console


@click.command(name="report", short_help="Draw a finished run: figures and one HTML page.")
@click.argument("folder", metavar="OUT")
@click.option("--samples", is_flag=True, help="Show images of the domains; they become part of the page.")
@click.option("--title", help="Heading of the page.")
def command(folder: str, samples: bool, title: str | None) -> None:
    """Write figures (PNG, SVG) and one HTML page about a finished run to OUT/report/.

    OUT is a folder that modelfence protect wrote. The page needs no other file and no network.
    """
    from modelfence.cli.report_job import make_report

    console = Console()
    path = make_report(Path(folder), samples=samples, title=title)
    console.result(f"{path}  opens in any browser; the figures are in {path.parent / 'figures'}", {})
