import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, TensorDataset

from modelfence.data.domain import IndexedDomain
from modelfence.data.sources import as_domain
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError


def test_domains_are_returned_as_they_are():
    domain = IndexedDomain("one", torch.rand(4, 1, 2, 2).__getitem__, 4)
    assert as_domain(domain) is domain


class Untyped:
    """A user's own domain."""

    name, classes, size, labelled = "own", ("a", "b"), 6, True

    def __init__(self, domain):
        self.batches, self.once = domain.batches, domain.once


def test_labels_that_are_not_wanted_are_not_looked_at():
    """Those here would be refused: of no type that labels have, or below 0."""
    images = torch.rand(6, 1, 2, 2)
    known = IndexedDomain("known", images.__getitem__, 6, labels=torch.tensor([0, 1, 0, 1, 0, 1]))
    things = {
        "items": Listed([(image, "cat") for image in images]),
        "dataset": TensorDataset(images, torch.full((6,), -1)),
        "loader": DataLoader(TensorDataset(images, torch.full((6,), -1)), batch_size=4),
        "batches": [(images, ["cat"] * 6)],
        "table": Dataset.from_dict({"image": images.tolist(), "label": ["cat"] * 6}).with_transform(
            lambda rows: {**rows, "image": [torch.tensor(one) for one in rows["image"]]}
        ),
        "domain": known,
        "stream": StreamDomain([(images, torch.arange(6))], "stream"),
        "own": Untyped(known),
    }
    for name, thing in things.items():
        domain = as_domain(thing, name=name, labelled=False, classes=2)
        assert (domain.labelled, domain.classes) == (False, None), name
        (seen,) = domain.once(6)
        assert torch.equal(seen.images, images), name
        assert seen.labels is None, name
        assert next(domain.batches(3, seed=0, start=1)).labels is None, name
    assert known.labelled


class Listed:
    """A data set of items."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


def test_domains_are_checked_against_the_model_too():
    domain = IndexedDomain("one", torch.rand(4, 1, 2, 2).__getitem__, 4, labels=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(InputError, match="label 3"):
        as_domain(domain, classes=3)


def test_loaders_and_lists_of_batches_become_streams():
    images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    for thing in (DataLoader(TensorDataset(images, labels), batch_size=4), [(images, labels)]):
        domain = as_domain(thing, classes=2)
        assert isinstance(domain, StreamDomain)
        assert torch.equal(next(domain.once(6)).images, images)
    with pytest.raises(InputError, match="label 1"):
        as_domain([(images, labels)], classes=1)


@pytest.mark.parametrize("thing", [3, None, torch.zeros(4, 1, 2, 2), {"image": 1}])
def test_other_things_are_refused_and_the_names_listed(thing):
    with pytest.raises(InputError, match=r"can't be a domain.*mnist, usps"):
        as_domain(thing)


def test_sizes_below_one_are_refused():
    with pytest.raises(InputError, match="size is 0"):
        as_domain("sklearn_digits", size=0)


def test_names():
    assert as_domain([torch.zeros(1, 1, 1, 1)], name="mine").name == "mine"
    assert as_domain([torch.zeros(1, 1, 1, 1)]).name == "list"
