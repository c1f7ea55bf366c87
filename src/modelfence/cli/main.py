"""The command ``modelfence``: its verbs, and how errors become exit codes."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from modelfence import __version__
from modelfence.cli import bench, demo, doctor, domains, evaluate, protect, report, train, verify
from modelfence.errors import Interrupted, ModelfenceError, is_shortage

WRONG_USE, FAULT, STOPPED = 2, 70, 130


class Verbs(click.Group):
    """A group whose errors are one line on stderr and a fixed exit code.

    0: done. 1: the check that was asked for did not hold. 2: wrong use or bad input. 130: stopped by the user. Anything
    else that goes wrong is a fault of this program: 70, with the traceback.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002 (always ends the process; the name is click's)
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a verb and end the process with its exit code."""

        def run() -> Any:
            return super(Verbs, self).main(
                args=args,
                prog_name=prog_name or "modelfence",
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )

        sys.exit(exit_code(run))


def exit_code(run: Callable[[], Any]) -> int:
    """Run something and turn what it raises into a line on stderr and an exit code.

    Args:
        run: Returns an exit code, or anything else for 0.

    Returns:
        The exit code.
    """
    try:
        result = run()
    except (Interrupted, click.Abort, KeyboardInterrupt) as error:
        click.echo(f"modelfence: {error}" if isinstance(error, Interrupted) else "modelfence: stopped", err=True)
        return STOPPED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return WRONG_USE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, such as head, has enough
        return 0
    except Exception as error:
        text = _bad_input(error)
        if text is not None:
            click.echo(f"modelfence: error: {' '.join(text.split())}", err=True)
            return WRONG_USE
        sys.excepthook(type(error), error, error.__traceback__)
        click.echo("modelfence: this is a fault in modelfence; please report it with the lines above", err=True)
        return FAULT
    return result if isinstance(result, int) else 0


def _bad_input(error: Exception) -> str | None:
    """Say what was wrong with the input or ran out; None for a fault of the program."""
    if isinstance(error, ModelfenceError):
        return str(error)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        verb = f"{context.info_name}: " if context is not None and context.parent is not None else ""
        return f"{verb}{error.format_message()}"
    return _shortage(error)


def _shortage(error: Exception) -> str | None:
    """Say what ran out, if that is what happened."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'disk'}: no space left; free some and go on with --resume"
    if is_shortage(error):
        return "out of memory; use a smaller batch_size or image size"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)[:200]}: {error.strerror}; check the path and its permissions"
    return None


@click.group(
    name="modelfence", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="modelfence", message="%(prog)s %(version)s")
def main() -> None:
    """Confine a trained image classifier to the domains its owner authorized.

    \b
    A first look:    modelfence demo
    Your own model:  modelfence train, then modelfence protect; or modelfence protect run.toml
    """


for verb in (demo, domains, train, doctor, protect, evaluate, verify, report, bench):
    main.add_command(verb.command)
