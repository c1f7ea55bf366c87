"""protect() from end to end on synthetic domains, and everything it refuses before it starts."""

import copy
from typing import Any

import pytest
import torch
from tests.masking import zoo
from tests.methods import toy
from tests.methods.generating import GREY
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import modelfence as mf
from modelfence import CUTI, NTL, Mask, SAMap, protect
from modelfence.data.domain import Batch, IndexedDomain
from modelfence.data.sources import as_domain
from modelfence.errors import InputError, NonFiniteError
from modelfence.masking.digest import digest_of
from modelfence.ownership.watermark import Watermark
from modelfence.protect import Protection

SOURCE, TARGET = toy.blobs(seed=1), toy.blobs(seed=2, inverted=True)
FAST = {"steps": 60, "learning_rate": 5e-4, "evaluate_every": 20, "precision": "fp32"}
TINY = {"steps": 2, "batch_size": 8, "evaluate_every": 2, "precision": "fp32"}


def faint(seed: int) -> TensorDataset:
    """Return a third domain: faint dark blobs."""
    images, labels = toy.blobs(seed=seed, inverted=True).tensors
    return TensorDataset(0.5 * images + 0.2, labels)


def run(
    model: nn.Module | None = None, authorized: Any = SOURCE, unauthorized: Any = TARGET, **values: Any
) -> Protection:
    method = SAMap(**(TINY | values))
    return protect(model or toy.trained(), authorized=authorized, unauthorized=unauthorized, method=method)


def rows(result: Protection) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result.history]


# What it is for


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("recipe", ["paper", "default"])
def test_the_target_is_lost_and_the_source_is_kept(kind, recipe):
    model = toy.trained(kind)
    source, target = toy.blobs(seed=3), toy.blobs(seed=4, inverted=True)
    assert toy.accuracy(model, source) > 0.95
    assert toy.accuracy(model, target) > 0.95
    result = run(model, **FAST, recipe=recipe, batch_size=64)
    assert toy.accuracy(result.model, source) > 0.9
    assert toy.accuracy(result.model, target) < 0.5
    last = result.history[-1]
    assert last["source_accuracy"] > 0.9
    assert last["target_accuracy:unauthorized"] < 0.5
    assert 0.01 < result.mask.cut_share() < 0.6
    assert last["kept"] == pytest.approx(1 - result.mask.cut_share())
    assert [row["step"] for row in result.history] == [20, 40, 60]


def test_bfloat16_learns_it_too():
    result = run(toy.trained("cnn"), **FAST | {"precision": "bf16"}, batch_size=64)
    assert toy.accuracy(result.model, SOURCE) > 0.9
    assert toy.accuracy(result.model, TARGET) < 0.5
    assert all(value.dtype == torch.float32 for value in result.model.parameters())


def test_several_unauthorized_domains_at_once():
    model, other = toy.trained("cnn"), faint(6)
    assert toy.accuracy(model, other) > 0.8
    result = run(model, unauthorized={"inverted": TARGET, "faint": faint(5)}, **FAST, batch_size=64)
    assert toy.accuracy(result.model, SOURCE) > 0.9
    assert toy.accuracy(result.model, TARGET) < 0.5
    assert toy.accuracy(result.model, other) < 0.5
    assert {"target_accuracy:inverted", "target_accuracy:faint"} <= result.history[-1].keys()


