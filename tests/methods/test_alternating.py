"""Algorithm 1's generators: what they learn, what they leave alone, and that they resume exactly."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from pydantic import ValidationError
from tests import processes
from tests.methods import toy
from tests.methods.generating import GREY, NETWORKS, config, fabric
from torch import Tensor, nn

from modelfence.errors import NonFiniteError
from modelfence.losses.classification import distillation
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.alternating import Alternating
from modelfence.methods.loop import Learned, Session, learn_scores


def made(kind: str = "linear", precision: str = "32-true", **values: Any) -> tuple[Alternating, MaskedModel]:
    make, spec = NETWORKS[kind]
    model = make()
    reduced = torch.bfloat16 if precision == "bf16-mixed" else None
    return Alternating(model, config(**values), spec, fabric(precision)), MaskedModel(model, dtype=reduced)


def with_cuts(masked: MaskedModel, share: float = 0.3) -> MaskedModel:
    """Cut random weights, so that teacher and student differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for score in masked.scores:
            score[torch.rand(score.shape, generator=generator) < share] = 0.0
    return masked


def mean_terms(alternating: Alternating, masked: MaskedModel, numbers: range) -> dict[str, float]:
    seen: list[dict[str, Tensor]] = []
    for number in numbers:
        alternating.step(masked, number)
        seen.append(alternating.terms)
    return {name: float(torch.stack([terms[name] for terms in seen]).mean()) for name in seen[0]}


# What comes out, and what stays


@pytest.mark.parametrize("generators", ["both", "fresh", "memory"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_images_for_networks_of_all_kinds(kind, generators):
    alternating, masked = made(kind, generators=generators, batch_norm_weight=1.0, activation_weight=0.1)
    spec = NETWORKS[kind][1]
    base, scores = digest_of(masked.base), [score.detach().clone() for score in masked.scores]
    for number in range(2):
        images = alternating.step(masked, number)
        assert images.shape == (8, *spec.shape)
        assert images.dtype == torch.float32
        assert not images.requires_grad
        unit = spec.to_unit(images)
        assert unit.min() >= -1e-6
        assert unit.max() <= 1 + 1e-6
    assert all(value.isfinite() for value in alternating.terms.values())
    assert ("distance" in alternating.terms) == (kind == "BatchNorm")
    assert ("forgotten" in alternating.terms) == (generators != "fresh")
    assert digest_of(masked.base) == base
    assert all(score.grad is None and score.requires_grad for score in masked.scores)
    assert all(map(torch.equal, masked.scores, scores))
    assert not any(module.training or module._forward_hooks for module in masked.base.modules())


def test_bfloat16_works_on_masked_weights_in_bfloat16():
    alternating, masked = made("BatchNorm", "bf16-mixed", activation_weight=0.1, batch_norm_weight=0.1)
    assert masked.base[0].weight.dtype == torch.bfloat16
    images = alternating.step(masked, 0)
    assert images.dtype == torch.float32
    assert all(value.isfinite() and value.dtype == torch.float32 for value in alternating.terms.values())


@pytest.mark.parametrize(("batch", "synthesis"), [(4, 2), (5, 2), (6, 3), (16, 64), (30, 7)])
def test_the_mask_gets_half_a_batch_whatever_the_generators_learn_from(batch, synthesis):
    for generators in ("both", "fresh", "memory"):
        alternating, masked = made(batch_size=batch, synthesis_batch=synthesis, generators=generators)
        assert len(alternating.step(masked, 0)) == batch // 2


def test_half_is_fresh_and_half_remembered():
    """Both kinds of a step are those that one generator alone makes with the same weights and numbers."""
    seen = []
    for rate in (1e-9, 1.0):  # of the memory: its next images change, the fresh ones don't
        alternating, masked = made(memory_learning_rate=rate)
        alternating.step(masked, 0)
        seen.append(alternating.step(masked, 1))
    same = [torch.equal(one, other) for one, other in zip(*seen, strict=True)]
    assert same == [True] * 4 + [False] * 4


def test_the_same_seed_makes_the_same_images_and_touches_no_global_randomness():
    model = toy.trained("mlp")
    masked, runs = MaskedModel(model), []
    for _ in range(2):
        torch.rand(3)
        before = torch.random.get_rng_state()
        alternating = Alternating(model, config(), GREY, fabric())
        runs.append([alternating.step(masked, number) for number in range(2)])
        assert torch.equal(torch.random.get_rng_state(), before)
    one, two = runs
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], one[1])
    other, masked = made(seed=1)
    assert not torch.equal(other.step(masked, 0), one[0])


