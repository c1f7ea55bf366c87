"""Source-free and data-free learning on networks and images of all kinds: no crash, no nonsense, nothing lost."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from tests import processes
from tests.methods import toy
from tests.methods.generating import RGB, convolutional
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from modelfence import DFMap, ImageSpec, SFMap, protect
from modelfence.data.splits import MOST_SEED
from modelfence.errors import InputError, Interrupted
from modelfence.masking.digest import digest_of
from modelfence.methods import material, sfmap
from modelfence.methods.loop import WARNING, Session
from modelfence.methods.material import Examples, Material
from modelfence.methods.synthetic import pixels_of
from modelfence.protect import Protection

GREY = ImageSpec(channels=1, height=16, width=16, mean=(0.25,), std=(0.5,))
BLOBS = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.25,))
FEW: dict[str, Any] = {
    "steps": 3,
    "batch_size": 8,
    "generated": 64,
    "translated": 64,
    "generator_steps": 4,
    "synthesis_batch": 16,
    "evaluate_every": 1,
    "precision": "fp32",
}
METHODS: dict[str, SFMap | DFMap] = {
    "source-free": SFMap(**FEW, restyled=64),
    "data-free": DFMap(**FEW, drawings=64, neighbours=3072, outside=0.1),
}


def network(classes: int, spec: ImageSpec, *, norm: type[nn.Module] | None = nn.BatchNorm2d) -> nn.Module:
    """Return a network with random weights that answers many classes."""
    torch.manual_seed(0)
    middle = nn.Identity() if norm is None else norm(8)
    model = nn.Sequential(
        nn.Conv2d(spec.channels, 8, 3, stride=2), middle, nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes)
    )
    with torch.no_grad():
        model(torch.randn(64, *spec.shape))  # lazy layers get their size, and BatchNorm its statistics
        model[-1].weight *= 8
        model[-1].bias.zero_()
    return model.eval()


def pictures(spec: ImageSpec, count: int = 64) -> Tensor:
    return torch.rand(count, *spec.shape, generator=torch.Generator().manual_seed(5)).sub(spec.mean[0]).div(spec.std[0])


def learn(model: nn.Module, setting: str, spec: ImageSpec, images: Tensor | None = None, **values: Any) -> Protection:
    images = pictures(spec) if images is None else images
    given = {"unauthorized": TensorDataset(images)} if setting == "source-free" else {}
    return protect(model, image=spec, **{"method": METHODS[setting], **given, **values})


def rows_of(result: Protection) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result.history]


MODELS: dict[str, tuple[Callable[[], nn.Module], ImageSpec]] = {
    "2 classes": (lambda: network(2, GREY), GREY),
    "1,000 classes": (lambda: network(1000, RGB), RGB),
    "2 classes, RGB": (lambda: network(2, RGB), RGB),
    "1,000 classes, grey": (lambda: network(1000, GREY), GREY),
    "no normalization": (lambda: network(10, GREY, norm=None), GREY),
    "statistics of the batch": (
        lambda: network(10, RGB, norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
        RGB,
    ),
    "convolutions alone": (convolutional, RGB),
    "bfloat16": (lambda: network(10, GREY).bfloat16(), GREY),
    "bfloat16, no normalization": (lambda: network(10, RGB, norm=None).bfloat16(), RGB),
    "float16": (lambda: network(10, GREY).half(), GREY),
    "float64": (lambda: network(10, GREY).double(), GREY),
}


@pytest.mark.parametrize("setting", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_networks_of_all_kinds(kind, setting):
    make, spec = MODELS[kind]
    model = make()
    before, kinds = digest_of(model), {name: value.dtype for name, value in model.state_dict().items()}
    result = learn(model, setting, spec)
    assert digest_of(model) == before
    assert {name: value.dtype for name, value in result.model.state_dict().items()} == kinds
    assert len(result.history) == 3
    assert all(np.isfinite(list(row.values())).all() for row in result.history)
    assert result.history[-1]["source"] > -1e-5  # a divergence, but for rounding
    with torch.no_grad():
        dtype = next(model.parameters()).dtype
        assert result.model(pictures(spec, 2).to(dtype)).isfinite().all()


def test_64_unauthorized_images_are_enough():
    model = toy.trained("cnn")
    some = toy.blobs(64, seed=3, inverted=True)
    longer = {**FEW, "steps": 120, "generator_steps": 40, "batch_size": 32, "learning_rate": 4e-3}  # 59-67 %
    method = SFMap(**longer, restyled=64, tolerance=None)
    result = protect(model, unauthorized=some, image=BLOBS, method=method)
    assert result.mask.cut_share() > 0
    assert toy.accuracy(result.model, some) < toy.accuracy(model, some) - 0.2
    assert toy.accuracy(result.model, toy.blobs(seed=4)) > 0.9


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_images_that_say_nothing_to_the_model(kind):
    """A target at chance has nothing to lose; what is known of the source stays."""
    noise = torch.randn(80, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.2
    method = SFMap(**{**FEW, "steps": 20, "batch_size": 16}, restyled=64)
    result = protect(toy.trained(kind), unauthorized=TensorDataset(noise), image=BLOBS, method=method)
    assert all(np.isfinite(list(row.values())).all() for row in result.history)
    assert result.history[-1]["source_agreement"] > 0.95


@pytest.mark.parametrize("setting", METHODS)
def test_the_largest_seed_is_taken(setting):
    result = learn(network(2, GREY), setting, GREY, method=replace(METHODS[setting], seed=MOST_SEED))
    assert len(result.history) == 3


@pytest.mark.parametrize("setting", METHODS)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_a_precision_that_nothing_is_learned_in_is_refused_before_any_work(setting, precision):
    said: list[str] = []
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with pytest.raises(InputError, match=f"fabric has precision '{precision}'; learning takes '32-true' or"):
        learn(network(2, GREY), setting, GREY, fabric=fabric, announce=said.append)
    assert said == []


@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_few_restyled_images_are_shared_or_left_out(images, world):
    """The model agrees on few copies sometimes; that must not end a run on several processes."""
    pixels = torch.zeros(40, 1, 8, 8, dtype=torch.uint8)
    near, few = (Examples("some", pixels[:count], torch.zeros(count, 10)) for count in (40, images))
    fabric = SimpleNamespace(world_size=world, global_rank=0, device="cpu")
    run = Session(fabric)  # type: ignore[arg-type]  # all of it that is looked at
    step = next(material._steps(Material(near, {"t": near}, few), METHODS["source-free"], run, BLOBS, 0))
    assert (0 if step.restyled is None else len(step.restyled[0])) == min(2, images // world)


# A target that is the source


def knows_its_source(images: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).train()
    for _ in range(60):
        model(images)
    return model.eval()


@pytest.mark.parametrize("count", [64, 100, 400])
@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_a_target_that_is_the_source_is_refused_however_few_its_images(count, recipe):
    images = toy.blobs(2000, seed=5).tensors[0]
    model = knows_its_source(images)
    before = digest_of(model)
    some = images[torch.randperm(2000, generator=torch.Generator().manual_seed(1))[:count]]
    with pytest.raises(InputError, match="'unauthorized' looks like .* can't be separated") as caught:
        protect(model, unauthorized=TensorDataset(some), image=BLOBS, method=SFMap(recipe=recipe))
    assert "\n" not in str(caught.value)
    assert digest_of(model) == before


@pytest.mark.parametrize("count", [64, 400])
def test_another_domain_is_not_taken_for_the_source(count):
    model = knows_its_source(toy.blobs(2000, seed=5).tensors[0])
    result = protect(model, unauthorized=toy.blobs(count, inverted=True), image=BLOBS, method=METHODS["source-free"])
    assert len(result.history) == 3


def shifted(size: float, count: int = 1000) -> TensorDataset:
    """Blobs as the source's, a little brighter: BatchNorm statistics tell them from the source, just."""
    images, labels = toy.blobs(count, seed=9).tensors
    return TensorDataset(images + size, labels)


