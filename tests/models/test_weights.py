import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelfence.errors import ArtifactError, InputError
from modelfence.models.weights import apart, fill, plain_state, read_weights, refuse_non_finite


class Tied(nn.Module):
    """An autoencoder whose two layers share one weight."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4)
        self.out.weight = self.into.weight


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("nested", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_torch_files_are_read_nested_or_not(tmp_path, nested, suffix):
    state = net().state_dict()
    torch.save({nested: state, "epoch": 3} if nested else state, tmp_path / f"w{suffix}")
    assert equal(read_weights(tmp_path / f"w{suffix}"), dict(state))


def test_safetensors_files_are_read(tmp_path):
    state = net().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    assert equal(read_weights(tmp_path / "w.safetensors"), dict(state))


@pytest.mark.parametrize("kind", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.99])
def test_truncated_files_are_said_to_be(tmp_path, kind, kept):
    path = tmp_path / kind
    state = net().state_dict()
    save_file(state, path) if kind.endswith("safetensors") else torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(ArtifactError, match=f"{kind}: truncated or altered") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none.pt: weights can't be read \(No such file"):
        read_weights(tmp_path / "none.pt")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(InputError, match=r"w\.onnx: weights must be a \.safetensors"):
        read_weights(tmp_path / "w.onnx")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(InputError, match="holds Tensor, not a state dict"):
        read_weights(tmp_path / "tensor.pt")
    torch.save({"weight": torch.zeros(2), "epoch": 3}, tmp_path / "mixed.pt")
    with pytest.raises(InputError, match="'epoch' is int, not a tensor"):
        read_weights(tmp_path / "mixed.pt")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_torchscript_archive_is_refused(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(InputError, match=r"script\.pt: is a TorchScript archive"):
        read_weights(tmp_path / "script.pt")


def test_python_objects_are_never_loaded(tmp_path):
    torch.save(net(), tmp_path / "module.pt")
    with pytest.raises(InputError, match="holds Python objects, which aren't loaded"):
        read_weights(tmp_path / "module.pt")
    torch.save({"x": Trap(str(tmp_path / "sprung"))}, tmp_path / "trap.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    for name in ("trap.pt", "raw.pt"):
        with pytest.raises(InputError):
            read_weights(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.", "_module."],
)
def test_prefixes_of_wrappers_are_removed(prefix):
    state, model = net().state_dict(), net()
    fill(model, {prefix + key: value for key, value in state.items()}, "w.pt")
    assert equal(model.state_dict(), state)


def test_a_compiled_part_inside_a_name_is_removed():
    weight = torch.zeros(1)
    assert list(plain_state({"body._orig_mod.0.weight": weight}, ["body.0.weight"], "w")) == ["body.0.weight"]
    with pytest.raises(InputError, match=r"w: 'a\.b' is there twice, once as 'a\._orig_mod\.b'"):
        plain_state({"a.b": weight, "a._orig_mod.b": weight}, ["a.b"], "w")


def test_a_model_with_a_part_called_module_keeps_its_names():
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 2))
    fill(model, {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, "w")
    assert bool((model.module.bias == 1).all())
    fill(model, {"module.module.weight": torch.zeros(2, 2), "module.module.bias": torch.zeros(2)}, "w")
    assert not model.module.bias.any()


def test_keys_and_shapes_that_differ_are_listed_in_one_line_and_nothing_is_loaded():
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {f"new.{number}": torch.zeros(1) for number in range(5)}
    state["0.weight"] = torch.zeros(7, 4)
    state["0.bias"] = torch.zeros(3)
    with pytest.raises(InputError) as caught:
        fill(model, state, "w.pt")
    text = str(caught.value)
    assert "missing '1.bias', '1.num_batches_tracked', '1.running_mean' and 2 more" in text
    assert "unexpected 'new.0', 'new.1', 'new.2' and 2 more" in text
    assert "'0.weight' is (7, 4) in the file, (3, 4) in the model" in text
    assert "\n" not in text
    assert equal(model.state_dict(), before)


def test_integers_for_floats_are_refused():
    state = net().state_dict()
    state["0.bias"] = torch.zeros(3, dtype=torch.int8)
    with pytest.raises(InputError, match=r"'0\.bias' is torch\.int8 in the file, torch\.float32 in the model"):
        fill(net(), state, "w.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_by_name(value):
    state = net().state_dict()
    state["1.running_var"][1] = value
    with pytest.raises(InputError, match=r"w: 1 of 3 values of '1\.running_var' are NaN or infinite"):
        refuse_non_finite(state, "w")
    with pytest.raises(InputError, match="NaN or infinite"):
        fill(net(), state, "w")


def test_dtypes_are_the_models_unless_they_shall_be_kept():
    half = net().to(torch.bfloat16).state_dict()
    model = net()
    fill(model, half, "w")
    assert model[0].weight.dtype == torch.float32
    fill(model, half, "w", keep_dtype=True)
    assert equal(model.state_dict(), half)
    assert model[0].weight.dtype == model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_every_name_has_memory_of_its_own():
    whole = torch.arange(6.0)
    state = {"all": whole, "part": whole[:3], "turned": whole.view(2, 3).T, "none": whole[:0], **Tied().state_dict()}
    found = apart(state)
    assert equal(found, state)
    assert len({value.untyped_storage().data_ptr() for key, value in found.items() if key != "none"}) == len(state) - 1
    assert all(value.is_contiguous() for value in found.values())


def test_a_tied_weight_is_filled_from_either_name_and_stays_tied():
    weight = torch.arange(16.0).view(4, 4)
    for name in ("into.weight", "out.weight"):
        for keep in (False, True):
            model = Tied()
            fill(model, {name: weight.bfloat16(), "out.bias": torch.zeros(4)}, "w", keep_dtype=keep)
            assert model.into.weight is model.out.weight
            assert model.into.weight.dtype == (torch.bfloat16 if keep else torch.float32)
            assert torch.equal(model.into.weight.float(), weight)


def test_a_tied_weight_with_two_values_is_refused():
    state = {"into.weight": torch.zeros(4, 4), "out.weight": torch.ones(4, 4), "out.bias": torch.zeros(4)}
    with pytest.raises(InputError, match=r"'into\.weight' and 'out\.weight' are one weight in the model but differ"):
        fill(Tied(), state, "w")
