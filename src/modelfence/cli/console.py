"""What the command line says: results on stdout, progress and notes on stderr, nothing on ranks above 0."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

Advance = Callable[[float, str], None]
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK")


def rank() -> int:
    """Return this process's number among those of a distributed run, 0 for a run of one process.

    Example:
        >>> rank() >= 0
        True
    """
    found = (os.environ.get(name, "") for name in _RANKS)
    return next((int(value) for value in found if value.isdigit()), 0)


class Console:
    """The two streams of a verb.

    Args:
        as_json: The result is one JSON document on stdout; text for people is left out.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.silent = rank() > 0
        self._say: Callable[[str], None] = functools.partial(click.echo, err=True)

    def note(self, text: str = "") -> None:
        """Say on stderr what is being done."""
        if not self.silent:
            self._say(text)

    def result(self, text: str, record: Mapping[str, Any] | list[Any]) -> None:
        """Give the verb's result: text for people, or the same as JSON values for machines.

        Args:
            text: Lines for a terminal.
            record: JSON values without NaN.
        """
        if not self.silent:
            click.echo(json.dumps(record, indent=1, allow_nan=False) if self.as_json else text)

    @contextlib.contextmanager
    def progress(self, title: str, total: float) -> Iterator[Advance]:
        """Show how far a loop is: a bar on a terminal, plain lines elsewhere.

        Args:
            title: What is being done.
            total: Steps in all.

        Yields:
            A function that takes the steps done and a text about them.
        """
        if self.silent or not sys.stderr.isatty():
            self.note(f"{title} ...")
            yield lambda done, text: self.note(f"  {done:.0f}/{total:.0f}  {text}")
            return
        plain = self._say
        with _bar(title, total) as (advance, say):
            self._say = say
            try:
                yield advance
            finally:
                self._say = plain


@contextlib.contextmanager
def _bar(title: str, total: float) -> Iterator[tuple[Advance, Callable[[str], None]]]:
    """Show a bar; give what moves it, and what says lines above it."""
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=Terminal(stderr=True)) as bar:
        task = bar.add_task(title, total=total, text="")

        def advance(done: float, text: str) -> None:
            bar.update(task, completed=done, text=text)

        yield advance, lambda line: bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
