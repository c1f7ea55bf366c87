"""Errors about a model in the words of the command line: options and keys of run files, not arguments of Python."""

import contextlib
import re
from collections.abc import Iterator

import click

from modelfence.errors import InputError

_ARGUMENT = re.compile(r"\b(classes|image|weights)=(?=(['\"]?))")
_NAMES = {
    "classes": ("--classes", "model.classes"),
    "image": ("--image-size", "a table [image]"),
    "weights": ("--weights", "model.weights"),
}


@contextlib.contextmanager
def spoken(weights: str | None = None) -> Iterator[None]:
    """Name options of the verb that runs, and keys, where an error in the block names arguments of Python.

    Args:
        weights: What to say for ``weights=``; by default the option and the key.

    Raises:
        InputError: The block raised one. Those of its subclasses pass as they are.

    Example:
        >>> with spoken():
        ...     raise InputError("classes= is missing")
        Traceback (most recent call last):
        modelfence.errors.InputError: model.classes is missing
    """
    try:
        yield
    except InputError as error:
        given = {} if weights is None else {"weights": weights}
        text = _ARGUMENT.sub(lambda found: given.get(found[1]) or _name(found[1], bool(found[2])), str(error))
        if type(error) is not InputError or text == str(error):
            raise
        raise InputError(text) from error


def _name(argument: str, has_value: bool) -> str:
    context = click.get_current_context(silent=True)
    known = [] if context is None else [flag for option in context.command.params for flag in option.opts]
    flag, key = _NAMES[argument]
    if has_value:
        return f"{flag} " if flag in known else f"{key} = "
    if argument == "image" and "--set" in known:
        key += ", or --set image.channels=1 and so on"
    return f"{flag} (or {key})" if flag in known else key
