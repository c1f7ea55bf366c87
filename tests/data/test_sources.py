import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modelfence.data.domain import IndexedDomain
from modelfence.data.sources import as_domain
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError


def test_domains_are_returned_as_they_are():
    domain = IndexedDomain("one", torch.rand(4, 1, 2, 2).__getitem__, 4)
    assert as_domain(domain) is domain


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