def test_every_step_draws_anew_even_where_nothing_is_learned():
    alternating, masked = made(fresh_learning_rate=1e-12, memory_learning_rate=1e-12)
    first, second, again = (alternating.step(masked, number) for number in (0, 1, 0))
    assert ((first - second).abs().amax(dim=(1, 2, 3)) > 1e-2).all()
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize("generators", ["both", "fresh", "memory"])
def test_a_look_changes_nothing_and_is_always_the_same(generators):
    alternating, masked = made("BatchNorm", generators=generators)
    alternating.step(masked, 0)
    before = {name: value.clone() for name, value in alternating.state().items()}
    first, second = alternating.look(9), alternating.look(9)
    assert torch.equal(first, second)
    assert first.shape == (9, *GREY.shape)
    assert not first.requires_grad
    after = alternating.state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert alternating._fresh.network.training
    seen = [alternating.step(masked, 1)]
    again, masked = made("BatchNorm", generators=generators)
    again.step(masked, 0)
    seen.append(again.step(masked, 1))
    assert torch.equal(*seen)


# What is learned


def test_the_fresh_generator_gets_better_at_equation_2():
    alternating, masked = made(generators="fresh", fresh_learning_rate=5e-3, synthesis_batch=64, disagreement=0.0)
    early = mean_terms(alternating, masked, range(5))
    mean_terms(alternating, masked, range(5, 60))
    late = mean_terms(alternating, masked, range(60, 65))
    best = -5 * math.log(toy.CLASSES)  # sure of every image, and all classes alike
    assert best < sum(late.values()) < best + 0.7 * (sum(early.values()) - best)
    assert late["unsure"] < early["unsure"]
    assert best < late["unbalanced"] < early["unbalanced"]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_disagreement_is_sought_or_avoided_by_its_sign(sign):
    settings = {"confidence_weight": 0.0, "balance_weight": 0.0, "generators": "fresh", "synthesis_batch": 32}
    alternating, masked = made(disagreement=sign, fresh_learning_rate=5e-3, **settings)
    with_cuts(masked)
    early = mean_terms(alternating, masked, range(3))["disagreement"]
    mean_terms(alternating, masked, range(3, 40))
    late = mean_terms(alternating, masked, range(40, 43))["disagreement"]
    assert late < early  # minimized as it is weighted
    assert 0 <= late * sign <= math.log(2) + 1e-6


def test_without_disagreement_the_scores_do_not_matter():
    images = []
    for share in (0.0, 0.5):
        alternating, masked = made(disagreement=0.0)
        with_cuts(masked, share)
        images.append([alternating.step(masked, number) for number in range(3)][-1])
    assert torch.equal(*images)


def test_batch_norm_statistics_are_matched():
    settings = {"generators": "fresh", "fresh_learning_rate": 5e-3, "synthesis_batch": 32}
    alternating, masked = made("BatchNorm", batch_norm_weight=10.0, **settings)
    early = mean_terms(alternating, masked, range(3))["distance"]
    mean_terms(alternating, masked, range(3, 40))
    assert mean_terms(alternating, masked, range(40, 43))["distance"] < 0.5 * early


def test_the_memory_gets_better_at_equation_3():
    alternating, masked = made("BatchNorm", memory_learning_rate=5e-3, fresh_learning_rate=1e-6, synthesis_batch=32)
    early = mean_terms(alternating, masked, range(3))["forgotten"]
    mean_terms(alternating, masked, range(3, 60))
    assert mean_terms(alternating, masked, range(60, 63))["forgotten"] < 0.7 * early


def test_equation_3_compares_the_layers_that_are_wanted():
    found = {}
    for layers in ((), ("0",), None):
        alternating, masked = made("BatchNorm", memory_layers=layers)
        alternating.step(masked, 0)
        found[layers] = (alternating.layers, float(alternating.terms["forgotten"]))
    assert [layers for layers, _ in found.values()] == [(), ("0",), ("0", "5")]
    assert found[()][1] < found[("0",)][1] < found[None][1]


def test_memory_alone_still_shows_it_what_is_fresh():
    alternating, masked = made(generators="memory", fresh_learning_rate=1e-2)
    before = {name: value.clone() for name, value in alternating.state().items()}
    alternating.step(masked, 0)
    after = alternating.state()
    for part in ("fresh", "memory"):
        weights = [name for name in before if name.startswith(f"{part}/network") and name.endswith("weight")]
        assert weights
        assert any(not torch.equal(before[name], after[name]) for name in weights)


