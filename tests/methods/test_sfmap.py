"""What SF-MAP's settings are for a network, before anything is made."""

import pytest
from tests.methods import toy
from tests.methods.generating import GREY

from modelfence import SFMap, protect
from modelfence.errors import InputError
from modelfence.methods import sfmap


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


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("cnn", {"generated": 30, "translated": 0}),
        ("mlp", {"generated": 20, "restyled": 10}),
        ("mlp", {"generated": 33}),
    ],
)
def test_too_few_images_near_the_source_are_refused_before_any_is_made(monkeypatch, kind, values):
    def made(*_, **__):
        pytest.fail("work was begun")

    monkeypatch.setattr(sfmap, "pseudo_source", made)
    monkeypatch.setattr(sfmap, "_require_another_domain", lambda *_: None)
    method = SFMap(**{"restyled": 0, **values})
    with pytest.raises(InputError, match=r"images near the source would be left .* a step takes 32: raise generated"):
        protect(toy.trained(kind), unauthorized=[(toy.blobs(80).tensors[0],)], image=GREY, method=method)
