"""Methods by the names that tables and the command line use."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

import modelfence.methods  # noqa: F401 (registers the methods)
from modelfence.errors import InputError, nearest
from modelfence.methods.config import LearnConfig
from modelfence.methods.registry import METHODS, unused

SOURCE_MODEL = "SL"
"""The source model itself: nothing is learned."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "sa": ("NTL", "CUTI", "SAMap"),
    "sf": ("NTL", "CUTI", "SFMap"),
    "df": ("DFMap",),
}
"""Methods of a setting's table, as in the paper."""


def known() -> dict[str, type]:
    """Return the configuration classes by name.

    Example:
        >>> sorted(known())[-2:]
        ['SAMap', 'SFMap']
    """
    return {kind.__name__: kind for kind in METHODS}


def require_methods(names: Sequence[str], setting: str) -> None:
    """Refuse methods that aren't known, or that need what a setting doesn't give.

    Args:
        names: Such as "SL", "NTL" or "SAMap:paper".
        setting: "sa", "sf" or "df".

    Raises:
        InputError: A method isn't known, has no such recipe, or doesn't fit the setting.
    """
    for name in names:
        if name == SOURCE_MODEL:
            continue
        config_of(name)
        method = METHODS[known()[name.partition(":")[0]]]
        given = {"sa": {"authorized", "unauthorized"}, "sf": {"unauthorized"}, "df": set()}[setting]
        rival = setting == "sf" and method.labels  # fed with a pseudo-source and pseudo-labels
        if not rival and not set(method.needs) <= given <= {*method.needs, *method.takes}:
            fits = ", ".join(DEFAULTS[setting])
            raise InputError(f"--methods: {name} doesn't work in setting {setting!r}; methods of it: SL, {fits}")


def config_of(name: str, values: Mapping[str, Any] | None = None) -> LearnConfig:
    """Return a method's configuration.

    Args:
        name: Its class, with ":recipe" where that isn't the default.
        values: Values that differ from the recipe; those that the method doesn't have, or its recipe makes no use
            of, are left out.

    Raises:
        InputError: There is no such method or recipe, or a value isn't allowed.

    Example:
        >>> config_of("SAMap:paper", {"steps": 5}).ascent
        0.1
        >>> config_of("SFMap:paper", {"generated": 5, "width": 8}).width
        8
    """
    base, _, recipe = name.partition(":")
    kind = known().get(base)
    if kind is None:
        every = [SOURCE_MODEL, *sorted(known())]
        raise InputError(f"--methods: unknown {base!r}.{nearest(base, every)} Known: {', '.join(every)}")
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]  # a dataclass by construction
    used = fields.keys() - unused(kind, recipe or "default")
    taken = {key: value for key, value in (values or {}).items() if key in used}
    if recipe:
        taken["recipe"] = recipe
    try:
        return kind(**taken)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise InputError(f"--methods: {name}: {where}: {first['msg']} (got {first['input']!r:.40})") from error
