"""The paper's recipes without a source: what they learn from, what each switch does, and that they resume exactly."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from pydantic import TypeAdapter, ValidationError
from tests import processes
from tests.methods import toy
from tests.methods.blind import Blind
from tests.methods.generating import GREY, RGB, convolutional
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from modelfence import DFMap, ImageSpec, SFMap, protect
from modelfence.errors import InputError
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods import paper_recipe
from modelfence.methods.loop import Session
from modelfence.methods.synthetic import judge_of

IMAGE = GREY
TINY: dict[str, Any] = {
    "recipe": "paper",
    "steps": 6,
    "batch_size": 16,
    "synthesis_batch": 12,
    "latent": 6,
    "width": 8,
    "evaluate_every": 2,
    "learning_rate": 2e-3,
    "precision": "fp32",
}
SETTINGS: dict[str, type[SFMap | DFMap]] = {"source-free": SFMap, "data-free": DFMap, "source only": DFMap}


def images(count: int = 80, *, inverted: bool = True) -> Tensor:
    return toy.blobs(count, seed=3, inverted=inverted).tensors[0].clamp(-0.5, 1.5)


def domain(values: Tensor | None = None, spec: ImageSpec = IMAGE) -> Blind:
    return Blind(images() if values is None else values, spec)


def given(setting: str, some: Blind | None = None) -> dict[str, Any]:
    """Return what is given in a setting."""
    name = {"source-free": "unauthorized", "source only": "authorized"}.get(setting)
    return {} if name is None else {name: some or domain(images(inverted=setting == "source-free"))}


def method(setting: str, **values: Any) -> SFMap | DFMap:
    more = {} if setting == "source-free" else {"directions": 2}
    return SETTINGS[setting](**{**TINY, **more, **values})


def learn(setting: str, model: nn.Module | None = None, **values: Any) -> Any:
    model = model or toy.trained("cnn")
    return protect(model, image=IMAGE, method=method(setting, **values), **given(setting))


# The configuration


@pytest.mark.parametrize("kind", [SFMap, DFMap])
def test_the_recipe_is_the_papers(kind):
    expected = {
        "ascent": 0.1,
        "limit": 1.0,
        "scale": "elementwise",
        "clamp": "batch",
        "batch_size": 32,
        "learning_rate": 1e-4,
        "decay": 0.0,
        "batch_statistics": False,
        "tolerance": None,
        "source_weight": 1.0,
        "generators": "both",
        "disagreement": 1.0,
    }
    paper = kind(recipe="paper")
    assert {name: getattr(paper, name) for name in expected} == expected
    assert kind(recipe="paper").limit_for(10) == 10


UNUSED = {
    SFMap: {"default": {"latent": 5, "generators": "fresh", "memory_layers": ["0"], "disagreement": -1.0}},
    DFMap: {"default": {"width": 16, "directions": 2, "semantic_weight": 0.5, "diversity_learning_rate": 1.0}},
}
UNUSED[SFMap]["paper"] = {"generated": 5, "translated": 0, "restyled": 5, "generator_steps": 3, "restyled_weight": 2.0}
UNUSED[DFMap]["paper"] = {"generated": 5, "drawings": 70, "neighbours": 70, "outside": 0.5}


@pytest.mark.parametrize(
    ("kind", "recipe", "name"),
    [(kind, recipe, name) for kind, by in UNUSED.items() for recipe, names in by.items() for name in names],
)
def test_a_value_that_the_recipe_does_not_use_is_refused(kind, recipe, name):
    other = "default" if recipe == "paper" else "paper"
    value = UNUSED[kind][recipe][name]
    text = f"{name} has no effect with recipe='{recipe}': leave it out, or choose recipe='{other}'"
    with pytest.raises(ValidationError, match=text) as caught:
        kind(recipe=recipe, **{name: value})
    assert len(caught.value.errors()) == 1
    chosen = getattr(kind(recipe=other, **{name: value}), name)
    assert chosen == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("kind", [SFMap, DFMap])
def test_every_field_is_of_both_recipes_or_of_one(kind):
    fields = {one.name for one in dataclasses.fields(kind)}
    default, paper = kind.ONLY["default"], kind.ONLY["paper"]
    assert default | paper < fields
    assert not default & paper


@pytest.mark.parametrize("kind", [SFMap, DFMap])
@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_a_configuration_written_out_is_read_back(kind, recipe):
    config = kind(recipe=recipe, steps=7)
    written = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    assert TypeAdapter(kind).validate_python(written) == config
    assert dataclasses.replace(config, seed=3) == kind(recipe=recipe, steps=7, seed=3)


@pytest.mark.parametrize("kind", [SFMap, DFMap])
@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_a_recipe_fills_what_is_not_given_and_nothing_else(kind, recipe):
    config, values = kind(recipe=recipe), kind.RECIPES[recipe]
    for field in dataclasses.fields(kind):
        if field.name != "recipe":
            assert getattr(config, field.name) == values.get(field.name, field.default), field.name


# What it is learned from


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_no_label_is_looked_at_and_the_model_stays(setting, kind):
    model = toy.trained(kind)
    before = digest_of(model)
    result = learn(setting, model)
    assert digest_of(model) == before
    assert [row["step"] for row in result.history] == [2, 4, 6]
    target = "blind" if setting == "source-free" else "neighbours"
    row = result.history[-1]
    assert {"source", "target", "source_agreement", f"target_agreement:{target}", "gap"} <= row.keys()
    assert not {name for name in row if name.endswith("_batch")}
    assert result.mask.cut_share() > 0


def session(setting: str) -> Session:
    parts = {name: {"blind": one} if name == "unauthorized" else one for name, one in given(setting).items()}
    return Session(Fabric(accelerator="cpu", devices=1), image=IMAGE, **parts)


@pytest.mark.parametrize("terms", ["both", "source", "target"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_terms_are_those_of_the_equations(setting, terms, monkeypatch):
    """Eq. 4 written out in numpy, on the images that the step generated."""
    model, run = toy.trained("mlp"), session(setting)
    config = method(setting, terms=terms, ascent=0.3, limit=0.05)
    near_at: list[Tensor] = []
    turns = turns_of(model, config, run)
    if turns.alternating is not None:
        step = turns.alternating.step
        monkeypatch.setattr(turns.alternating, "step", lambda *some: near_at.append(step(*some)) or near_at[-1])
    masked = cut(MaskedModel(model))
    given_now = next(turns.batches(0))
    if given_now.near is not None:
        near_at.append(given_now.near[0])
    styled = []
    if turns.styles is not None:
        restyle = turns.styles.step
        monkeypatch.setattr(turns.styles, "step", lambda *some: styled.append(restyle(*some)) or styled[-1])
    found = {name: value.item() for name, value in turns.loss(masked, masked, given_now).items()}

    near = near_at[0]
    assert len(near) == 8
    teacher, student = log_softmax(model(near)), log_softmax(masked(near))
    expected = {"source": (np.exp(teacher) * (teacher - student)).sum(1).mean()}
    if styled:
        far, labels = styled[0].images, np.eye(10)[styled[0].labels.numpy()]
        assert len(far) == 16
        assert np.array_equal(labels, np.eye(10)[np.tile(teacher.argmax(1), 2)])
    else:
        far, labels = given_now.targets[0][0], given_now.targets[0][1].double().numpy()
    each = -(labels * log_softmax(masked(far))).sum(1)
    expected["target"] = -min(0.3 * each.mean(), 0.05 * 10)
    wanted = {"both": ("source", "target")}.get(terms, (terms,))
    assert found == pytest.approx({name: expected[name] for name in wanted}, rel=1e-4, abs=1e-6)


def turns_of(model: nn.Module, config: SFMap | DFMap, run: Session) -> Any:
    """Return what a run makes of its settings."""
    kept: list[Any] = []

    class StoppedError(Exception):
        pass

    def stop(*_: Any, batches: Any, **__: Any) -> None:
        kept.append(batches.__self__)
        raise StoppedError

    learn_scores, paper_recipe.learn_scores = paper_recipe.learn_scores, stop  # type: ignore[assignment]
    try:
        from modelfence.methods.registry import METHODS

        with pytest.raises(StoppedError):
            METHODS[type(config)].learn(model, config, run)
    finally:
        paper_recipe.learn_scores = learn_scores
    return kept[0]


def cut(masked: MaskedModel, share: float = 0.3) -> MaskedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for score in masked.scores:
            score[torch.rand(score.shape, generator=generator) < share] = 0.0
    return masked


def log_softmax(logits: Tensor) -> np.ndarray:
    array = logits.detach().double().numpy()
    array = array - array.max(1, keepdims=True)
    return array - np.log(np.exp(array).sum(1, keepdims=True))


def test_a_batch_of_targets_comes_with_pseudo_labels_of_both_kinds():
    """An image that the model is sure of has its class, another the mean over augmented copies."""
    model, run = toy.trained("mlp"), session("source-free")
    with torch.no_grad():
        model[3].weight.mul_(0.5)
    confidence = judge_of(model, IMAGE, run).logits(IMAGE.denormalize(images())).softmax(1).amax(1)
    delta = float(confidence.median()) + 1e-4
    turns = turns_of(model, method("source-free", pseudo_threshold=delta, pseudo_augmentations=3), run)
    rest, aside = turns.targets["blind"]
    answers = torch.cat([rest.answers, aside.answers])
    assert (answers.amax(1) == 1).sum() == (confidence >= delta).sum() < 80
    assert (answers.amax(1) == 1).any()
    torch.testing.assert_close(answers.sum(1), torch.ones(len(answers)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_was_made_can_be_looked_at(setting):
    said: list[str] = []
    result = protect(toy.trained("cnn"), image=IMAGE, method=method(setting), announce=said.append, **given(setting))
    made = result.synthetic
    wanted = {"source-free": {"generated"}, "data-free": {"generated", "neighbours"}, "source only": {"neighbours"}}
    assert set(made.samples) == set(made.facts) == wanted[setting]
    assert all(len(some.images) == len(some.classes) > 0 for some in made.samples.values())
    assert result.warnings == ()
    assert said == []


@pytest.mark.parametrize("setting", ["data-free", "source only"])
def test_real_source_images_replace_the_generators(setting):
    turns = turns_of(toy.trained("mlp"), method(setting), session(setting))
    state = turns.companion().state()
    assert (turns.alternating is None) == (setting == "source only")
    assert any(name.startswith("generators/") for name in state) == (setting == "data-free")
    assert any(name.startswith("styles/") for name in state)
    near = next(turns.batches(0)).near
    assert (near is None) == (setting == "data-free")
    if near is not None:
        seen = {bytes(image.numpy().tobytes()) for image in IMAGE.denormalize(images(inverted=False))}
        assert all(bytes(image.numpy().tobytes()) in seen for image in IMAGE.denormalize(near[0]))


# Switches


FAST = {"diversity_learning_rate": 1000.0}  # at which its weights make a difference in the few steps taken here
SWITCHES: list[tuple[str, dict[str, Any]]] = [
    ("source-free", {"generators": "fresh"}),
    ("source-free", {"generators": "memory"}),
    ("source-free", {"disagreement": -1.0}),
    ("source-free", {"disagreement": 0.0}),
    ("source-free", {"activation_weight": 0.1}),
    ("source-free", {"batch_norm_weight": 1.0}),
    ("source-free", {"memory_layers": ()}),
    ("source-free", {"memory_pull": 0.1}),
    ("source-free", {"synthesis_batch": 16}),
    ("source-free", {"latent": 7}),
    ("source-free", {"source_weight": 3.0}),
    ("source-free", {"tolerance": 0.01}),
    ("source-free", {"batch_statistics": True}),
    ("source-free", {"pseudo_threshold": 1.0, "pseudo_augmentations": 2}),
    ("source-free", {"seed": 1}),
    ("data-free", {"directions": 3}),
    ("data-free", {"diversity_learning_rate": 1000.0}),
    ("source only, fast", {"information_weight": 0.0, **FAST}),
    ("source only, fast", {"semantic_weight": 100.0, **FAST}),
]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    found = {setting: rows_of(learn(setting)) for setting in SETTINGS}
    return {**found, "source only, fast": rows_of(learn("source only", **FAST))}


def rows_of(result: Any) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]


@pytest.mark.parametrize(("setting", "values"), SWITCHES, ids=str)
def test_every_switch_changes_what_is_learned(setting, values, plain):
    changed = rows_of(learn(setting.removesuffix(", fast"), **values))
    assert changed != plain[setting]
    assert all(np.isfinite(list(row.values())).all() for row in changed)


@pytest.mark.parametrize("setting", SETTINGS)
def test_runs_repeat_and_depend_on_no_global_randomness(setting, plain):
    model = toy.trained("cnn")
    torch.rand(3)
    state = torch.get_rng_state()
    assert rows_of(learn(setting, model)) == plain[setting]
    assert torch.equal(torch.get_rng_state(), state)


# Models and data of other kinds


def network(classes: int, spec: ImageSpec) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(spec.channels, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes)
    ).eval()


KINDS: dict[str, tuple[Any, ImageSpec]] = {
    "2 classes": (lambda: network(2, IMAGE), IMAGE),
    "1,000 classes": (lambda: network(1000, RGB), RGB),
    "no linear layer": (convolutional, RGB),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_models_of_other_kinds(kind, setting):
    make, spec = KINDS[kind]
    model = make()
    some = spec.from_unit(torch.rand(80, *spec.shape, generator=torch.Generator().manual_seed(0)))
    model(some[:2])  # lazy layers get their size
    result = protect(model, image=spec, method=method(setting), **given(setting, domain(some, spec)))
    assert all(np.isfinite(list(row.values())).all() for row in result.history)


def test_few_images_are_enough():
    some = domain(images(64))
    result = protect(toy.trained("cnn"), unauthorized=some, image=IMAGE, method=method("source-free", batch_size=32))
    assert result.history[-1]["step"] == 6
    with pytest.raises(InputError, match="blind"):
        protect(toy.trained("cnn"), unauthorized=some, image=IMAGE, method=method("source-free", batch_size=256))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_images_that_say_nothing_to_the_model(kind):
    """Pseudo-labels of noise are soft, and its source is kept as far as it is known."""
    noise = IMAGE.from_unit(torch.rand(80, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.4)
    result = protect(
        toy.trained(kind), unauthorized=domain(noise), image=IMAGE, method=method("source-free", pseudo_threshold=1.0)
    )
    assert all(np.isfinite(list(row.values())).all() for row in result.history)


@pytest.mark.parametrize("setting", SETTINGS)
def test_where_nothing_is_held_out_nothing_given_is_measured(setting):
    result = protect(toy.trained("cnn"), image=IMAGE, method=method(setting, held_out=0.0), **given(setting))
    measured = {key for row in result.history for key in row if "agreement" in key}
    assert (
        measured
        == {
            "source-free": {"source_agreement"},  # on generated images
            "data-free": {"source_agreement", "target_agreement:neighbours"},
            "source only": set(),
        }[setting]
    )


def test_several_targets_jointly_and_one_each():
    domains = {"far": TensorDataset(images(), torch.zeros(80).long()), "dark": TensorDataset(images() - 0.3)}
    joint = protect(toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=method("source-free"))
    assert {"target_agreement:far", "target_agreement:dark"} <= joint.history[-1].keys()
    each = protect(
        toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=method("source-free", masks="one_each")
    )
    assert set(each.masks) == {"far", "dark"}


def test_what_is_wrong_is_said_before_anything_is_learned():
    with pytest.raises(InputError, match="memory_layers: the model has no module 'nowhere'"):
        learn("source-free", memory_layers=("nowhere",))
    small = ImageSpec(channels=1, height=6, width=6, mean=(0.5,), std=(0.5,))
    with pytest.raises(InputError, match="6 x 6"):
        protect(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), image=small, method=method("data-free"))


# Going on


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("at", [2, 4])
def test_a_run_goes_on_to_the_same_mask(setting, at, tmp_path):
    values: dict[str, Any] = {"image": IMAGE, "method": method(setting), **given(setting)}
    whole = protect(toy.trained("cnn"), **values)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == at:
            raise KeyboardInterrupt  # as by kill: this step isn't saved

    with pytest.raises(KeyboardInterrupt):
        protect(toy.trained("cnn"), output=tmp_path, progress=stop, **values)
    assert (tmp_path / "state.safetensors").exists() == (at > 2)
    resumed = protect(toy.trained("cnn"), output=tmp_path, resume=True, **values)
    assert resumed.mask.folded_digest == whole.mask.folded_digest
    assert rows_of(resumed) == rows_of(whole)
    assert whole.mask.cut_share() > 0


# Several processes


def ranks_learn(setting: str) -> dict[str, Any]:
    os.environ["MASTER_PORT"] = "0"
    joined = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(broadcast_buffers=False))
    joined.launch()
    result = protect(toy.trained("cnn"), image=IMAGE, method=method(setting), fabric=joined, **given(setting))
    return {"digest": result.mask.folded_digest, "cut": result.mask.cut_share(), "rows": rows_of(result)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_processes_end_with_the_same_mask(setting, tmp_path):
    first, second = processes.ranks(ranks_learn, setting, folder=tmp_path)
    assert first["digest"] == second["digest"]
    assert first["cut"] > 0
    assert first["rows"][-1]["source"] != second["rows"][-1]["source"]  # images of their own