def test_one_mask_each_and_their_combination():
    model = toy.trained("cnn")
    targets = {"inverted": TARGET, "faint": faint(5)}
    result = run(model, unauthorized=targets, **FAST, batch_size=64, masks="one_each")
    assert list(result.masks) == ["inverted", "faint"]
    for name, mask in result.masks.items():
        assert mask.metadata["unauthorized"] == name
        assert mask.base_digest == digest_of(model)
    first, second = result.masks.values()
    for name, kept in result.mask.kept.items():
        assert torch.equal(kept, first.kept[name] & second.kept[name])
    assert [row["mask"] for row in result.history] == [0] * 3 + [1] * 3
    assert "target_accuracy:faint" not in result.history[0]
    assert "target_accuracy:faint" in result.history[-1]
    alone = run(model, unauthorized={"inverted": TARGET}, **FAST, batch_size=64)
    assert first.folded_digest == alone.mask.folded_digest
    assert result.mask.metadata["combined"] == [dict(first.metadata), dict(second.metadata)]


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_every_one_of_several_masks_is_watched(share):
    method = SAMap(**TINY, masks="one_each", held_out=share)
    targets = {"inverted": TARGET, "faint": faint(5)}
    result = protect(toy.trained(), authorized=SOURCE, unauthorized=targets, watch=SOURCE, method=method)
    measured = [{key for key in row if "accuracy" in key or ":" in key} for row in result.history]
    apart = [{"source_accuracy", f"target_accuracy:{name}"} if share else set() for name in targets]
    assert measured == [{"watch:watched", *names} for names in apart]


@pytest.mark.parametrize("nothing", [[], {}])
def test_what_is_to_be_watched_and_is_not_there_is_named(nothing):
    with pytest.raises(InputError, match="watch= is empty"):
        protect(toy.trained(), authorized=SOURCE, unauthorized=TARGET, watch=nothing, method=SAMap(**TINY))


# What is found out before anything is learned


@pytest.mark.parametrize(("kind", "masks"), [(SAMap, {}), (SAMap, {"masks": "one_each"}), (NTL, {}), (CUTI, {})])
def test_a_domain_that_fills_no_batch_is_refused_before_any_step(kind, masks, tmp_path):
    told: list[dict[str, float]] = []
    few = TensorDataset(*(part[:5] for part in TARGET.tensors))
    method = kind(steps=2, batch_size=16, evaluate_every=1, held_out=0, precision="fp32", **masks)
    with pytest.raises(InputError, match="domain 'few' has 5 images, fewer than one batch of"):
        protect(
            toy.trained("cnn"),
            authorized=SOURCE,
            unauthorized={"many": TARGET, "few": few} if masks else {"few": few},
            method=method,
            progress=told.append,
            output=tmp_path,
        )
    assert told == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["default", "paper"])
@pytest.mark.parametrize(("classes", "channels", "fragment"), [(10, 3, "image=: "), (1, 1, "the model gives 1 logit")])
def test_without_any_domain_the_model_is_tried_on_the_image_spec(recipe, classes, channels, fragment):
    image = mf.ImageSpec(channels=channels, height=8, width=8, mean=(0.5,) * channels, std=(0.25,) * channels)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))
    with pytest.raises(InputError, match=fragment) as caught:
        protect(model, image=image, method=mf.DFMap(recipe=recipe))
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for cache in (file, file / "inside"):
        with pytest.raises(InputError, match="is a file, not a folder; name another cache folder"):
            protect(toy.trained(), image=GREY, method=mf.DFMap(), cache=cache, announce=pytest.fail)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("method", [mf.SFMap(), mf.DFMap()])
def test_a_method_that_learns_no_marks_says_so(method):
    with pytest.raises(InputError, match=f"{type(method).__name__} learns no marks: leave ownership= and key= out"):
        protect(toy.trained(), authorized=SOURCE, image=GREY, ownership=Watermark(), method=method)


def test_what_an_abandoned_run_left_is_not_taken_for_this_one(tmp_path):
    """A run of another configuration is killed in its second mask; one anew is killed in its first, and resumed."""
    targets = {"inverted": TARGET, "faint": faint(5)}
    values: dict[str, Any] = {"authorized": SOURCE, "unauthorized": targets, "output": tmp_path}

    def go(steps: int, stop_at: int | None, *, resume: bool = False) -> Protection:
        seen: list[int] = []

        def stop(_: object) -> None:
            seen.append(1)
            if len(seen) == stop_at:
                raise KeyboardInterrupt

        method = SAMap(**TINY | {"steps": steps, "evaluate_every": 1}, masks="one_each")
        return protect(toy.trained(), method=method, progress=stop, resume=resume, **values)

    with pytest.raises(KeyboardInterrupt):
        go(3, stop_at=5)
    with pytest.raises(KeyboardInterrupt):
        go(4, stop_at=3)
    assert set(go(4, None, resume=True).masks) == set(targets)