def told_of(model: nn.Module, target: TensorDataset) -> list[str]:
    told: list[str] = []
    result = protect(model, unauthorized=target, image=BLOBS, method=METHODS["source-free"], announce=told.append)
    warned = [text.removeprefix(WARNING) for text in told if text.startswith(WARNING)]
    assert list(result.warnings) == warned
    return [text for text in warned if "nearly like" in text]


def test_a_target_nearly_like_the_source_is_warned_of_and_one_far_from_it_is_not():
    model = knows_its_source(toy.blobs(2000, seed=5).tensors[0])
    near, far = told_of(model, shifted(0.1)), told_of(model, toy.blobs(400, inverted=True))
    assert len(near) == 1
    assert near[0].startswith("unauthorized domain 'unauthorized'")
    assert "\n" not in near[0]
    assert far == []


def test_warnings_are_logged_where_nobody_is_told(caplog):
    model = knows_its_source(toy.blobs(2000, seed=5).tensors[0])
    protect(model, unauthorized=shifted(0.1), image=BLOBS, method=METHODS["source-free"])
    logged = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "modelfence"]
    assert any(level == "WARNING" and "nearly like the model's own source" in text for level, text in logged)
    assert not any(": step" in text for _, text in logged)


def test_of_several_processes_the_first_alone_tells(monkeypatch):
    monkeypatch.setattr(Fabric, "is_global_zero", False)
    told: list[str] = []
    result = protect(
        knows_its_source(toy.blobs(2000, seed=5).tensors[0]),
        unauthorized=shifted(0.1),
        image=BLOBS,
        method=METHODS["source-free"],
        announce=told.append,
    )
    assert told == []
    assert any("nearly like" in text for text in result.warnings)


