"""Which function learns for which configuration, and what it needs.

The configuration object names the method: ``protect(..., method=SAMap(steps=400))``. A method is one file with a frozen
configuration and one function, registered by ``@learner(Config, needs=(...))``.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from modelfence.errors import InputError
from modelfence.methods.loop import Learned, Session


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        config: Its configuration class.
        needs: Which of "authorized" and "unauthorized" must be given.
        takes: Which may be given beside.
        labels: Whether it reads labels; one that doesn't is given domains without them.
        learn: The function.
        default: Whether it may be chosen by the data alone; else it has to be named.
        check: Looks at all domains of a session before anything is learned, even where each gets its own mask: it
            refuses those that can't be used and warns of those that may do harm. None has nothing to look at.
    """

    config: type
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    labels: bool
    learn: Callable[[nn.Module, Any, Session], Learned]
    default: bool = True
    check: Callable[[nn.Module, Any, Session], None] | None = None


METHODS: dict[type, Method] = {}


def unused(config: type, recipe: str) -> frozenset[str]:
    """Return the names of the fields that a recipe of a configuration class makes no use of.

    Args:
        config: The class; its ``ONLY`` has fields by the only recipe that uses them.
        recipe: Such as "paper".
    """
    only: Mapping[str, frozenset[str]] = getattr(config, "ONLY", {})
    return frozenset(name for other, names in only.items() if other != recipe for name in names)


def settings_of(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that its recipe uses, with their values.

    Args:
        config: An object of a registered class.
    """
    left_out = unused(type(config), getattr(config, "recipe", ""))
    return {name: value for name, value in asdict(config).items() if name not in left_out}


def learner(
    config: type,
    *,
    needs: tuple[str, ...],
    takes: tuple[str, ...] = (),
    labels: bool = True,
    default: bool = True,
    check: Callable[[nn.Module, Any, Session], None] | None = None,
) -> Callable[[Any], Any]:
    """Register a learning function under its configuration class; the arguments are those of :class:`Method`.

    Args:
        config: The frozen configuration class.
        needs: Which of "authorized" and "unauthorized" must be given.
        takes: Which may be given beside.
        labels: Whether it reads labels.
        default: Whether it may be chosen by the data alone.
        check: Looks at all domains beforehand.
    """

    def register(function: Callable[[nn.Module, Any, Session], Learned]) -> Any:
        METHODS[config] = Method(config, needs, takes, labels, function, default, check)
        return function

    return register


def method_for(config: object | None, given: Mapping[str, bool], *, marked: bool = False) -> tuple[Method, Any]:
    """Find the method for a configuration, or the default one for the data given.

    Args:
        config: A configuration object, or None.
        given: Whether "authorized" and "unauthorized" were given.
        marked: Whether the authorized images with a watermark, or without a key, are unauthorized, beside what was
            given or alone.

    Returns:
        The method, and its configuration.

    Raises:
        InputError: The object isn't a configuration, an argument is missing or too many, or there is nothing to make
            one mask each for; the text names it.
    """
    marks_alone = marked and given["authorized"] and not given["unauthorized"]
    given = {**given, "unauthorized": given["unauthorized"] or marked}
    if config is None:
        present = {name for name, there in given.items() if there}
        named = (one for one in METHODS.values() if one.default)
        fits = (one for one in named if set(one.needs) <= present <= {*one.needs, *one.takes})
        method = next(fits)  # every choice of domains is a setting of some method
        return method, method.config(recipe="ownership" if marks_alone else "default")
    found = METHODS.get(type(config))
    if found is None:
        known = ", ".join(sorted(kind.__name__ for kind in METHODS))
        raise InputError(f"method={config!r:.80} isn't a method configuration; known: {known}")
    for name in found.needs:
        if not given[name]:
            raise InputError(f"{type(config).__name__} needs {name}=: pass the {name} domain, or choose another method")
    for name, there in given.items():
        if there and name not in (*found.needs, *found.takes):
            if marked:
                raise InputError(
                    f"{type(config).__name__} learns no marks: leave ownership= and key= out, or choose a method that "
                    "takes authorized= and unauthorized="
                )
            raise InputError(
                f"{type(config).__name__} works without {name}=: leave it out (watch= measures a domain without using "
                "it), or choose another method"
            )
    if getattr(config, "masks", None) == "one_each" and not given["unauthorized"]:
        raise InputError('masks="one_each" makes one mask for each unauthorized domain: give some by unauthorized=')
    return found, config
