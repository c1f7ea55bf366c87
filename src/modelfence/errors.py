"""What modelfence raises, and the one-line texts that name a near miss.

Every error a user can cause is an :class:`InputError`: one line that says what is wrong, where, and what to do.
The command line turns it into exit code 2.
"""

import difflib
from collections.abc import Iterable


class ModelfenceError(Exception):
    r"""Base class of everything that modelfence raises on purpose; its text is one line, whatever it quotes.

    Args:
        text: What is wrong, where, and what to do.

    Example:
        >>> str(InputError("the factory failed (no\n  such option); check its args"))
        'the factory failed (no such option); check its args'
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(" ".join(line.strip() for line in str(text).splitlines() if line.strip()))


class InputError(ModelfenceError, ValueError):
    """A wrong argument, file, domain or model, found before any long work."""


class MaskMismatchError(InputError):
    """A mask meets a model that isn't the one it was learned for."""


class ArtifactError(InputError):
    """A file of ours is missing, truncated, altered, or can't be written."""


class NonFiniteError(ModelfenceError):
    """A loss or a weight became NaN or infinite; the text names the step and the term."""


class Interrupted(ModelfenceError):  # noqa: N818 (not an error: the run was stopped by its user)
    """The run was stopped by the user: learning after its state was saved, a sweep between its cells."""


def first_line(error: BaseException) -> str:
    r"""Return the first line of what an error says, at most 200 characters of it, or its type where it says nothing.

    Example:
        >>> first_line(ValueError("no\nmore")), first_line(AssertionError())
        ('no', 'AssertionError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def is_shortage(error: BaseException) -> bool:
    """Say whether an error is that memory ran out: of Python, of torch on a CPU (a ``RuntimeError``), or on a device.

    Example:
        >>> is_shortage(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_shortage(OSError("no"))
        (True, False)
    """
    by_torch = "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"
    return by_torch or isinstance(error, MemoryError)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known names are close to a mistyped one.

    Args:
        name: What the user wrote.
        known: All valid names.

    Returns:
        A sentence that starts with a space, or an empty string when nothing is close.

    Example:
        >>> nearest("mnits", ["mnist", "usps"])
        " Did you mean 'mnist'?"
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {', '.join(repr(match) for match in close)}?" if close else ""