def test_fresh_alone_has_no_memory():
    alternating, _ = made(generators="fresh", memory_layers=("nowhere",))
    assert alternating.layers == ()
    assert all(name.startswith("fresh/") for name in alternating.state())


@pytest.mark.parametrize("values", [{"generators": "none"}, {"latent": 0}, {"width": 7}, {"memory_pull": -1.0}])
def test_impossible_settings_are_refused(values):
    with pytest.raises(ValidationError, match=next(iter(values))):
        config(**values)


# In the loop


def learn(alternating: Alternating, model: nn.Module, at: int = -1, **parts: Any) -> Learned:
    """Learn on generated images alone; break off after a step."""

    def loss(student: nn.Module, masked: MaskedModel, number: int) -> dict[str, Tensor]:
        images = alternating.step(masked, number)
        if number == at:
            raise KeyboardInterrupt  # as by kill: nothing is saved now
        with torch.no_grad():
            teacher = masked.teacher(images)
        return {"source": distillation(teacher, student(images)), "pull": student(images[:2]).mean()}

    def batches(start: int) -> Any:
        return iter(range(start, 1000))

    settings = alternating._config
    session = Session(fabric(), **parts)
    return learn_scores(model, settings, session, batches=batches, loss=loss, companion=alternating)


@pytest.mark.parametrize("generators", ["both", "fresh"])
@pytest.mark.parametrize("at", [3, 4])
def test_a_killed_run_goes_on_to_the_same_mask_and_generators(tmp_path: Path, at, generators):
    settings = {"learning_rate": 2e-3, "generators": generators}
    file = tmp_path / "state.safetensors"
    model = toy.trained("cnn")

    def fresh() -> Alternating:
        return Alternating(model, config(**settings), GREY, fabric())

    whole = fresh()
    expected = learn(whole, model)
    with pytest.raises(KeyboardInterrupt):
        learn(fresh(), model, at, state_file=file)
    rest = fresh()
    resumed = learn(rest, model, state_file=file, resume=True)
    assert min(kept.float().mean() for kept in expected.kept.values()) < 1
    assert all(torch.equal(resumed.kept[name], kept) for name, kept in expected.kept.items())
    assert [{**row, "seconds": 0} for row in resumed.history] == [{**row, "seconds": 0} for row in expected.history]
    ended = whole.state()
    assert ended.keys() == rest.state().keys()
    assert all(torch.equal(value, ended[name]) for name, value in rest.state().items())


def test_generators_that_broke_are_named_and_not_saved(tmp_path):
    model, file = toy.trained("mlp"), tmp_path / "state.safetensors"
    alternating = Alternating(model, config(), GREY, fabric())

    def loss(student: nn.Module, masked: MaskedModel, number: int) -> dict[str, Tensor]:
        if number == 3:
            next(alternating._memory.network.parameters()).data.fill_(float("nan"))
        return {"source": student(torch.zeros(2, 1, 8, 8)).mean()}

    with pytest.raises(NonFiniteError, match=r"step 4: 'memory/network/encoder.*' became NaN or infinite; lower"):
        learn_scores(
            model,
            config(),
            Session(fabric(), state_file=file),
            batches=lambda start: iter(range(start, 9)),
            loss=loss,
            companion=alternating,
        )
    assert file.exists()  # of step 2


# Several processes


def ranks_learn() -> dict[str, Any]:
    os.environ["MASTER_PORT"] = "0"
    joined = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(broadcast_buffers=False))
    joined.launch()
    model = toy.trained("mlp")
    alternating, masked = Alternating(model, config(), GREY, joined), MaskedModel(model)
    images = [alternating.step(masked, number) for number in range(3)]
    weights = {name: value for name, value in alternating.state().items() if "running_" not in name}
    return {"images": images[-1], "weights": weights}


def test_processes_draw_images_of_their_own_and_keep_the_same_generators(tmp_path):
    first, second = processes.ranks(ranks_learn, folder=tmp_path)
    assert not torch.equal(first["images"], second["images"])
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    alone, masked = made()
    for number in range(3):
        alone.step(masked, number)
    name = next(name for name in first["weights"] if name.endswith("_linear.weight"))
    assert not torch.equal(first["weights"][name], alone.state()[name])
