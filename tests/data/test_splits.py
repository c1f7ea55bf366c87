import pytest
import torch

from modelfence.data.splits import holdout, mixed_seed, permutation, protocol, sample
from modelfence.errors import InputError


def test_seeds_are_fixed_forever():
    # a change here changes every run that resumes from an older version
    assert mixed_seed(0, 0) == 6956993988634818902
    assert permutation(8, 2022, 1).tolist() == [3, 5, 7, 2, 4, 1, 0, 6]
    assert sample(100, 4).tolist() == [18, 49, 54, 83]


def test_protocol_draws_disjoint_parts_of_the_size_asked_for():
    train, validation = protocol(7000, train=5000, validation=1000, seed=2022)
    together = torch.cat([train, validation])
    assert len(together) == len(together.unique()) == 6000
    assert together.max() < 7000
    again = protocol(7000, train=5000, validation=1000, seed=2022)
    assert torch.equal(train, again[0])
    assert not torch.equal(train, protocol(7000, seed=2023)[0])


def test_protocol_may_use_everything_but_no_more():
    train, validation = protocol(10, train=8, validation=2, seed=0)
    assert sorted(torch.cat([train, validation]).tolist()) == list(range(10))
    with pytest.raises(InputError, match="needs 11, but there are 10"):
        protocol(10, train=9, validation=2)


def test_holdout_covers_everything_once():
    rest, held_out = holdout(11, 0.3, seed=4)
    assert sorted(torch.cat([rest, held_out]).tolist()) == list(range(11))
    assert len(held_out) == 3


@pytest.mark.parametrize(("n", "fraction"), [(2, 0.01), (2, 0.99), (5, 0.999)])
def test_holdout_leaves_no_side_empty(n, fraction):
    rest, held_out = holdout(n, fraction, seed=0)
    assert len(rest) > 0
    assert len(held_out) > 0


@pytest.mark.parametrize(("n", "fraction"), [(10, 0.0), (10, 1.0), (10, -0.5), (1, 0.5)])
def test_holdout_refuses_what_it_cannot_split(n, fraction):
    with pytest.raises(InputError):
        holdout(n, fraction, seed=0)


def test_sample_is_a_fixed_choice_without_repetition():
    chosen = sample(1000, 10)
    assert torch.equal(chosen, sample(1000, 10))
    assert len(chosen.unique()) == 10
    assert torch.equal(chosen, chosen.sort().values)
    with pytest.raises(InputError, match="size is 0"):
        sample(5, 0)
