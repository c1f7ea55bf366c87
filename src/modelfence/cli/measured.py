"""Which domains a run is measured on, and which of them count as authorized."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelfence.cli.parts import has_labels
from modelfence.cli.runfile import Run
from modelfence.errors import InputError
from modelfence.methods.registry import METHODS, method_for


@dataclass(frozen=True)
class Measured:
    """The labelled domains that a run names.

    Attributes:
        domains: Domain by name, the authorized ones first.
        authorized: Names of those that count as authorized.

    Example:
        >>> from modelfence.cli.runfile import read_run
        >>> run = read_run(None, sets=["data.unauthorized=usps", "data.watch=svhn", "evaluate.authorized=mnist"])
        >>> measured_by(run)
        Measured(domains={'mnist': 'mnist', 'usps': 'usps', 'svhn': 'svhn'}, authorized=('mnist',))
        >>> measured_by(run, labels_of=("authorized",))
        Measured(domains={'mnist': 'mnist', 'svhn': 'svhn'}, authorized=('mnist',))
    """

    domains: Mapping[str, str] = field(default_factory=dict)
    authorized: tuple[str, ...] = ()

    def with_origin(self, extra: Mapping[str, Any]) -> "Measured":
        """Where no domain counts as authorized, have the one count that a saved model says it was trained on.

        Args:
            extra: What the model was saved with.
        """
        name = str(extra.get("domain"))
        if self.authorized or name not in self.domains:
            return self
        return Measured({name: self.domains[name], **self.domains}, (name,))


def measured_by(run: Run, *, labels_of: tuple[str, ...] = ("authorized", "unauthorized")) -> Measured:
    """Return the domains that a run is measured on: those of ``[evaluate]``, those to watch, those to learn from.

    Args:
        run: The run.
        labels_of: Which of "authorized" and "unauthorized" in ``[data]`` have labels that may be looked at.

    Raises:
        InputError: Two domains have one name, or one domain has two roles; the text names it.
    """
    texts: dict[str, str] = {}
    roles: dict[str, str] = {}
    wanted: list[str] = []
    for key, role, domains in _entries(run):
        for name, text in domains.items():
            roles.setdefault(name, role or _ROLES[1])
            if texts.setdefault(name, text) != text:
                raise InputError(f"{key}: {name!r} is {text} here and {texts[name]} elsewhere; give different names")
            other = next((one for one in texts if texts[one] == text and roles[one] != roles[name]), None)
            if other is not None or role not in (None, roles[name]):
                raise InputError(f"{key}: {name!r} can't be authorized and unauthorized; give different domains")
            if name not in wanted and (key != f"data.{role}" or role in labels_of):
                wanted.append(name)
    ordered = sorted(wanted, key=lambda name: _ROLES.index(roles[name]))
    return Measured(
        {name: texts[name] for name in ordered}, tuple(name for name in ordered if roles[name] == _ROLES[0])
    )


_ROLES = ("authorized", "unauthorized")


def role_warning(run: Run, measured: Measured) -> str | None:
    """Say which watched domains count as unauthorized for want of a word, where no domain counts as authorized.

    Args:
        run: The run.
        measured: The domains that it is measured on.

    Returns:
        A sentence without a full stop, or None where there is nothing to warn of.

    Example:
        >>> from modelfence.cli.runfile import read_run
        >>> run = read_run(None, sets=["data.unauthorized=usps", "data.watch=['mnist', 'usps']"])
        >>> role_warning(run, measured_by(run))
        "'mnist' is only watched and counts as unauthorized in the table, its sums and the model card; ..."
    """
    stated = [(role, text) for _, role, domains in _entries(run) for text in domains.values() if role is not None]
    texts = {text for _, text in stated}
    names = [repr(name) for name, text in measured.domains.items() if text not in texts]
    if not names or measured.authorized or any(role == _ROLES[0] for role, _ in stated):
        return None
    are, count = ("is", "counts") if len(names) == 1 else ("are", "count")
    return (
        f"{', '.join(names)} {are} only watched and {count} as unauthorized in the table, its sums and the model card; "
        "name the authorized one in evaluate.authorized (or, if that is meant, all in evaluate.unauthorized)"
    )


def labelled_in(run: Run) -> tuple[str, ...]:
    """Say which of "authorized" and "unauthorized" in ``[data]`` have labels that may be looked at.

    Both have, for a method that reads labels. Otherwise only an authorized domain counts, if its files tell of labels.

    Raises:
        InputError: The authorized domain can't be had.
    """
    given = {role: bool(getattr(run.data, role, None)) for role in _ROLES}
    method = method_for(None, given, marked=run.marked)[0] if run.method is None else METHODS[type(run.method)]
    if method.labels:
        return _ROLES
    source = (run.data.authorized if run.data is not None else None) or {}
    return ("authorized",) if all(has_labels(text) for text in source.values()) else ()


def _entries(run: Run) -> Iterator[tuple[str, str | None, Mapping[str, str]]]:
    """Go through the domains that a run names: key, role (None: that of elsewhere), domain by name.

    A bare name in ``[evaluate]`` means the domain that ``[data]`` has under it, if there is one.
    """
    data = {key: getattr(run.data, key, None) or {} for key in (*_ROLES, "watch")}
    known = {name: text for domains in data.values() for name, text in domains.items()}
    for role in _ROLES:
        yield f"data.{role}", role, data[role]
        named = getattr(run.evaluate, role) or {}
        yield (
            f"evaluate.{role}",
            role,
            {name: known.get(name, text) if name == text else text for name, text in named.items()},
        )
    yield "data.watch", None, data["watch"]
