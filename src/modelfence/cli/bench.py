"""``modelfence bench``: the tables of the paper, regenerated."""

from collections.abc import Callable
from typing import Any

import click

from modelfence.cli import options
from modelfence.cli.console import Console

_MANY = ("--methods", "--seeds", "--setting", "--pairs", "--domains", "--networks")


class ManyValues(click.Command):
    """A command whose options may take several values: ``--seeds 0 1 2`` is ``--seeds 0 --seeds 1 --seeds 2``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat an option's name before each of its values."""
        known = {name for one in self.params for name in one.opts}
        spread: list[str] = []
        current, values = "", 0
        for text in [*args, ""]:
            if text == "" or (text.startswith("-") and not text.lstrip("-").isdecimal()):
                if current and not values:
                    raise click.BadOptionUsage(current, f"{current} needs a value")
                current, values = (text if text in _MANY and text in known else ""), 0
                spread += [text] if text and not current else []
            else:
                values += 1
                spread += [current, text] if current else [text]
        return super().parse_args(ctx, spread)


_COMMON: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--methods", "chosen", multiple=True, metavar="NAME ...", help="SL, NTL, CUTI, SAMap, SAMap:paper, ..."
    ),
    click.option("--seeds", type=int, multiple=True, metavar="N ...", help="Seeds of the methods."),
    click.option("--budget", default="cpu", show_default=True, metavar="NAME", help="smoke, cpu or full."),
    click.option("--network", metavar="NAME", help="In place of the budget's network."),
    click.option(
        "--out",
        default="out/bench",
        show_default=True,
        envvar="MODELFENCE_BENCH",
        metavar="FOLDER",
        help="Work folder.",
    ),
    click.option("--shard", default="1/1", show_default=True, metavar="i/n", help="This machine's share of the cells."),
    click.option("--processes", type=int, help="Processes on this machine; by default one for each core."),
    options.as_json,
)


@click.group(name="bench", short_help="Regenerate the tables of the paper.")
def command() -> None:
    """Regenerate the tables of the MAP paper, and show its numbers beside ours.

    Each run is a cell, kept in a file of the work folder: a sweep that was stopped or killed goes on with the same
    command, and any number of processes and machines may share a folder. Exit code 1 if a cell failed.

    \b
    modelfence bench tables --budget smoke
    modelfence bench digits --setting sa --methods NTL CUTI SAMap --seeds 0 1 2
    modelfence bench merge
    """


def _table(name: str, text: str, *more: Callable[[Any], Any]) -> None:
    def verb(as_json: bool, **given: Any) -> int:
        from modelfence.cli.bench_job import run_bench

        return run_bench(name, Console(as_json=as_json), **given)

    verb.__doc__ = text
    for option in reversed((*more, *_COMMON)):
        verb = option(verb)
    command.add_command(click.command(name=name, cls=ManyValues, short_help=text)(verb))


def _setting(*names: str) -> Callable[[Any], Any]:
    return click.option(
        "--setting", "settings", multiple=True, metavar="NAME ...", help=f"{', '.join(names)}; by default {names[0]}."
    )


def _what(option: str, text: str) -> Callable[[Any], Any]:
    return click.option(option, "what", multiple=True, metavar="NAME ...", help=text)


_PAIRS = _what("--pairs", "Only these, each as 'source>target'.")
_ALL = ("sa", "sf", "df")
_table("tables", "The paper's four digit tables: digits sa, sf, df, and ownership.")
_table("digits", "The digit tables: MNIST, USPS, SVHN, MNIST-M, each as source.", _setting(*_ALL), _PAIRS)
_table("ownership", "Ownership: a mark that the model fails on, and the test.", _what("--domains", "Domains."))
_table("objects", "CIFAR-10 and STL-10, bars as in the paper.", _setting(*_ALL), _PAIRS)
_table("pacs", "PACS, photographs as source (not in the paper).", _setting(*_ALL), _PAIRS)
_table("visda", "VisDA-2017, rendered objects to photographs.", _setting(*_ALL), _PAIRS)
_table("backbones", "SF-MAP on several networks, STL-10 to CIFAR-10.", _what("--networks", "Networks."))
_table("losses", "Ablation of the source-free loss: L1, L2, both.", _PAIRS)
_table("convergence", "Accuracies while the methods learn, and the time to confine.", _setting("sf", "sa"), _PAIRS)
_table("tsne", "t-SNE panels of the source-free methods.", _PAIRS)


@command.command(name="merge", short_help="Write tables and figures of a work folder again.")
@_COMMON[4]
@options.as_json
def merge(out: str, as_json: bool) -> int:
    """Write tables and figures from the finished cells of a work folder."""
    from modelfence.cli.bench_job import run_merge

    return run_merge(out, Console(as_json=as_json))
