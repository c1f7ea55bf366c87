import hashlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError, InputError
from modelfence.files import unsealed
from modelfence.models import load
from modelfence.models.load import load_model, save_model
from modelfence.models.zoo import create_model

SPEC = ImageSpec(3, 32, 32, (0.5,) * 3, (0.25,) * 3)
FACTORY = """
import torch
from torch import nn

CALLS = []


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(12, width)
        self.twin = nn.Linear(12, width)
        self.twin.weight = self.inner.weight

    def forward(self, images):
        return {"logits": self.inner(images.flatten(1)) + self.twin(images.flatten(1))}


def tied(width=5):
    CALLS.append(width)
    return Tied(width)


def broken():
    raise KeyError("no such option")


def spoiled():
    model = Tied(5)
    nn.init.constant_(model.inner.bias, float("nan"))
    return model


TEXT = "not a function"


def number():
    return 3


def talkative():
    raise ValueError("one\\n  two")
"""
TINY = ImageSpec(3, 2, 2, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module with factories in the current folder; returns its name."""
    name = f"factories_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def saved(tmp_path):
    """A folder with a saved small_vgg_bn, and the network in it."""
    model = create_model("small_vgg_bn", 7, SPEC)
    nn.init.uniform_(model.features[1].running_mean)
    save_model(tmp_path / "m", model, reference="small_vgg_bn", classes=7, image=SPEC, extra={"note": ["a"]})
    return tmp_path / "m", model


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_saved_model_comes_back_bit_for_bit_in_eval_mode(saved):
    folder, model = saved
    for name in (folder, str(folder), f"{folder}/"):
        found = load_model(name)
        assert equal(found.model.state_dict(), model.state_dict())
        assert not any(module.training for module in found.model.modules())
        assert (found.classes, found.image, found.reference) == (7, SPEC, "small_vgg_bn")
        assert (found.args, found.extra) == ({}, {"note": ["a"]})
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found.model(images), model.eval()(images))


def test_only_two_plain_files_are_written(saved):
    folder, model = saved
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]
    assert equal(load_file(folder / "model.safetensors"), dict(model.state_dict()))


def test_a_bf16_channels_last_timm_model_with_args_comes_back(tmp_path):
    args = {"drop_rate": 0.25, "pretrained": False}
    model = create_model("test_resnet", 4, SPEC, **args).to(torch.bfloat16).to(memory_format=torch.channels_last)
    save_model(tmp_path, model, reference="test_resnet", classes=4, image=SPEC, args=args)
    found = load_model(tmp_path)
    assert equal(found.model.state_dict(), model.state_dict())
    assert {value.dtype for value in found.model.parameters()} == {torch.bfloat16}
    assert found.args == {"drop_rate": 0.25}
    assert found.model.drop_rate == 0.25


def test_extra_comes_back_as_json_has_it(tmp_path):
    """Keys become text, which sorts otherwise than numbers do."""
    extra = {"names": {number: str(number) for number in range(12)}, "pair": (1, 2)}
    model = create_model("small_vgg_bn", 4, SPEC)
    save_model(tmp_path, model, reference="small_vgg_bn", classes=4, image=SPEC, extra=extra)
    assert load_model(tmp_path).extra == {"names": {str(number): str(number) for number in range(12)}, "pair": [1, 2]}


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    model = create_model("small_vgg_bn", 4, SPEC)
    names = list(model.state_dict())
    model.features = torch.compile(model.features)
    save_model(tmp_path, nn.DataParallel(model), reference="small_vgg_bn", classes=4, image=SPEC)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(names)
    load_model(tmp_path)


def test_an_altered_or_truncated_file_is_refused(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for wrong in (bytes(flipped), content[:-1], b""):
        weights.write_bytes(wrong)
        with pytest.raises(ArtifactError, match=r"model\.safetensors: truncated or altered \(SHA-256"):
            load_model(folder)
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors: can't be read"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: record.pop("sha256"), "sha256: Field required"),
        (lambda record: record.update(classes="many"), "classes: "),
        (lambda record: record["image"].update(mean=[0.5]), "image: "),
        (lambda record: record.update(surprise=1), "surprise: "),
        (lambda record: record.update(version=2), "has format version 2; a newer modelfence is needed"),
        (lambda record: record.update(aliases={"x": "y"}), "aliases: 'x' -> 'y' doesn't fit"),
    ],
)
def test_a_record_changed_on_purpose_names_the_key_that_is_wrong(saved, change, text):
    path = saved[0] / "model.json"
    record = unsealed(json.loads(path.read_text()))
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ArtifactError, match=text) as caught:
        load_model(saved[0])
    assert "\n" not in str(caught.value)


def test_a_record_changed_by_hand_is_read_once_the_line_named_is_out(saved):
    path = saved[0] / "model.json"
    path.write_text(path.read_text().replace('"classes": 7', '"classes": 8'))
    with pytest.raises(ArtifactError, match="'digest' was made of .*take that line out"):
        load._read_record(saved[0])
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"digest"' not in line))
    assert load._read_record(saved[0]).classes == 8


def test_every_damaged_byte_of_the_record_is_detected(saved):
    """A flipped bit that leaves the content as it was, such as one in a space, does no harm."""
    folder, _ = saved
    path = folder / "model.json"
    content, record = path.read_bytes(), load._read_record(folder)
    assert record.image == SPEC
    undetected = []
    for position in range(len(content)):
        flipped = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        for wrong in (flipped, content[:position], content[:position] + content[position + 1 :]):
            path.write_bytes(wrong)
            try:
                if load._read_record(folder) != record:
                    undetected.append(wrong)
            except ArtifactError as error:
                assert str(path) in str(error)
    assert undetected == []
    path.write_text(content.decode().replace("0.5", "0.4", 1))
    with pytest.raises(ArtifactError, match=r"model\.json: truncated or altered .*if the change is yours, take that"):
        load_model(folder)


def test_a_truncated_record_and_a_folder_without_one_are_refused(saved):
    folder, _ = saved
    text = (folder / "model.json").read_text()
    (folder / "model.json").write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match=r"model\.json: truncated or altered"):
        load_model(folder)
    (folder / "model.json").unlink()
    with pytest.raises(ArtifactError, match=r"m: has no model\.json"):
        load_model(folder)
    with pytest.raises(ArtifactError, match=r"model\.json: can't be read"):
        load_model("small_vgg_bn", weights=folder)
    with pytest.raises(InputError, match=r"no such folder; give a saved folder, a name or"):
        load_model(folder / "deeper")


def test_what_the_record_says_must_agree(saved):
    folder, _ = saved
    assert load_model(folder, classes=7, image=SPEC).classes == 7
    with pytest.raises(InputError, match="m: classes is 7, not 10 as asked for; leave classes= out"):
        load_model(folder, classes=10)
    with pytest.raises(InputError, match="m: image is ImageSpec"):
        load_model(folder, image=TINY)
    with pytest.raises(InputError, match="a saved folder has its own weights; leave weights= out"):
        load_model(folder, weights=folder / "model.safetensors")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_zoo_name_takes_weights_from_a_file(tmp_path, suffix):
    model = create_model("small_vgg_bn", 4, SPEC)
    path = tmp_path / f"w.{suffix}"
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    save_file(state, path) if suffix == "safetensors" else torch.save({"state_dict": state}, path)
    found = load_model("small_vgg_bn", classes=4, image=SPEC, weights=path)
    assert equal(found.model.state_dict(), model.state_dict())
    with pytest.raises(InputError, match=r"w\.\w+: doesn't fit the model: .*'classifier\.0\.weight' is \(4, 128\)"):
        load_model("small_vgg_bn", classes=5, image=SPEC, weights=path)


def test_a_name_needs_classes_image_and_weights():
    with pytest.raises(InputError, match="model 'vgg11': classes= is missing"):
        load_model("vgg11", image=SPEC)
    with pytest.raises(InputError, match="model 'vgg11': image= is missing"):
        load_model("vgg11", classes=10)
    with pytest.raises(InputError, match="names an architecture without trained weights; give weights="):
        load_model("vgg11", classes=10, image=SPEC)
    with pytest.raises(InputError, match="Did you mean 'vgg11'"):
        load_model("vgg111", classes=10, image=SPEC, weights="w.pt")


def test_a_factory_in_the_current_folder_is_called_with_or_without_args(factories):
    reference = f"{factories}:tied"
    path = list(sys.path)
    assert load_model(reference, classes=5, image=TINY).model.inner.out_features == 5
    found = load_model(reference, classes=6, image=TINY, args={"width": 6})
    assert found.reference == reference
    assert found.args == {"width": 6}
    assert sys.modules[factories].CALLS == [5, 6]
    assert sys.path == path


def test_tied_weights_are_saved_under_every_name_and_come_back_tied(factories, tmp_path):
    reference = f"{factories}:tied"
    model = load_model(reference, classes=5, image=TINY).model
    save_model(tmp_path / "m", model, reference=reference, classes=5, image=TINY, args={"width": 5})
    assert equal(load_file(tmp_path / "m" / "model.safetensors"), model.state_dict())
    found = load_model(reference, weights=tmp_path / "m")
    assert equal(found.model.state_dict(), model.state_dict())
    assert found.model.twin.weight is found.model.inner.weight
    from_file = load_model(reference, classes=5, image=TINY, weights=tmp_path / "m" / "model.safetensors")
    assert equal(from_file.model.state_dict(), model.state_dict())


def test_an_earlier_file_with_one_name_of_a_tied_weight_is_read(factories, tmp_path):
    reference = f"{factories}:tied"
    model = load_model(reference, classes=5, image=TINY).model
    save_model(tmp_path, model, reference=reference, classes=5, image=TINY, args={"width": 5})
    weights = load_file(tmp_path / "model.safetensors")
    del weights["twin.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    record = unsealed(json.loads((tmp_path / "model.json").read_text()))
    record |= {"aliases": {"twin.weight": "inner.weight"}}
    record |= {"sha256": hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()}
    (tmp_path / "model.json").write_text(json.dumps(record))
    assert equal(load_model(reference, weights=tmp_path).model.state_dict(), model.state_dict())


def test_a_record_cannot_make_us_run_code_that_the_caller_did_not_name(saved, factories):
    path = saved[0] / "model.json"
    record = unsealed(json.loads(path.read_text()))
    path.write_text(json.dumps({**record, "reference": f"{factories}:tied"}))
    with pytest.raises(InputError, match=r"is built by the factory .* if you trust it, give that as the model"):
        load_model(saved[0])
    assert factories not in sys.modules
    path.write_text(json.dumps({**record, "reference": "test_resnet", "args": {"checkpoint_path": "x.pt"}}))
    with pytest.raises(InputError, match="'checkpoint_path' isn't taken here"):
        load_model(saved[0])
    path.write_text(json.dumps({**record, "reference": None}))
    with pytest.raises(InputError, match="was saved without a reference; name what builds it and give weights="):
        load_model(saved[0])
    assert load_model("small_vgg_bn", weights=saved[0]).classes == 7


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("tide", "no function 'tide' in .* Did you mean 'tied'"),
        ("TEXT", "no function 'TEXT'"),
        ("broken", r"the factory failed \(KeyError: 'no such option'\); check its args"),
        ("talkative", r"the factory failed \(ValueError: one\); check its args$"),
        ("number", "the factory returned int, not a Module"),
        ("spoiled", r"5 of 5 values of 'inner\.bias' are NaN or infinite"),
        ("tied", "gives 5 logits, not 4; set classes= to its number"),
    ],
)
def test_factories_that_fail_are_named(factories, function, text):
    with pytest.raises(InputError, match=text) as caught:
        load_model(f"{factories}:{function}", classes=4, image=TINY)
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(InputError, match=r"'no_such_module' can't be imported \(ModuleNotFoundError"):
        load_model("no_such_module:build", classes=4, image=TINY)


def test_what_cannot_be_saved_is_refused_and_nothing_is_overwritten(saved):
    folder, model = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    keywords = {"reference": "small_vgg_bn", "classes": 7, "image": SPEC}
    with pytest.raises(InputError, match=r"model\.json: args or extra aren't JSON values"):
        save_model(folder, model, **keywords, extra={"path": folder})
    nn.init.constant_(model.classifier[0].bias, float("nan"))
    with pytest.raises(InputError, match=r"the model: 7 of 7 values of 'classifier\.0\.bias' are NaN"):
        save_model(folder, model, **keywords)
    with pytest.raises(InputError, match=r"'features\.0\.weight' is on the meta device"):
        save_model(folder, model.to("meta"), **keywords)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
