"""Algorithm 2's neighbour domains: directions, what is learned, what is left alone, and that they resume exactly."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from tests import processes
from tests.methods import toy
from tests.methods.generating import GREY, NETWORKS, config, fabric
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.losses.discrepancy import class_mmd
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.alternating import Alternating
from modelfence.methods.diverse import DiverseStyles, Estimator
from modelfence.methods.features import features_of
from modelfence.methods.loop import Learned, Session, learn_scores
from modelfence.methods.terms import unlearning
from modelfence.methods.trainee import Companions


def styles_of(model: nn.Module, spec: ImageSpec = GREY, on: Fabric | None = None, **values: Any) -> DiverseStyles:
    return DiverseStyles(model, spec, on or fabric(), **{"directions": 2, **values})


def made(kind: str = "linear", precision: str = "32-true", **values: Any) -> tuple[DiverseStyles, MaskedModel]:
    make, spec = NETWORKS[kind]
    model = make()
    reduced = torch.bfloat16 if precision == "bf16-mixed" else None
    return styles_of(model, spec, fabric(precision), **values), MaskedModel(model, dtype=reduced)


def images_for(kind: str = "linear", count: int = 12, seed: int = 0) -> Tensor:
    if kind in ("linear", "BatchNorm"):
        return toy.blobs(count, seed=seed).tensors[0].clamp(-0.5, 1.5)
    spec = NETWORKS[kind][1]
    return spec.from_unit(torch.rand(count, *spec.shape, generator=torch.Generator().manual_seed(seed)))


def shifts(around: DiverseStyles) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in around.state().items() if name.startswith("diversity/network/bran")}


@pytest.mark.parametrize("kind", NETWORKS)
def test_images_and_labels_for_networks_of_all_kinds(kind):
    around, masked = made(kind, directions=3)
    base, images = digest_of(masked.base), images_for(kind)
    for number in range(2):
        styled = around.step(masked, images, number)
    assert styled.images.shape == (36, *images.shape[1:])
    assert styled.images.dtype == torch.float32
    assert not styled.images.requires_grad
    unit = NETWORKS[kind][1].to_unit(styled.images)
    assert unit.min() >= -1e-5
    assert unit.max() <= 1 + 1e-5
    expected = masked.teacher(images).argmax(1)
    assert torch.equal(styled.labels, torch.cat([expected] * 3))
    first, second, third = styled.images.split(12)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert all(value.isfinite() for value in around.terms.values())
    assert digest_of(masked.base) == base
    assert all(score.grad is None and score.requires_grad for score in masked.scores)
    assert not any(module.training for module in masked.base.modules())


def test_bfloat16_works_on_masked_weights_in_bfloat16():
    around, masked = made("BatchNorm", "bf16-mixed")
    styled = around.step(masked, images_for("BatchNorm"), 0)
    assert styled.images.dtype == torch.float32
    assert all(value.isfinite() and value.dtype == torch.float32 for value in around.terms.values())


def test_the_student_does_not_matter():
    runs = []
    for share in (0.0, 0.5):
        around, masked = made()
        for score in masked.scores:
            score.data[torch.rand(score.shape, generator=torch.Generator().manual_seed(0)) < share] = 0.0
        runs.append([around.step(masked, images_for(), number).images for number in range(3)])
    assert all(map(torch.equal, *runs))


def test_the_same_seed_gives_the_same_images_and_touches_no_global_randomness():
    model, runs = toy.trained("mlp"), []
    for _ in range(2):
        torch.rand(3)
        before = torch.random.get_rng_state()
        around = styles_of(model)
        runs.append([around.step(MaskedModel(model), images_for(), number).images for number in range(2)])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, *runs))
    assert not torch.equal(runs[0][0], runs[0][1])
    other, masked = made(seed=1)
    assert not torch.equal(other.step(masked, images_for(), 0).images, runs[0][0])


def test_every_step_styles_anew_even_where_nothing_is_learned():
    around, masked = made(learning_rate=1e-12)
    first, second, again = (around.step(masked, images_for(), number).images for number in (0, 1, 0))
    assert ((first - second).abs().amax(dim=(1, 2, 3)) > 1e-2).all()
    torch.testing.assert_close(first, again)


def test_a_look_changes_nothing_and_is_always_the_same():
    around, masked = made()
    around.step(masked, images_for(), 0)
    before = {name: value.clone() for name, value in around.state().items()}
    first, second = around.look(images_for()), around.look(images_for())
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert first.shape == images_for().shape
    assert all(torch.equal(value, before[name]) for name, value in around.state().items())


# Directions


def test_each_direction_leaves_its_first_parts_as_they_are():
    """In direction d of 4 the first d channels of the shifts stay, the others move."""
    around, masked = made(directions=4)
    network = around._diversity.network
    channels = network.branches[0].mean.shape[0]
    assert channels == 4
    moved: list[list[bool]] = []
    learn = around._learn

    def watched(direction: int, *rest: Tensor) -> None:
        before = network.branches[0].mean.detach().clone()
        learn(direction, *rest)
        changed = network.branches[0].mean.detach() != before
        moved.append([bool(changed[channel].any()) for channel in range(channels)])

    around._learn = watched  # type: ignore[method-assign]
    around.step(masked, images_for(), 0)
    assert moved == [[channel >= direction for channel in range(4)] for direction in range(4)]


def test_images_of_a_direction_are_from_before_its_update():
    slow, masked = made(learning_rate=1e-12)
    quick, _ = made(learning_rate=100.0)
    pair = [around.step(masked, images_for(), 0).images.split(12) for around in (slow, quick)]
    assert torch.equal(pair[0][0], pair[1][0])
    assert not torch.equal(pair[0][1], pair[1][1])


# What is learned


def probe(around: DiverseStyles, masked: MaskedModel, images: Tensor) -> float:
    """Return Eq. 6 averaged over fixed random convolutions."""
    found = []
    with torch.no_grad():
        logits, codes = features_of(masked.base, images)
        for seed in range(8):
            copies = around._diversity.network(images, torch.Generator().manual_seed(1000 + seed))
            found.append(class_mmd(codes, features_of(masked.base, copies)[1], logits.argmax(1)))
    return float(torch.stack(found).mean())


def test_the_shifts_get_better_at_equation_6():
    around, masked = made(information_weight=0.0, learning_rate=1000.0, directions=1)
    images = images_for(count=40)
    early = probe(around, masked, images)
    for number in range(40):
        around.step(masked, images, number)
    assert around.terms["information"] == 0
    assert probe(around, masked, images) < early - 0.2  # most of it is due to the convolutions, which aren't learned


def test_the_estimator_gets_better_at_telling_styled_features():
    around, masked = made(learning_rate=1e-9)
    found = []
    for number in range(60):
        around.step(masked, images_for(count=32, seed=number), number)
        found.append(float(around.terms["estimate"]))
    assert sum(found[-10:]) < sum(found[:10]) - 10


def test_the_scale_of_the_features_changes_nothing():
    """Features ten times as large, and a classifier that takes them so: the same images."""
    model = toy.trained("mlp")
    large = toy.trained("mlp")
    with torch.no_grad():
        for value in large[1].parameters():
            value.mul_(16)
        large[3].weight.div_(16)
    runs = []
    for one in (model, large):
        around = styles_of(one)
        runs.append([around.step(MaskedModel(one), images_for(), number).images for number in range(3)])
    torch.testing.assert_close(runs[0], runs[1])


def test_a_batch_with_one_image_a_class_is_no_trouble():
    around, masked = made()
    around.step(masked, images_for(count=10), 0)
    assert around.terms["semantics"] >= 0
    assert all(value.isfinite().all() for value in around.state().values())


def test_the_estimators_log_variance_is_bounded():
    mean, log_variance = Estimator(4)(1e4 * torch.randn(5, 4))
    assert mean.shape == log_variance.shape == (5, 4)
    assert log_variance.abs().max() <= 1


def test_images_that_are_too_small_are_refused():
    small = ImageSpec(channels=1, height=6, width=6, mean=(0.5,), std=(0.5,))
    with pytest.raises(InputError, match="6 x 6"):
        styles_of(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), small)


# In the loop, together with the generators of Algorithm 1


def learn(companions: Companions, model: nn.Module, at: int = -1, **parts: Any) -> Learned:
    alternating, around = companions._parts["near"], companions._parts["around"]
    settings = config(learning_rate=2e-3)
    session = Session(fabric(), **parts)

    def loss(student: nn.Module, masked: MaskedModel, number: int) -> dict[str, Tensor]:
        near = alternating.step(masked, number)  # type: ignore[attr-defined]
        styled = around.step(masked, near, number)  # type: ignore[attr-defined]
        if number == at:
            raise KeyboardInterrupt
        return {"target": unlearning(styled.labels, settings, session)(student(styled.images))}

    def batches(start: int) -> Any:
        return iter(range(start, 1000))

    return learn_scores(model, settings, session, batches=batches, loss=loss, companion=companions)


@pytest.mark.parametrize("at", [3, 4])
def test_a_killed_run_goes_on_to_the_same_mask(tmp_path: Path, at):
    file = tmp_path / "state.safetensors"
    model = toy.trained("cnn")

    def fresh() -> Companions:
        return Companions(near=Alternating(model, config(), GREY, fabric()), around=styles_of(model))

    whole = fresh()
    expected = learn(whole, model)
    with pytest.raises(KeyboardInterrupt):
        learn(fresh(), model, at, state_file=file)
    rest = fresh()
    resumed = learn(rest, model, state_file=file, resume=True)
    assert min(kept.float().mean() for kept in expected.kept.values()) < 1
    assert all(torch.equal(resumed.kept[name], kept) for name, kept in expected.kept.items())
    ended = whole.state()
    assert ended.keys() == rest.state().keys()
    assert all(torch.equal(value, ended[name]) for name, value in rest.state().items())


# Several processes


def ranks_learn() -> dict[str, Any]:
    os.environ["MASTER_PORT"] = "0"
    joined = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(broadcast_buffers=False))
    joined.launch()
    model = toy.trained("mlp")
    around, masked = styles_of(model, on=joined), MaskedModel(model)
    for number in range(3):
        styled = around.step(masked, images_for(seed=joined.global_rank), number)
    return {"images": styled.images, "weights": around.state(), "shifts": shifts(around)}


def test_processes_style_in_ways_of_their_own_and_keep_the_same_shifts(tmp_path):
    first, second = processes.ranks(ranks_learn, folder=tmp_path)
    assert not torch.equal(first["images"], second["images"])
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    untouched = shifts(styles_of(toy.trained("mlp")))
    assert any(not torch.equal(value, untouched[name]) for name, value in first["shifts"].items())
