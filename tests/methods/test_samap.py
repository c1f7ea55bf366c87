"""SA-MAP's loss, written out again in numpy, and the batches it is computed on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from tests.methods import toy
from torch import Tensor, nn

from modelfence import SAMap, protect
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods import samap
from modelfence.methods.labelled import labelled_steps, shares
from modelfence.methods.loop import Session


def session(**targets: object) -> Session:
    return Session(
        Fabric(accelerator="cpu", devices=1),
        authorized=as_domain(toy.blobs(80, seed=1), name="authorized"),
        unauthorized={name: as_domain(data, name=name) for name, data in targets.items()},
    )


def two_targets() -> Session:
    return session(near=toy.blobs(80, seed=2), far=toy.blobs(80, seed=3, inverted=True))


def log_softmax(logits: Tensor) -> np.ndarray:
    array = logits.detach().double().numpy()
    array = array - array.max(1, keepdims=True)
    return array - np.log(np.exp(array).sum(1, keepdims=True))


def mean_ce(logits: Tensor, labels: Tensor) -> np.ndarray:
    return -log_softmax(logits)[np.arange(len(labels)), labels.numpy()]


def cut_network(kind: str) -> MaskedModel:
    masked = MaskedModel(toy.trained(kind))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for score in masked.scores:
            score[torch.rand(score.shape, generator=generator) < 0.4] = 0
    return masked


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("clamp", ["batch", "sample"])
@pytest.mark.parametrize("source_loss", ["cross_entropy", "distillation"])
@pytest.mark.parametrize("both", [True, False])
def test_the_terms_are_those_of_the_equation(kind, clamp, source_loss, both):
    config = SAMap(batch_size=16, clamp=clamp, source_loss=source_loss, ascent=0.7, limit=1.3, precision="fp32")
    run, masked = two_targets(), cut_network(kind)
    step = next(labelled_steps(config, run, 0))
    terms = samap._terms(masked, masked, step, config, run, both=both)
    assert set(terms) == {"source", "target"} | ({"source_batch", "target_batch"} if both else set())

    train = toy.trained(kind)
    for name, kept in masked.kept().items():
        train.get_parameter(name).data.masked_fill_(~kept, 0)
    for suffix in ("", "_batch") if both else ("",):
        for module in train.modules():
            module.train(suffix == "_batch" and isinstance(module, nn.BatchNorm2d))
        logits = [train(images) for images in step.groups]
        if source_loss == "cross_entropy":
            source = mean_ce(logits[0], step.labels[0]).mean()
        else:
            teacher, student = log_softmax(toy.trained(kind)(step.groups[0])), log_softmax(logits[0])
            source = (np.exp(teacher) * (teacher - student)).sum(1).mean()
        ascents = []
        for index in (1, 2):
            each = 0.7 * mean_ce(logits[index], step.labels[index])
            ascents.append(min(each.mean(), 1.3) if clamp == "batch" else np.minimum(each, 1.3).mean())
        assert terms[f"source{suffix}"].item() == pytest.approx(source, rel=1e-3, abs=1e-5)
        assert terms[f"target{suffix}"].item() == pytest.approx(-np.mean(ascents), rel=1e-3)


def test_half_a_batch_is_authorized_and_the_targets_share_the_rest_equally():
    run = two_targets()
    steps = labelled_steps(SAMap(batch_size=16, seed=4), run, 0)
    first, second = next(steps), next(steps)
    assert [len(group) for group in first.groups] == [8, 4, 4]
    assert [len(labels) for labels in first.labels] == [8, 4, 4]
    assert not torch.equal(first.groups[0], second.groups[0])
    again = next(labelled_steps(SAMap(batch_size=16, seed=4), run, 1))
    assert all(map(torch.equal, again.groups, second.groups))
    assert all(map(torch.equal, again.labels, second.labels))
    other = next(labelled_steps(SAMap(batch_size=16, seed=5), run, 0))
    assert not torch.equal(first.groups[0], other.groups[0])


def test_what_does_not_divide_goes_to_the_first_targets():
    assert shares(8, 3) == [3, 3, 2]
    assert shares(8, 1) == [8]


def test_a_batch_too_small_for_its_domains_is_refused():
    with pytest.raises(InputError, match="batch_size 6 leaves 1 .* each of 2 unauthorized domains.*masks='one_each'"):
        samap.learn_source_available(toy.trained("mlp"), SAMap(batch_size=6, steps=1), two_targets())


def test_a_domain_without_labels_is_named():
    blind = as_domain([(toy.blobs(32).tensors[0],)], name="blind")
    run = Session(Fabric(accelerator="cpu", devices=1), as_domain(toy.blobs(80), name="authorized"), {"blind": blind})
    with pytest.raises(InputError, match="domain 'blind' has no labels"):
        next(labelled_steps(SAMap(batch_size=8), run, 0))


@pytest.mark.parametrize(
    ("given", "without", "with_batch_norm"),
    [
        ({}, 936, 300),
        ({"steps": 7}, 7, 7),
        ({"without_batch_norm": None}, 300, 300),
        ({"recipe": "paper"}, 936, 936),
        ({"recipe": "ownership"}, 750, 750),
    ],
)
def test_steps_without_batch_norm_are_the_papers_unless_given(given, without, with_batch_norm):
    alone, normalized = SAMap(**given).for_network(toy.trained("mlp")), SAMap(**given).for_network(toy.trained("cnn"))
    assert (alone.steps, normalized.steps) == (without, with_batch_norm)
    assert alone.for_network(toy.trained("mlp")) == alone
    assert replace(SAMap(**given), steps=7).for_network(toy.trained("mlp")).steps == 7


def test_without_batch_norm_the_default_learns_the_papers_mask():
    """All of the recipe's values are replaced: not only those that are known to this test."""
    default, paper = SAMap().for_network(toy.trained("mlp")), SAMap(recipe="paper")
    assert replace(default, recipe="paper", batch_statistics=False) == paper
    assert (default.ascent, default.limit, default.learning_rate) == (0.1, 1.0, 1e-4)
    assert (default.source_loss, default.clamp, default.scale) == ("cross_entropy", "sample", "mean")
    given = {"ascent": 0.7, "decay": 0.25, "learning_rate": 5e-4, "seed": 3}
    kept = SAMap(**given).for_network(toy.trained("mlp"))
    assert {name: getattr(kept, name) for name in given} == given


