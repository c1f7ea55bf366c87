"""The domains of a protect run: what it learns from, what it watches, what it is measured on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modelfence.cli.marks import with_marks
from modelfence.cli.measured import Measured, labelled_in, measured_by, role_warning
from modelfence.cli.parts import Parts, load_images, load_parts, load_test
from modelfence.cli.runfile import Run
from modelfence.cli.tables import DataTable
from modelfence.data.class_names import check_class_names
from modelfence.data.domain import Domain, IndexedDomain
from modelfence.errors import InputError
from modelfence.methods.loop import WARNING
from modelfence.models.load import LoadedModel


@dataclass(frozen=True)
class RunData:
    """The loaded domains of a run.

    Attributes:
        authorized: What the method is given of the authorized domain, if anything.
        unauthorized: The same of the unauthorized ones, by name.
        watch: Labelled images that are neither learned from nor in the final table, by name.
        tests: Labelled images of the final table by name; may be empty.
        roles: Names of those that count as authorized.
        warnings: Sentences about what the table doesn't say.
    """

    authorized: IndexedDomain | None
    unauthorized: Mapping[str, IndexedDomain]
    watch: Mapping[str, IndexedDomain]
    tests: Mapping[str, Domain]
    roles: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def load_data(run: Run, loaded: LoadedModel, *, labels: bool, note: Callable[[str], None]) -> RunData:
    """Load the domains of a run.

    Args:
        run: The run.
        loaded: The model, whose classes labels must fit.
        labels: Whether the method reads labels. If not, those of the domains it learns from aren't looked at; only an
            authorized domain that has labels is measured all the same.
        note: Told what is loaded.

    Raises:
        InputError: A domain can't be had, or doesn't fit the model or the others.
    """
    data = run.data or DataTable()
    parts: dict[str, Parts] = {}

    def parts_of(name: str, text: str) -> Parts:
        if name not in parts:
            note(f"loading {name}")
            parts[name] = load_parts(name, text, data, loaded.image, loaded.classes)
        return parts[name]

    def learned(name: str, text: str) -> IndexedDomain:
        if labels:
            return parts_of(name, text).train
        note(f"loading the images of {name}")
        return load_images(name, text, data, loaded.image)

    source = next((learned(*one) for one in (data.authorized or {}).items()), None)
    targets = {name: learned(name, text) for name, text in (data.unauthorized or {}).items()}
    measured = measured_by(run, labels_of=labelled_in(run)).with_origin(loaded.extra)
    warnings = _warned(run, measured, note)
    watched = {name: parts_of(name, text).validation for name, text in (data.watch or {}).items()}
    divided = {**(data.authorized or {}), **(data.unauthorized or {}), **(data.watch or {})}

    def test_of(name: str, text: str) -> IndexedDomain:
        if text in divided.values():
            return parts_of(name, text).test
        note(f"loading {name}")
        return load_test(name, text, loaded.image, loaded.classes)

    tests = {name: test_of(name, text) for name, text in measured.domains.items()}
    for name in [name for name, test in tests.items() if not test.labelled]:
        if labels or name not in (data.authorized or {}):
            raise InputError(f"domain {name!r} has no labels; what is watched or evaluated needs them")
        del tests[name]
    check_class_names(list(tests.values()), loaded.extra.get("class_names"))
    shown, roles = with_marks(run, tests, [name for name in measured.authorized if name in tests], loaded.image)
    return RunData(source, targets, watched, shown, tuple(roles), warnings)


def _warned(run: Run, measured: Measured, note: Callable[[str], None]) -> tuple[str, ...]:
    """Tell of what the table won't say, before any work; return the same sentences."""
    warning = role_warning(run, measured)
    if warning is None:
        return ()
    note(f"  {WARNING}{warning}")
    return (warning,)