# What comes out


@pytest.mark.parametrize("patience", [None, 1])
def test_measured_is_the_row_of_the_model_that_is_kept(patience):
    result = run(toy.trained("cnn"), steps=12, evaluate_every=1, patience=patience, learning_rate=5e-3)
    gaps = [row["gap"] for row in result.history]
    assert result.measured == result.history[-1 if patience is None else gaps.index(max(gaps))]
    assert result.measured["kept"] == pytest.approx(1 - result.mask.cut_share())
    assert len({row["kept"] for row in result.history}) > 1  # else any row would do


def test_nothing_was_measured_on_a_combination_of_masks():
    targets = {"inverted": TARGET, "faint": faint(5)}
    assert run(unauthorized=targets, masks="one_each").measured == {}


def test_the_same_seed_gives_the_same_result_whatever_the_global_one():
    model, results = toy.trained("cnn"), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(run(model, steps=6, learning_rate=2e-3, seed=7))
        assert torch.equal(torch.get_rng_state(), state)
    assert results[0].mask.folded_digest == results[1].mask.folded_digest
    assert rows(results[0]) == rows(results[1])
    other = run(model, steps=6, learning_rate=2e-3, seed=8)
    assert other.mask.folded_digest != results[0].mask.folded_digest


def test_the_result_is_the_mask_folded_into_an_ordinary_model(tmp_path):
    model = toy.trained("cnn")
    result = run(model, steps=6, learning_rate=2e-3)
    assert type(result.model) is type(model)
    assert list(result.model.state_dict()) == list(model.state_dict())
    assert digest_of(result.model) == result.mask.folded_digest != digest_of(model)
    loaded = Mask.load(result.mask.save(tmp_path))
    assert digest_of(loaded.apply(model)) == digest_of(result.model)
    assert result.masks == {}
    assert result.config == SAMap(**TINY | {"steps": 6, "learning_rate": 2e-3})
    metadata = loaded.metadata
    assert metadata["method"] == "SAMap"
    assert metadata["configuration"]["steps"] == 6
    assert metadata["versions"]["torch"] == torch.__version__
    assert metadata["versions"]["modelfence"] == mf.__version__