def test_the_ownership_recipe_is_eq_7_for_each_image_until_its_class_cannot_win():
    """The bound, by hand: a class with probability below 1/K can't be the most probable one."""
    config = SAMap(recipe="ownership")
    assert (config.batch_statistics, config.clamp, config.source_loss) == (False, "sample", "distillation")
    assert config.limit_for(10) / config.ascent > math.log(10)


def test_batch_statistics_follow_the_network_unless_asked_for(monkeypatch):
    seen: list[bool] = []

    def spy(*_: object, both: bool) -> dict[str, Tensor]:
        seen.append(both)
        raise KeyboardInterrupt

    monkeypatch.setattr(samap, "_terms", spy)
    for kind, config in [
        ("cnn", SAMap(batch_statistics=None)),
        ("mlp", SAMap(batch_statistics=None)),
        ("cnn", SAMap(batch_statistics=False)),
        ("mlp", SAMap(batch_statistics=True)),
        ("cnn", SAMap(recipe="paper")),
    ]:
        with pytest.raises(KeyboardInterrupt):
            samap.learn_source_available(toy.trained(kind), config, two_targets())
    assert seen == [True, False, False, True, False]


@pytest.mark.parametrize("masks", ["joint", "one_each"])
def test_a_target_that_is_the_source_is_warned_of_and_the_source_is_kept(masks):
    """With and without a held-out part; another domain beside it is not named."""
    model, source = toy.trained("mlp"), toy.blobs(100, seed=1)
    for held_out in (0.0, 0.1):
        found = protect(
            model,
            authorized=source,
            unauthorized={"same": source, "other": toy.blobs(100, seed=1, inverted=True)},
            method=SAMap(steps=40, learning_rate=1e-3, masks=masks, held_out=held_out),
        )
        assert [text.split(" has images of")[0] for text in found.warnings] == ["unauthorized domain 'same'"]
        assert toy.accuracy(found.model, toy.blobs(seed=5)) > 0.95
