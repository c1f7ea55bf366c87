"""Which domains have the same classes, by their names."""

import itertools

import pytest
import torch

from modelfence.data import catalog
from modelfence.data.class_names import check_class_names
from modelfence.data.domain import IndexedDomain
from modelfence.errors import InputError


def domain(name: str, *classes: str) -> IndexedDomain:
    images = torch.zeros(len(classes), 1, 1, 1)
    return IndexedDomain(name, images.__getitem__, len(classes), labels=torch.arange(len(classes)), classes=classes)


def test_domains_of_one_family_of_the_catalog_fit_together() -> None:
    entries = sorted((catalog.lookup(name) for name in catalog.names()), key=lambda entry: entry.family)
    for _, family in itertools.groupby(entries, key=lambda entry: entry.family):
        domains = [domain(str(number), *entry.classes) for number, entry in enumerate(family) if entry.classes]
        for order in (domains, domains[::-1]):
            check_class_names(order)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (("cat", "owl", "fox"), "domain 'b': class 1 is 'owl', which domain 'a' doesn't have"),
        (("cat", "fox", "dog"), "domain 'b': class 1 is 'fox', for domain 'a' it is 'dog'"),
        (("cat", "fox"), "domain 'b': has no class 'dog', which domain 'a' has"),
        (("cat", "dog", "fox", "owl"), "class 3 is 'owl', which domain 'a' doesn't have"),
        (("cat", "owl/elk", "fox"), "class 1 is 'owl/elk'"),
    ],
)
def test_classes_that_would_be_mixed_up_are_refused(other: tuple[str, ...], text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_class_names([domain("a", "cat", "dog", "fox"), domain("b", *other)])


@pytest.mark.parametrize(
    "other", [("Cat", "DOG", "fox"), ("one", "two", "three"), ("cat", "dog/wolf", "fox"), ("x", "y")]
)
def test_other_words_for_all_classes_are_taken_as_they_are(other: tuple[str, ...]) -> None:
    check_class_names([domain("a", "cat", "dog", "fox"), domain("b", *other)])
    check_class_names([domain("b", *other)], ("cat", "dog", "fox"))
