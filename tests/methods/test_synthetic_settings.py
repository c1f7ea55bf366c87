"""Source-free and data-free learning: what it is learned on, what it never sees, and that it can be repeated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from tests.methods import toy
from tests.methods.blind import Blind
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from modelfence import DFMap, ImageSpec, SAMap, SFMap, Watermark, protect
from modelfence.data.domain import IndexedDomain
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.masking.digest import digest_of
from modelfence.methods import material, sfmap
from modelfence.methods.loop import Learned, Session
from modelfence.methods.material import Examples, Material, paced
from modelfence.methods.synthetic import Store

IMAGE = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.25,))
SMALL: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "generated": 64,
    "translated": 64,
    "generator_steps": 3,
    "synthesis_batch": 16,
    "evaluate_every": 2,
    "precision": "fp32",
}
SOURCE_FREE: dict[str, Any] = {**SMALL, "restyled": 64}
FEW: dict[str, Any] = {"drawings": 64, "neighbours": 512, "outside": 0.5}


def target(count: int = 80) -> TensorDataset:
    return toy.blobs(count, seed=3, inverted=True)


def session(**values: Any) -> Session:
    return Session(Fabric(accelerator="cpu", devices=1), image=IMAGE, **values)


def blind() -> Blind:
    return Blind(target().tensors[0], IMAGE)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_source_free_needs_no_label_and_no_source(kind):
    model = toy.trained(kind)
    before = digest_of(model)
    result = protect(model, unauthorized=blind(), image=IMAGE, method=SFMap(**SOURCE_FREE))
    assert digest_of(model) == before
    assert [row["step"] for row in result.history] == [2, 4]
    assert {"source", "target", "source_agreement", "target_agreement:blind", "gap"} <= result.history[-1].keys()
    assert ("target_batch" in result.history[-1]) == (kind == "cnn")


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_source_only_needs_no_label(kind):
    model = toy.trained(kind)
    result = protect(model, authorized=blind(), image=IMAGE, method=DFMap(**SMALL, **FEW))
    assert "target_agreement:neighbours" in result.history[-1]


@pytest.mark.parametrize(("kind", "warned"), [("mlp", True), ("cnn", False)])
def test_source_free_warns_where_the_network_has_no_batch_norm(kind, warned):
    told: list[str] = []
    protect(toy.trained(kind), unauthorized=blind(), image=IMAGE, method=SFMap(**SOURCE_FREE), announce=told.append)
    assert any(text.startswith("warning: without BatchNorm") for text in told) == warned


@pytest.mark.parametrize(("kind", "given", "warned"), [("mlp", None, True), ("cnn", None, False), ("mlp", 1, False)])
def test_data_free_warns_where_the_network_has_no_batch_norm(kind, given, warned):
    told: list[str] = []
    authorized = None if given is None else blind()
    method = DFMap(**SMALL, **FEW)
    protect(toy.trained(kind), authorized=authorized, image=IMAGE, method=method, announce=told.append)
    assert any(text.startswith("warning: without BatchNorm") for text in told) == warned


def test_data_free_needs_nothing_but_the_model():
    result = protect(toy.trained("cnn"), image=IMAGE, method=DFMap(**SMALL, **FEW))
    assert isinstance(result.config, DFMap)
    assert result.history[-1]["source_agreement"] > 0


@pytest.mark.parametrize("loaded", [False, True])
def test_labels_that_are_none_are_not_looked_at(loaded):
    images = target().tensors[0]
    unknown: Any = TensorDataset(images, torch.full((len(images),), -1))
    thing = DataLoader(unknown, batch_size=16) if loaded else unknown
    plain = protect(toy.trained(), unauthorized={"unauthorized": [images]}, image=IMAGE, method=SFMap(**SOURCE_FREE))
    result = protect(toy.trained(), unauthorized=thing, image=IMAGE, method=SFMap(**SOURCE_FREE))
    assert result.mask.folded_digest == plain.mask.folded_digest


@pytest.mark.parametrize("setting", ["authorized", "unauthorized"])
def test_a_method_without_labels_is_given_domains_without_them(monkeypatch, setting):
    found: list[Any] = []

    def spy(session: Session) -> None:
        found.extend([*session.unauthorized.values(), *([session.authorized] if session.authorized else [])])
        raise InputError("enough")

    monkeypatch.setattr("modelfence.methods.sfmap.image_of", spy)
    monkeypatch.setattr("modelfence.methods.dfmap.image_of", spy)
    for thing in (target(), DataLoader(target(), batch_size=16), blind(), as_domain(target())):
        with pytest.raises(InputError, match="enough"):
            protect(toy.trained(), image=IMAGE, **{setting: thing})
    assert len(found) == 4
    for domain in found:
        assert not domain.labelled
        assert next(domain.once(8)).labels is None


def test_the_data_given_decides_the_setting(monkeypatch):
    seen: list[str] = []

    def spy(*arguments: Any, **_: Any) -> Any:
        seen.append(type(arguments[1]).__name__)
        raise InputError("enough")

    monkeypatch.setattr("modelfence.methods.sfmap.learn_on", spy)
    monkeypatch.setattr("modelfence.methods.sfmap.pseudo_source", spy)
    monkeypatch.setattr("modelfence.methods.dfmap.pixels_of", lambda *_: spy(None, DFMap()))
    monkeypatch.setattr("modelfence.methods.dfmap.pseudo_source", spy)
    for given in ({"unauthorized": target()}, {"authorized": target()}, {}):
        with pytest.raises(InputError, match="enough"):
            protect(toy.trained("cnn"), image=IMAGE, **given)
    assert seen == ["SFMap", "DFMap", "DFMap"]


def test_a_source_that_a_setting_must_not_see_is_refused():
    with pytest.raises(InputError, match="SFMap works without authorized=.*watch="):
        protect(toy.trained(), authorized=toy.blobs(), unauthorized=target(), image=IMAGE, method=SFMap())
    with pytest.raises(InputError, match="DFMap works without unauthorized="):
        protect(toy.trained(), unauthorized=target(), image=IMAGE, method=DFMap())


@pytest.mark.parametrize("given", [{}, {"unauthorized": target()}])
def test_what_the_model_eats_must_be_known(given):
    with pytest.raises(InputError, match="image= is missing"):
        protect(toy.trained(), **given)


def test_what_is_watched_is_measured_and_changes_nothing():
    plain = protect(toy.trained("cnn"), unauthorized=target(), image=IMAGE, method=SFMap(**SOURCE_FREE))
    watched = protect(
        toy.trained("cnn"),
        unauthorized=target(),
        image=IMAGE,
        method=SFMap(**SOURCE_FREE),
        watch={"truth": toy.blobs(40)},
    )
    assert watched.mask.folded_digest == plain.mask.folded_digest
    assert watched.history[-1]["watch:truth"] == toy.accuracy(watched.model, toy.blobs(40))
    assert "watch:truth" not in plain.history[-1]


def test_labelled_learning_can_be_watched_too():
    result = protect(
        toy.trained(),
        authorized=toy.blobs(80, seed=1),
        unauthorized=target(),
        method=SAMap(steps=2, batch_size=8),
        watch=toy.blobs(40),
    )
    assert {"source_accuracy", "watch:watched"} <= result.history[-1].keys()


def test_images_that_look_like_the_source_are_refused():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    images = toy.blobs(400, seed=5).tensors[0]
    model.train()
    for _ in range(60):
        model(images)
    model.eval()
    with pytest.raises(InputError, match="'unauthorized' looks like the model's own source"):
        protect(model, unauthorized=toy.blobs(400, seed=5), image=IMAGE, method=SFMap(**SOURCE_FREE))


@pytest.mark.parametrize(
    ("images", "held_out", "masks", "enough"),
    [
        (7, 0.0, "joint", False),  # 8 a step of each of two domains
        (8, 0.0, "joint", True),
        (15, 0.5, "joint", False),
        (16, 0.5, "joint", True),
        (15, 0.0, "one_each", False),  # 16 a step of each alone
        (16, 0.0, "one_each", True),
    ],
)
def test_a_domain_that_fills_no_batch_is_refused_before_anything_is_made(images, held_out, masks, enough):
    few = TensorDataset(toy.blobs(images, seed=3, inverted=True).tensors[0])
    domains = {"more": target(), "few": few}
    method = SFMap(**{**SOURCE_FREE, "batch_size": 32, "held_out": held_out, "masks": masks})
    if enough:
        assert protect(toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=method).history
        return
    with pytest.raises(InputError, match="domain 'few' has 7|domain 'few' has 15"):
        protect(toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=method, announce=pytest.fail)


def test_several_targets_jointly_and_one_each():
    domains = {"far": target(), "further": TensorDataset(-2 * target().tensors[0], target().tensors[1])}
    joint = protect(toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=SFMap(**SOURCE_FREE))
    assert {"target_agreement:far", "target_agreement:further"} <= joint.history[-1].keys()
    each = protect(toy.trained("cnn"), unauthorized=domains, image=IMAGE, method=SFMap(**SOURCE_FREE, masks="one_each"))
    assert set(each.masks) == {"far", "further"}


@pytest.mark.parametrize("method", [SFMap(**SOURCE_FREE), DFMap(**SMALL, **FEW)])
def test_runs_repeat_and_what_was_synthesized_is_found_again(tmp_path, method):
    given = {"unauthorized": target()} if isinstance(method, SFMap) else {}
    said: list[str] = []
    values: dict[str, Any] = {"image": IMAGE, "method": method, "announce": said.append, **given}
    first = protect(toy.trained("cnn"), output=tmp_path, **values)
    made = sorted(path.name.split("-")[0] for path in (tmp_path / "synthetic").iterdir())
    assert made[:1] == ["generated"]
    assert "translated" in made
    said.clear()
    second = protect(toy.trained("cnn"), cache=tmp_path / "synthetic", **values)
    assert [line for line in said if "found in" in line]
    assert not [line for line in said if ": step" in line]
    assert second.mask.folded_digest == first.mask.folded_digest
    for path in (tmp_path / "synthetic").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    third = protect(toy.trained("cnn"), cache=tmp_path / "synthetic", **values)
    assert third.mask.folded_digest == first.mask.folded_digest


def test_a_run_goes_on_to_the_same_mask(tmp_path):
    values: dict[str, Any] = {"unauthorized": target(), "image": IMAGE}
    whole = protect(toy.trained("cnn"), method=SFMap(**SOURCE_FREE), **values)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        protect(
            toy.trained("cnn"),
            method=SFMap(**{**SOURCE_FREE, "evaluate_every": 1}),
            output=tmp_path,
            progress=stop,
            **values,
        )
    resumed = protect(
        toy.trained("cnn"), method=SFMap(**{**SOURCE_FREE, "evaluate_every": 1}), output=tmp_path, resume=True, **values
    )
    assert resumed.mask.folded_digest == whole.mask.folded_digest


def test_generated_images_serve_every_target(tmp_path):
    store = Store(tmp_path, {"model": "a"}, None)
    made: list[int] = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.zeros(2, 1, 8, 8, dtype=torch.uint8)

    store.keep("generated", make, count=2)
    store.keep("generated", make, count=2)
    assert len(made) == 1
    store.keep("generated", make, count=3)
    Store(tmp_path, {"model": "b"}, None).keep("generated", make, count=2)
    assert len(made) == 3
    before = sorted(tmp_path.iterdir())
    other = Store(tmp_path, {"model": "a"}, None, writes=False)  # another process of the same run
    other.keep("generated", make, count=2)
    assert len(made) == 3
    other.keep("generated", make, count=4)
    assert (len(made), sorted(tmp_path.iterdir())) == (4, before)


def test_unlearning_is_paced_by_what_is_forgotten():
    terms = {"source": torch.tensor(0.08), "source_batch": torch.tensor(9.0), "target": torch.tensor(-1.0)}
    config = SFMap(tolerance=0.1)
    assert paced(terms, config, session(), weight=2.0)["target"].item() == pytest.approx(-(1 - 0.04 / 0.1))
    assert paced(terms, SFMap(tolerance=0.02), session(), weight=2.0)["target"].item() == 0
    assert paced(terms, SFMap(tolerance=None), session(), weight=2.0)["target"].item() == -1
    assert paced({"target": torch.tensor(-1.0)}, config, session(), weight=2.0)["target"].item() == -1


@pytest.mark.parametrize("terms", ["both", "source", "target"])
def test_the_terms_are_those_of_the_equation(terms):
    config = SFMap(**{**SOURCE_FREE, "batch_size": 8}, terms=terms, source_weight=3.0, dependence_weight=0.0)
    pixels = (torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
    labels = torch.randn(40, 10, generator=torch.Generator().manual_seed(2)).softmax(1)
    examples = Material(
        Examples("near", pixels, logits), {"t": Examples("t", pixels, labels)}, Examples("far", pixels, logits)
    )
    run = session()
    step = next(material._steps(examples, config, run, IMAGE, 0))
    parts = material._parts(step, config, run, 0.5)
    model = toy.trained("mlp")
    found: dict[str, float] = {}
    for part in parts:
        found[part.name] = found.get(part.name, 0) + part.loss(model(part.images)).item()

    def log_softmax(values: torch.Tensor) -> np.ndarray:
        array = values.detach().double().numpy()
        return array - np.log(np.exp(array).sum(1, keepdims=True))

    def kl(images: torch.Tensor, teacher: torch.Tensor) -> float:
        wanted, given = log_softmax(teacher), log_softmax(model(images))
        return float((np.exp(wanted) * (wanted - given)).sum(1).mean())

    expected = {}
    if terms != "target":
        assert step.restyled is not None
        expected["source"] = 3.0 * kl(*step.near) + 0.5 * kl(*step.restyled)
    if terms != "source":
        images, wanted = step.targets[0]
        each = -(wanted.double().numpy() * log_softmax(model(images))).sum(1)
        expected["target"] = -np.minimum(each, np.log(10) + 0.2).mean()
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_dependence_of_answers_is_added_to_what_is_unlearned():
    logits, labels = torch.randn(6, 4), torch.randn(6, 4).softmax(1)
    config = SFMap(dependence_weight=3.0)
    apart = material.forgetting(labels, SFMap(dependence_weight=0.0), session(), 0.5)(logits)
    found = material.forgetting(labels, config, session(), 0.5)(logits)
    each = logits.double().softmax(1).numpy()
    mean = each.mean(axis=0)
    dependence = (each * np.log(each)).sum(axis=1).mean() - (mean * np.log(mean)).sum()
    assert found.item() - apart.item() == pytest.approx(0.5 * 3.0 * dependence, rel=1e-4)


def calls_once(*_: object, loss: Any, **__: object) -> Learned:
    loss(None, None, None)
    return Learned({}, [{"source_agreement": 1.0}])


@pytest.mark.parametrize(("restyled", "weight"), [(0, 0.0), (10, 0.75), (40, 3.0), (80, 3.0)])
def test_fewer_restyled_images_than_near_ones_weigh_less(monkeypatch, restyled, weight):
    near = Examples("near", torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.zeros(40, 10))
    far = Examples("far", near.pixels[:1].expand(restyled, 1, 8, 8), torch.zeros(restyled, 10)) if restyled else None
    found: list[float] = []
    monkeypatch.setattr(material, "loss_of", lambda *_, restyled_weight, **__: found.append(restyled_weight))
    monkeypatch.setattr(material, "learn_scores", calls_once)
    material.learn_on(toy.trained(), SFMap(restyled_weight=3.0), session(), Material(near, {"t": near}, far), IMAGE)
    assert found == [weight]


@pytest.mark.parametrize(("factor", "steps"), [(1 / 225, 2), (1 / 90, 5)])
def test_it_learns_as_many_steps_as_the_network_calls_for(factor, steps):
    of_the_recipe = {name: value for name, value in SOURCE_FREE.items() if name != "steps"}
    method = SFMap(**of_the_recipe, longer_without_batch_norm=factor)
    result = protect(toy.trained("mlp"), unauthorized=target(), image=IMAGE, method=method)
    assert result.history[-1]["step"] == result.config.steps == steps


@pytest.mark.parametrize(("patience", "warned"), [(None, True), (1, False)])
def test_it_is_the_mask_that_is_kept_that_is_warned_of(patience, warned):
    told: list[str] = []
    history = [{"gap": 0.9, "source_agreement": 0.95}, {"gap": 0.5, "source_agreement": 0.6}]
    material._warn_of_loss(history, SFMap(patience=patience), replace(session(), announce=told.append))
    assert [text.startswith("warning: the masked model answers 40%") for text in told] == [True] * warned


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_the_papers_recipe_learns_as_long_as_it_is_told(kind):
    method = SFMap(recipe="paper", steps=2, batch_size=16, synthesis_batch=16, width=8, evaluate_every=2)
    result = protect(toy.trained(kind), unauthorized=target(), image=IMAGE, method=method)
    assert result.history[-1]["step"] == 2


@pytest.mark.parametrize(("kind", "apart"), [("cnn", True), ("mlp", False)])
def test_without_batch_norm_restyled_copies_count_as_images_near_the_source(monkeypatch, kind, apart):
    found: list[Material] = []

    def learn_on(model, config, session, material, image):
        found.append(material)
        return Learned({}, [])

    monkeypatch.setattr(sfmap, "learn_on", learn_on)
    sfmap.learn_source_free(toy.trained(kind), SFMap(**SOURCE_FREE), session(unauthorized={"blind": blind()}))
    near, far = found[0].near, found[0].restyled
    assert (far is not None) == apart
    assert len(near.pixels) == len(near.answers)
    assert len(near.pixels) == 128 if apart else 64 < len(near.pixels) <= 128


def test_nothing_is_measured_where_nothing_is_held_out():
    method = SFMap(**{**SOURCE_FREE, "held_out": 0.0})
    result = protect(toy.trained(), unauthorized=target(), image=IMAGE, method=method)
    assert result.history
    assert not [key for row in result.history for key in row if "agreement" in key or key == "gap"]


def test_a_single_image_has_none_to_keep_apart():
    with pytest.raises(InputError, match="far: 1 image; two are needed"):
        Examples("far", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, 10)).split(0.1, 0)


def test_examples_are_drawn_with_their_answers():
    pixels = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 1, 8, 8).contiguous()
    examples = Examples("numbered", pixels, torch.arange(20.0).view(20, 1))
    rest, aside = examples.split(0.25, seed=0)
    assert (len(rest.pixels), len(aside.pixels)) == (15, 5)
    assert sorted(torch.cat([rest.answers, aside.answers]).flatten().tolist()) == list(range(20))
    images, answers = next(rest.batches(6, IMAGE, session(), seed=0, start=0))
    assert torch.equal(IMAGE.denormalize(images)[:, 0, 0, 0].float(), answers[:, 0])


def test_too_few_auxiliary_images_are_said():
    with pytest.raises(InputError, match="auxiliary images are far from the source"):
        protect(toy.trained("cnn"), image=IMAGE, method=DFMap(**SMALL, drawings=64, neighbours=64, outside=1.0))


def test_a_watermark_becomes_an_unauthorized_domain():
    images = (toy.blobs(80, seed=1).tensors[0] * 40 + 100).clamp(0, 255).to(torch.uint8)
    domain = IndexedDomain("clean", images.__getitem__, 80, spec=IMAGE, labels=toy.blobs(80).tensors[1])
    values: dict[str, Any] = {"image": IMAGE, "method": SAMap(steps=2, batch_size=8), "ownership": Watermark("objects")}
    result = protect(toy.trained(), authorized=domain, **values)
    assert "target_accuracy:watermark" in result.history[-1]
    with pytest.raises(InputError, match="ownership= needs authorized="):
        protect(toy.trained(), unauthorized=domain, image=IMAGE, ownership=Watermark("objects"))
    with pytest.raises(InputError, match="ownership= needs authorized="):
        protect(toy.trained(), image=IMAGE, ownership=Watermark("objects"))
    alone = protect(toy.trained(), authorized=domain, image=IMAGE, ownership=Watermark("objects"))
    assert alone.config == SAMap(recipe="ownership")
    chosen = protect(toy.trained(), authorized=domain, **values)
    assert chosen.config == values["method"].for_network(toy.trained())


@pytest.mark.parametrize(("rate", "warned"), [(1e-2, True), (1e-5, False)])
def test_a_mask_that_forgot_the_images_near_the_source_is_warned_of(rate, warned):
    told: list[str] = []
    method = SFMap(**SOURCE_FREE | {"steps": 20, "learning_rate": rate, "terms": "target"})
    result = protect(toy.trained("cnn"), unauthorized=target(), image=IMAGE, method=method, announce=told.append)
    assert (result.history[-1]["source_agreement"] < 0.85) == warned
    assert any("near the source otherwise than the original" in text for text in told) == warned