@pytest.mark.parametrize("masks", ["joint", "one_each"])
def test_nothing_is_told_or_learned_before_a_later_domain_is_refused(masks):
    source = toy.blobs(2000, seed=5)
    told: list[str] = []
    rows: list[dict[str, float]] = []
    with pytest.raises(InputError, match="'same' looks like"):
        protect(
            knows_its_source(source.tensors[0]),
            unauthorized={"near": shifted(0.1), "same": source},
            image=BLOBS,
            method=replace(METHODS["source-free"], masks=masks),
            announce=told.append,
            progress=rows.append,
        )
    assert told == []
    assert rows == []


def test_a_batch_too_small_is_refused_before_the_network_looks_at_images(monkeypatch):
    looked: list[str] = []
    monkeypatch.setattr(sfmap, "pixels_of", lambda domain, *_: looked.append(domain.name))
    domains = {name: toy.blobs(100, seed=seed) for seed, name in enumerate("abc")}
    with pytest.raises(InputError, match="leaves 0 image"):
        protect(
            knows_its_source(toy.blobs(2000, seed=5).tensors[0]),
            unauthorized=domains,
            image=BLOBS,
            method=replace(METHODS["source-free"], batch_size=4),
        )
    assert looked == []


def test_warnings_of_several_masks_say_which_they_are_about():
    told: list[str] = []
    session = Session(fabric=Fabric(accelerator="cpu", devices=1), announce=told.append)
    for name in "ab":
        replace(session, about=f"mask against {name!r}").warn("it forgot much")
    session.warn("it forgot much")
    session.warn("it forgot much")
    assert session.warnings == [
        "mask against 'a': it forgot much",
        "mask against 'b': it forgot much",
        "it forgot much",
    ]
    assert told == [f"{WARNING}{text}" for text in session.warnings]


# Memory


class Large:
    """A domain of many images that counts how many were asked for at once."""

    name, classes, labelled, spec, size = "large", None, False, BLOBS, 10**9

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def once(self, batch_size: int, *, limit: int | None = None, device: Any = "cpu") -> Any:
        from modelfence.data.domain import Batch

        self.asked.append(limit)
        assert limit is not None
        for first in range(0, limit, batch_size):
            yield Batch(torch.zeros(min(batch_size, limit - first), 1, 8, 8), None)


def test_no_more_images_than_asked_for_are_taken_and_they_stay_bytes():
    domain = Large()
    pixels = pixels_of(domain, BLOBS, 1000)
    assert domain.asked == [1000]
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (1000, 1, 8, 8))
    assert pixels.element_size() * pixels.numel() == pixels.untyped_storage().nbytes()


