"""Whether the classes of several domains are the same ones, as far as their names tell."""

from collections.abc import Iterable, Sequence

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.errors import InputError

SAME_CLASSES = "all need the same classes in the same order (an empty folder is a class without images)"


def check_class_names(domains: Iterable[Domain], wanted: Sequence[str] | None = None) -> None:
    """Refuse domains whose classes don't fit together: their labels would be mixed up.

    The same names in another order are refused, and names of which only some are the same. Names of which none is the
    same may be other words for the same classes, such as "0" and "zero", which nothing here can tell. A class with a
    slash in its name, "frog/monkey", is each of the two.

    Args:
        domains: Domains of one run.
        wanted: The model's class names, where they are known; otherwise those of the first domain.

    Raises:
        InputError: Names are the same but not their order, or only some are the same; the text names domain and class.
    """
    known, owner = (list(wanted), "the model") if wanted else (None, "")
    for domain in domains:
        if domain.classes is None:
            continue
        names = [name.casefold() for name in domain.classes]
        if known is None:
            known, owner = names, f"domain {domain.name!r}"
        reference = [name.casefold() for name in known]
        words = {word: name for name in reference for word in _words(name)}
        names = [next((words[word] for word in _words(name) if word in words), name) for name in names]
        other = next((row for row, name in enumerate(names) if name not in reference), None)
        if other is not None and not set(names).isdisjoint(reference):
            raise InputError(
                f"domain {domain.name!r}: class {other} is {domain.classes[other]!r}, which {owner} doesn't have; "
                + SAME_CLASSES
            )
        lacking = next((name for name in reference if name not in names), None)
        if other is None and lacking is not None:
            raise InputError(f"domain {domain.name!r}: has no class {lacking!r}, which {owner} has; " + SAME_CLASSES)
        if sorted(names) == sorted(reference) and names != reference:
            place = next(row for row, pair in enumerate(zip(names, reference, strict=True)) if pair[0] != pair[1])
            raise InputError(
                f"domain {domain.name!r}: class {place} is {domain.classes[place]!r}, for {owner} it is "
                f"{known[place]!r}; put the classes into the same order"
            )


def without_images(domain: Domain | None) -> list[str]:
    """Name the classes that a labelled domain has no image of, as far as it names its classes.

    Args:
        domain: Any, or none.
    """
    if not isinstance(domain, IndexedDomain) or domain.labels is None or domain.classes is None:
        return []
    there = set(domain.labels.tolist())
    return [name for label, name in enumerate(domain.classes) if label not in there]


def _words(name: str) -> list[str]:
    return [name, *(word for word in name.split("/") if word)]
