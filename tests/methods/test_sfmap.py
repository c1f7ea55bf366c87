"""What SF-MAP's settings are for a network, before anything is made."""

import pytest
from tests.methods import toy

from modelfence import SFMap


@pytest.mark.parametrize(
    ("given", "without", "with_batch_norm"),
    [
        ({}, (900, 12288), (450, 3072)),
        ({"steps": 7}, (7, 12288), (7, 3072)),
        ({"restyled": 64}, (900, 64), (450, 64)),
        ({"restyled": 0}, (900, 0), (450, 0)),
        ({"longer_without_batch_norm": 2.5, "more_without_batch_norm": 0.5}, (1125, 1536), (450, 3072)),
        ({"more_without_batch_norm": 0.0001}, (900, 1), (450, 3072)),
        ({"recipe": "paper"}, (936, 3072), (936, 3072)),
    ],
)
def test_the_recipes_own_steps_and_copies_are_more_without_batch_norm(given, without, with_batch_norm):
    alone, normalized = SFMap(**given).for_network(toy.trained("mlp")), SFMap(**given).for_network(toy.trained("cnn"))
    assert (alone.steps, alone.restyled) == without
    assert (normalized.steps, normalized.restyled) == with_batch_norm
    assert alone.for_network(toy.trained("mlp")) == alone
