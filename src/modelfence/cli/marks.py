"""What a run with a watermark or a key is measured on: domains with the mark, beside those without."""

from collections.abc import Iterable, Mapping, Sequence

from modelfence.cli.runfile import Run
from modelfence.data.domain import Domain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.ownership.marked import KEYED, NO_KEY, WATERMARK, marked


def require_free_names(run: Run, names: Iterable[str]) -> None:
    """Refuse domains with the names that images get with a watermark, with a key, or without it.

    Args:
        run: The run.
        names: Of its domains.

    Raises:
        InputError: Names the domain.
    """
    names = list(names)
    taken = [WATERMARK] if run.watermark is not None else []
    if run.key is not None:
        taken += [NO_KEY, *(f"{name}{KEYED}" for name in names)]
    for name in taken:
        if name in names:
            table = "watermark" if name == WATERMARK else "key"
            raise InputError(f"{table}: a domain is named {name!r}, which marked images get; rename it")


def with_marks(
    run: Run, tests: Mapping[str, Domain], authorized: Sequence[str], image: ImageSpec
) -> tuple[dict[str, Domain], list[str]]:
    """Return what is measured, and the names of what counts as authorized.

    Args:
        run: The run.
        tests: Domains by name.
        authorized: Names of the authorized ones; the first gets the watermark.
        image: What the model eats.

    Returns:
        With a key, each domain with it, "<name>+key", and without; authorized is what was with the key, alone. With a
        watermark one more, "watermark". Those that are authorized come first.
    """
    shown, roles = dict(tests), list(authorized)
    if run.key is not None:
        keyed = {f"{name}{KEYED}": marked(test, run.key, image=image) for name, test in tests.items()}
        roles = [f"{name}{KEYED}" for name in roles]
        shown = {**{name: keyed[name] for name in roles if name in keyed}, **tests, **keyed}
    source = shown.get(roles[0]) if roles else None
    if run.watermark is not None and source is not None:
        shown[WATERMARK] = marked(source, run.watermark, image=image)
    return shown, roles