def variants() -> dict[str, nn.Module]:
    mixed = toy.trained("cnn")
    mixed[1].train()
    mixed[0].weight.requires_grad_(False)
    return {
        "train mode": toy.trained("cnn").train(),
        "mixed flags": mixed,
        "frozen": toy.trained("cnn").requires_grad_(False),
        "channels last": toy.trained("cnn").to(memory_format=torch.channels_last),
        "bfloat16": toy.trained("cnn").bfloat16(),
        "float16": toy.trained("mlp").half(),
        "float64": toy.trained("cnn").double(),
        "mapping": zoo.Wrapped(toy.trained("cnn"), "mapping"),
        "data parallel": nn.DataParallel(toy.trained("cnn")),
        "compiled": torch.compile(toy.trained("cnn"), backend="eager"),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", variants())
def test_the_model_given_is_never_changed(name, precision):
    model = variants()[name]

    def facts() -> list[Any]:
        inner = getattr(model, "module", getattr(model, "_orig_mod", model))
        tensors = inner.state_dict(keep_vars=True)
        return [
            digest_of(inner),
            [module.training for module in inner.modules()],
            {key: (value.requires_grad, value.grad, value.stride(), value.device) for key, value in tensors.items()},
            {key: value.data_ptr() for key, value in tensors.items()},
            [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in inner.modules()],
        ]

    before = facts()
    result = run(model, precision=precision, learning_rate=1e-2)
    assert facts() == before
    assert 0 < result.mask.cut_share() < 1
    dtypes = {key: value.dtype for key, value in result.model.state_dict().items()}
    assert list(dtypes.values()) == [value.dtype for value in model.state_dict().values()]


def test_progress_is_told_every_row_and_held_out_images_can_be_left_out():
    told: list[dict[str, float]] = []
    result = protect(
        toy.trained(), authorized=SOURCE, unauthorized=TARGET, method=SAMap(**TINY, held_out=0), progress=told.append
    )
    assert told == result.history
    assert not any("accuracy" in key or key == "gap" for row in told for key in row)


def test_held_out_images_are_measured_and_never_learned_on():
    seen: list[Tensor] = []

    def fetch(indices: Tensor) -> Tensor:
        seen.append(indices)
        return SOURCE.tensors[0][indices]

    domain = IndexedDomain("watched", fetch, 400, labels=SOURCE.tensors[1])
    result = run(authorized=domain, steps=60, batch_size=64, held_out=0.25, evaluate_every=60)
    learned = set(torch.cat([part for part in seen if len(part) == 32]).tolist())  # half a batch
    assert len(learned) == 300
    held_out = domain.split(0.25, seed=0)[1]
    seen.clear()
    list(held_out.once(250))
    assert learned.isdisjoint(torch.cat(seen).tolist())
    assert result.history[0]["source_accuracy"] > 0.9


# How domains may be given, and what they are called


@pytest.mark.parametrize(
    ("unauthorized", "names"),
    [
        (TARGET, ["unauthorized"]),
        ([TARGET], ["unauthorized_0"]),
        ((TARGET, faint(5)), ["unauthorized_0", "unauthorized_1"]),
        ({"usps": TARGET, 7: faint(5)}, ["usps", "7"]),
        (as_domain(TARGET, name="mine"), ["mine"]),
        (DataLoader(TARGET, batch_size=50, shuffle=True), ["unauthorized"]),
    ],
)
def test_names_of_unauthorized_domains(unauthorized, names):
    result = run(unauthorized=unauthorized)
    found = [key.removeprefix("target_accuracy:") for key in result.history[0] if key.startswith("target_accuracy:")]
    assert found == names


def test_a_loader_gives_what_a_loader_gave():
    loaders = [DataLoader(data, batch_size=40, shuffle=True) for data in (SOURCE, TARGET)]
    one, two = (run(None, *loaders, steps=12, learning_rate=2e-3) for _ in range(2))
    assert one.mask.folded_digest == two.mask.folded_digest
    assert one.mask.cut_share() > 0


# What is refused, in one line, before any step


class NoSplit:
    """A user's own domain, with what the protocol asks for and no more."""

    name, classes, size, labelled = "own", None, 400, True

    def once(self, batch_size: int, *, limit: int | None = None, device: object = "cpu") -> Any:
        images, labels = SOURCE.tensors
        return iter([Batch(images[:limit], labels[:limit])])

    def batches(self, batch_size: int, **_: object) -> Any:
        while True:
            yield next(self.once(batch_size, limit=batch_size))


def relabelled(add: int) -> TensorDataset:
    images, labels = TARGET.tensors
    return TensorDataset(images, labels + add)


def with_classes(count: int) -> IndexedDomain:
    images, labels = TARGET.tensors
    return IndexedDomain("odd", images.__getitem__, 400, classes=tuple("abcdefghijklmnop"[:count]), labels=labels)


def resized(side: int) -> TensorDataset:
    return TensorDataset(nn.functional.interpolate(TARGET.tensors[0], size=side), TARGET.tensors[1])


def pooled() -> nn.Module:
    """Return a network that takes images of any size."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)).eval()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no authorized": ({"authorized": None}, "SAMap needs authorized=: pass the authorized domain"),
    "no unauthorized": ({"unauthorized": None}, "SAMap needs unauthorized=: pass the unauthorized domain"),
    "no module": ({"model": lambda x: x}, "model= is function; a torch.nn.Module is needed"),
    "class as method": ({"method": SAMap}, "isn't a method configuration; known: .*SAMap"),
    "resume alone": ({"resume": True}, "resume= needs output="),
    "no domains": ({"unauthorized": []}, "unauthorized= is empty"),
    "no named domains": ({"unauthorized": {}}, "unauthorized= is empty"),
    "same name": ({"unauthorized": [as_domain(TARGET, name="a"), as_domain(SOURCE, name="a")]}, "same name"),
    "name taken": ({"unauthorized": {"authorized": TARGET}}, "named 'authorized'; give it another name"),
    "a number": ({"authorized": 3}, "int can't be a domain"),
    "unknown name": ({"authorized": "mnits"}, "mnist"),
    "label beyond": ({"unauthorized": relabelled(1)}, "'unauthorized' has label 10, the model has classes 0..9"),
    "negative label": ({"unauthorized": relabelled(-1)}, "'unauthorized': label -1 of image"),
    "more classes": ({"unauthorized": with_classes(12)}, "has 12 classes, the model gives 10; map the labels"),
    "no labels": ({"authorized": [(SOURCE.tensors[0],)]}, "'authorized' has no labels"),
    "wrong size": ({"unauthorized": {"big": resized(9)}}, r"domain 'big': .*fails on images of shape \(8, 1, 9, 9\)"),
    "two sizes": ({"model": pooled(), "unauthorized": resized(12)}, "images differ in shape .*'unauthorized' .1, 12,"),
    "small domain": ({"unauthorized": toy.blobs(12)}, "'unauthorized' has .* fewer than one batch"),
    "no split": ({"authorized": NoSplit()}, "'authorized' has no split method .* set held_out=0"),
    "uint8 without spec": ({"authorized": TensorDataset(SOURCE.tensors[0].byte(), SOURCE.tensors[1])}, "image="),
    "tiny batch": ({"method": SAMap(batch_size=2)}, "batch_size 2 leaves 1 image.s. a step .* raise batch_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    changes, text = REFUSED[name]
    method = SAMap(steps=1000, batch_size=32, precision="fp32")
    output = None if name == "resume alone" else tmp_path / "out"
    usual = {"model": toy.trained(), "authorized": SOURCE, "unauthorized": TARGET, "method": method, "output": output}
    arguments = usual | changes
    with pytest.raises(InputError, match=text) as caught:
        protect(arguments.pop("model"), **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [{"authorized": SOURCE}, {"unauthorized": TARGET}, {}])
def test_without_a_method_the_data_decides_and_synthesis_needs_the_image(given):
    with pytest.raises(InputError, match="image= is missing: images are synthesized"):
        protect(toy.trained(), **given)


def test_a_domain_of_ones_own_works_where_nothing_is_held_out():
    assert run(authorized=NoSplit(), held_out=0).history[-1]["step"] == 2


def test_a_label_beyond_the_classes_deep_in_a_stream_is_named():
    """It can't be seen before the stream gets there."""
    images, labels = TARGET.tensors
    labels = torch.cat([labels[:300], labels[300:] + 3])
    loader = DataLoader(TensorDataset(images, labels), batch_size=50)
    with pytest.raises(InputError, match=r"'unauthorized': label 1\d of image \d+ is outside 0..9"):
        run(unauthorized=loader, steps=200, batch_size=64, evaluate_every=200)


def test_a_loss_that_explodes_names_step_and_term(tmp_path):
    class Fragile(nn.Module):
        """Fine on eight images, as many as are looked at first, and NaN on more."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = toy.trained()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * (1 if len(x) <= 8 else float("nan"))

    with pytest.raises(NonFiniteError, match=r"step 1: loss term 'source' became NaN or infinite; lower learning_rate"):
        run(copy.deepcopy(Fragile()), batch_size=32)


@pytest.mark.parametrize("where", ["unauthorized", "watch"])
def test_classes_in_another_order_are_refused(where: str) -> None:
    def domain(name: str, *classes: str) -> IndexedDomain:
        images, labels = toy.blobs(seed=1).tensors
        return IndexedDomain(name, images.__getitem__, len(images), labels=labels, classes=classes)

    names = [f"class {number}" for number in range(10)]
    source, other = domain("a", *names), domain("b", *names[1:], names[0])
    given: dict[str, Any] = {"unauthorized": source, "watch": source, where: {"b": other}}
    with pytest.raises(InputError, match="domain 'b': class 0 is 'class 1', for domain 'a' it is 'class 0'"):
        protect(toy.trained(), authorized=source, method=SAMap(**TINY), **given)