@pytest.mark.slow
def test_a_resnet_50_at_224_pixels_learns_a_few_steps():
    """Memory was measured by hand; here it only has to run."""
    from modelfence.models.zoo import create_model

    spec = ImageSpec(channels=3, height=224, width=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    torch.manual_seed(0)
    model = create_model("resnet50", 10, spec).eval()
    few = {"steps": 1, "batch_size": 4, "generated": 8, "translated": 8, "generator_steps": 1, "synthesis_batch": 4}
    method = SFMap(**{**FEW, **few}, restyled=8)
    result = protect(model, unauthorized=TensorDataset(pictures(spec, 8)), image=spec, method=method)
    assert np.isfinite(list(result.history[-1].values())).all()


# Going on


@pytest.mark.parametrize("setting", METHODS)
@pytest.mark.parametrize("part", ["generated", "translated", "restyled"])
def test_a_run_killed_while_images_are_made_goes_on_with_those_it_has(setting, part, tmp_path, monkeypatch):
    from modelfence.synthesis import pool

    if (setting, part) == ("data-free", "restyled"):
        pytest.skip("data-free learning restyles nothing before it learns")
    whole = learn(toy.trained("cnn"), setting, BLOBS, toy.blobs(80, inverted=True).tensors[0])
    maker = {"generated": "generate", "translated": "translate", "restyled": "restyle"}[part]

    def killed(*_: Any, **__: Any) -> Tensor:
        raise KeyboardInterrupt

    given: dict[str, Any] = {"images": toy.blobs(80, inverted=True).tensors[0], "output": tmp_path}
    with monkeypatch.context() as patched:
        patched.setattr(pool, maker, killed)
        with pytest.raises(KeyboardInterrupt):
            learn(toy.trained("cnn"), setting, BLOBS, **given)
    done = ["generated", "translated", "restyled"][: ["generated", "translated", "restyled"].index(part)]
    kept = [path.name.split("-")[0] for path in sorted((tmp_path / "synthetic").glob("*"))]
    assert kept == done
    said: list[str] = []
    resumed = learn(toy.trained("cnn"), setting, BLOBS, **given, resume=True, announce=said.append)
    assert [line.split()[0] for line in said if "found in" in line] == done
    assert resumed.mask.folded_digest == whole.mask.folded_digest
    assert rows_of(resumed) == rows_of(whole)


@pytest.mark.parametrize("setting", METHODS)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_stopped_while_it_learns_goes_on_to_the_same_mask(setting, at, tmp_path):
    given: dict[str, Any] = {"images": toy.blobs(80, inverted=True).tensors[0]}
    whole = learn(toy.trained("cnn"), setting, BLOBS, **given)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == at:
            os.kill(os.getpid(), 2)  # as Ctrl-C: the step is saved

    with pytest.raises(Interrupted, match=f"stopped at step {at}"):
        learn(toy.trained("cnn"), setting, BLOBS, **given, output=tmp_path, progress=stop)
    said: list[str] = []
    resumed = learn(toy.trained("cnn"), setting, BLOBS, **given, output=tmp_path, resume=True, announce=said.append)
    assert [line for line in said if "found in" in line]
    assert not [line for line in said if "step" in line and "the mask cuts no weight" not in line]
    assert resumed.mask.folded_digest == whole.mask.folded_digest
    assert rows_of(resumed) == rows_of(whole)


# Several processes


def learn_in_process(world: int, folder: Path) -> dict[str, Any]:
    os.environ["MASTER_PORT"] = "0"
    strategy = DDPStrategy(broadcast_buffers=False) if world > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    found: dict[str, Any] = {"world": fabric.world_size}
    for setting, method in METHODS.items():
        values = {name: getattr(method, name) for name in (*FEW, *(("restyled",) if setting == "source-free" else ()))}
        if setting == "data-free":
            values |= {"drawings": 64, "neighbours": 3072, "outside": 0.1}
        values |= {"steps": 12, "batch_size": 16 // world, "learning_rate": 1e-3, "limit": 0.5, "evaluate_every": 6}
        result = learn(
            toy.trained("cnn"),
            setting,
            BLOBS,
            toy.blobs(80, inverted=True).tensors[0],
            method=type(method)(**values),
            fabric=fabric,
            cache=folder / str(fabric.global_rank),
        )
        found[setting] = {"kept": dict(result.mask.kept), "rows": rows_of(result)}
    return found


@pytest.fixture(scope="module")
def joint_and_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    together = processes.ranks(learn_in_process, 2, folder, folder=folder)
    return together, processes.call(learn_in_process, 1, folder / "alone", folder=folder)


@pytest.mark.parametrize("setting", METHODS)
def test_two_processes_learn_what_one_learns(setting, joint_and_alone):
    (first, second), alone = joint_and_alone
    assert [first["world"], second["world"], alone["world"]] == [2, 2, 1]
    assert all(torch.equal(first[setting]["kept"][name], bits) for name, bits in second[setting]["kept"].items())
    same, total, cut = 0, 0, 0
    for name, bits in alone[setting]["kept"].items():
        same += int((first[setting]["kept"][name] == bits).sum())
        total += bits.numel()
        cut += int((~bits).sum())
    assert cut > 20
    assert total - same <= 0.1 * cut  # Adam magnifies rounding where a gradient is all but zero
    for joint, one in zip(first[setting]["rows"], alone[setting]["rows"], strict=True):
        assert joint.keys() == one.keys()
        assert joint["source_agreement"] == pytest.approx(one["source_agreement"], abs=0.15)
