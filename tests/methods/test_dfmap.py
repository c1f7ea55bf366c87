"""What a data-free mask keeps and what it unlearns, by what the network tells of its source."""

from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from tests.methods import toy
from tests.methods.generating import GREY

from modelfence import DFMap, protect
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.methods import dfmap
from modelfence.methods.loop import Learned, Session

SMALL: dict[str, Any] = {
    **{"steps": 2, "batch_size": 8, "generated": 64, "translated": 64, "generator_steps": 2, "synthesis_batch": 16},
    **{"drawings": 96, "neighbours": 1024, "outside": 0.0, "precision": "fp32"},
}


@pytest.mark.parametrize(
    ("given", "without", "with_batch_norm"),
    [
        ({}, 16.0, 8.0),
        ({"source_weight": 3.0}, 3.0, 3.0),
        ({"heavier_without_batch_norm": 0.25}, 2.0, 8.0),
        ({"heavier_without_batch_norm": 0.1}, 0.8, 8.0),
        ({"recipe": "paper"}, 1.0, 1.0),
    ],
)
def test_the_recipes_own_weight_is_more_without_batch_norm(given, without, with_batch_norm):
    alone, normalized = DFMap(**given).for_network(toy.trained("mlp")), DFMap(**given).for_network(toy.trained("cnn"))
    assert alone.source_weight == pytest.approx(without)
    assert normalized.source_weight == with_batch_norm
    assert alone.for_network(toy.trained("mlp")) == alone


@pytest.mark.parametrize(
    ("kind", "source", "drawings_are_kept"),
    [("mlp", False, True), ("mlp", True, False), ("cnn", False, False), ("cnn", True, False)],
)
def test_drawings_are_kept_where_nothing_tells_what_the_source_looks_like(monkeypatch, kind, source, drawings_are_kept):
    materials, contents = [], []

    def learn_on(model, config, session, material, image):
        materials.append(material)
        return Learned({}, [])

    def neighbours(judge, pixels, count, **values):
        contents.append(pixels)
        return made(judge, pixels, count, **values)

    made = dfmap.neighbours
    monkeypatch.setattr(dfmap, "learn_on", learn_on)
    monkeypatch.setattr(dfmap, "neighbours", neighbours)
    images = toy.blobs(80, seed=3).tensors[0].clamp(-0.5, 1.5)
    domain = as_domain([(images,)], name="source", image=GREY, labelled=False) if source else None
    session = Session(Fabric(accelerator="cpu", devices=1), domain, image=GREY)
    config = DFMap(**SMALL)
    dfmap.learn_data_free(toy.trained(kind), config, session)

    (material,), (content,) = materials, contents
    drawn = dfmap._drawings(GREY, config)
    near = 80 if source else 64 + (64 if kind == "cnn" else 0)
    assert len(material.near.pixels) == len(material.near.answers) == near + 96 * drawings_are_kept
    assert len(content) == near + 96 * (not drawings_are_kept)
    assert torch.equal((material.near.pixels if drawings_are_kept else content)[-96:], drawn)


@pytest.mark.parametrize(
    ("kind", "given", "values", "text"),
    [
        ("cnn", 20, {}, "18 images, fewer than one batch of 32"),
        ("mlp", 20, {"recipe": "paper", "batch_size": 40}, "18 images, fewer than one batch of 20"),
        ("cnn", None, {"generated": 30, "translated": 0}, "27 images near .* 30 made at most; a step takes 32"),
        ("mlp", None, {"generated": 6, "drawings": 64, "batch_size": 128}, "63 .* 70 made at most; a step takes 64"),
    ],
)
def test_too_few_images_are_refused_before_any_is_made(monkeypatch, kind, given, values, text):
    def judged(*_):
        pytest.fail("work was begun")

    monkeypatch.setattr(dfmap, "judge_of", judged)
    source = None if given is None else toy.blobs(given)
    with pytest.raises(InputError, match=text):
        protect(toy.trained(kind), authorized=source, image=GREY, method=DFMap(**values))
