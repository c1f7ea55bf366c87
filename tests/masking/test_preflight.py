"""What can't be masked is refused before any work, in one line that says what, where and what to do."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from tests.masking import zoo
from tests.methods import toy
from torch import Tensor, nn
from torch.nn.utils import prune

from modelfence import ImageSpec, SAMap, preflight, protect
from modelfence.errors import InputError
from modelfence.masking.digest import digest_of

# torch.jit is deprecated, and users still have models made by it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def image_net() -> nn.Sequential:
    """A network that takes the toy domains' images."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, toy.CLASSES)).eval()


def scripted() -> nn.Module:
    return torch.jit.script(image_net())


def traced() -> nn.Module:
    return torch.jit.trace(image_net(), torch.zeros(2, 1, 8, 8))


def scripted_part() -> nn.Module:
    model = image_net()
    model[2] = torch.jit.script(model[2])
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        # which of torch's deprecated helpers the quantizer calls differs from version to version
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(image_net(), {nn.Linear})


def lazy() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LazyLinear(toy.CLASSES))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return image_net()


def not_a_number() -> nn.Module:
    model = image_net()
    model[2].weight.data[3, 1] = float("nan")
    return model


def infinite_statistics() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm2d(1), *image_net()).eval()
    model[0].running_var[0] = float("inf")
    return model


def no_weights() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.LayerNorm(64)).eval()


def pruned() -> nn.Module:
    model = image_net()
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def old_weight_norm() -> nn.Module:
    model = image_net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        model[2] = nn.utils.weight_norm(model[2])
    return model


def old_spectral_norm() -> nn.Module:
    model = image_net()
    model[0] = nn.utils.spectral_norm(model[0])
    return model


def pruned_everywhere() -> nn.Module:
    model = pruned()
    prune.l1_unstructured(model[2], "weight", 0.3)
    return model


class Checkpointed(nn.Module):
    """Calls torch.utils.checkpoint without any of the flags that could be switched off."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = image_net()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.inner[0], x, use_reentrant=self.reentrant)
        return self.inner[1:](hidden)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "TorchScript": (scripted, "", "is TorchScript; give the Python module"),
    "traced": (traced, "", "is TorchScript; give the Python module"),
    "TorchScript inside": (scripted_part, "2", "is TorchScript"),
    "quantized": (quantized, "2", "is quantized .* mask the float model, then quantize"),
    "lazy": (lazy, "2.weight", "is lazy: .* run one batch through the model first"),
    "meta": (on_meta, "0.weight", "is on the meta device: .* load the weights"),
    "NaN": (not_a_number, "2.weight", "has 1 values that are NaN or infinite; load a sound checkpoint"),
    "infinite buffer": (infinite_statistics, "0.running_var", "has 1 values that are NaN or infinite"),
    "no weights": (no_weights, "", "has no convolution, linear or attention weight; there is nothing to mask"),
    "pruned": (pruned, "0.weight", "is pruned and would not be masked; call .*prune.remove first"),
    "pruned everywhere": (pruned_everywhere, "0.weight", "is pruned and would not be masked"),
    "weight_norm of old": (old_weight_norm, "2.weight", "has a weight norm .*remove_weight_norm"),
    "spectral_norm of old": (old_spectral_norm, "0.weight", "has a spectral norm .*remove_spectral_norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_path_reason_and_remedy(name):
    build, path, text = REFUSED[name]
    first = preflight(build())[0]
    assert first.severity == "error"
    assert first.path == path
    with pytest.raises(InputError, match=text):
        raise InputError(str(first))
    assert "\n" not in str(first)


@pytest.mark.parametrize("name", REFUSED)
def test_protect_refuses_it_in_one_line_before_any_work(name, tmp_path):
    build, path, text = REFUSED[name]
    data = toy.blobs(100)
    with pytest.raises(InputError, match=text) as caught:
        protect(build(), authorized=data, unauthorized=data, method=SAMap(steps=1), output=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pruned", "pruned everywhere", "weight_norm of old", "spectral_norm of old"])
@pytest.mark.parametrize("state", ["frozen", "frozen and run", "run without gradients"])
def test_a_weight_that_hooks_compute_is_refused_in_whatever_state_it_is(name, state):
    """Frozen, or once run without gradients, such a network can be copied, and its hooks overwrite what is masked."""
    build, path, text = REFUSED[name]
    model = build()
    if state.startswith("frozen"):
        model.requires_grad_(False)
    if state.endswith(("run", "gradients")):
        with torch.no_grad():
            model(torch.zeros(2, 1, 8, 8))
    first = preflight(model)[0]
    assert (first.severity, first.path) == ("error", path)
    assert re.search(text, str(first))
    with pytest.raises(InputError, match=text):
        protect(model, authorized=toy.blobs(), unauthorized=toy.blobs(), method=SAMap(steps=1))


def test_a_pruned_bias_is_no_error_where_the_network_can_be_copied():
    model = image_net().requires_grad_(False)
    prune.l1_unstructured(model[0], "bias", 0.5)
    assert preflight(model, sample=torch.zeros(2, 1, 8, 8)) == []


class Gated(nn.Module):
    """Names that hooks leave, with no hook: a gate and a value, a position and what is left out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.W_g = nn.Parameter(torch.ones(64, 64))
        self.W_v = nn.Parameter(torch.ones(64, 64))
        self.weight_orig = nn.Parameter(torch.ones(2, 64))
        self.register_buffer("weight_mask", torch.ones(64))
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x @ self.W_v * (x @ self.W_g).sigmoid() * self.weight_mask)


def test_names_alone_refuse_no_network():
    assert [one.severity for one in preflight(Gated(), sample=torch.zeros(2, 1, 8, 8))] == ["note"] * 3


def test_what_is_never_masked_may_be_computed():
    """Hooks and parametrizations on what isn't masked change nothing, and taking them off would mask nothing."""
    normalized = nn.Sequential(nn.BatchNorm2d(1), *image_net()).eval().requires_grad_(False)
    prune.l1_unstructured(normalized[0], "weight", 1)
    parametrized = image_net()
    nn.utils.parametrize.register_parametrization(parametrized[0], "bias", nn.Identity())
    for model in (normalized, parametrized):
        assert preflight(model, sample=torch.zeros(2, 1, 8, 8)) == []


def test_protect_warns_of_a_parametrized_weight_that_it_does_not_mask():
    model = image_net()
    model[2] = nn.utils.parametrizations.weight_norm(model[2])
    found = protect(model, authorized=toy.blobs(), unauthorized=toy.blobs(inverted=True), method=SAMap(steps=1))
    assert found.warnings == (
        "2.weight: is parametrized and not masked; remove the parametrization first if it shall be masked",
        "the mask cuts no weight, so the model is what it was: take more steps",
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # torch's own
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_no_flag_switches_off_is_refused(reentrant):
    """Its gradients would be wrong without any error (the recomputation sees the unmasked weights)."""
    model = Checkpointed(reentrant=reentrant)
    assert preflight(model) == []
    found = preflight(model, sample=torch.zeros(2, 1, 8, 8))
    assert "recomputes activations" in str(found[0])
    assert found[0].severity == "error"
    data = toy.blobs(100)
    with pytest.raises(InputError, match="domain 'authorized': .* switch activation checkpointing off"):
        protect(model, authorized=data, unauthorized=data, method=SAMap(steps=1))


def test_a_pruned_model_once_made_permanent_is_welcome():
    model = pruned()
    prune.remove(model[0], "weight")
    assert preflight(model, sample=torch.zeros(2, 1, 8, 8)) == []


def test_every_finding_is_listed_errors_first():
    model = zoo.vit_timm().model
    model.set_grad_checkpointing(True)
    model.head.weight.data[0, 0] = float("inf")
    model.blocks[0].mlp.fc1.bias.data[0] = float("nan")
    found = preflight(model)
    assert [finding.severity for finding in found] == ["error"] * 2 + ["note"] * 3
    assert {finding.path for finding in found[:2]} == {"head.weight", "blocks.0.mlp.fc1.bias"}
    notes = " | ".join(str(finding) for finding in found[2:])
    assert "cls_token: is not masked (16 values)" in notes
    assert "uses activation checkpointing; it is switched off in the working copy" in notes


def test_more_errors_than_one_are_counted():
    model = not_a_number()
    model[0].bias.data[0] = float("nan")
    with pytest.raises(InputError, match="and 1 more error"):
        protect(model, authorized=toy.blobs(), unauthorized=toy.blobs(), method=SAMap(steps=1))


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (torch.zeros(2, 3, 8, 8), r"fails on images of shape \(2, 3, 8, 8\) .*check channels, size"),
        (torch.zeros(2, 1, 9, 9), r"fails on images of shape \(2, 1, 9, 9\)"),
    ],
)
def test_images_that_do_not_fit_are_named(sample, text):
    with pytest.raises(InputError, match=text):
        raise InputError(str(preflight(image_net(), sample=sample)[0]))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 1)), "logits of shape .* image classifiers only"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(0), nn.Unflatten(0, (1, -1))), "gives 1 rows for 2 images"),
        (zoo.Wrapped(nn.Conv2d(1, 2, 1), "mapping"), "image classifiers only"),
        (nn.RNN(8, 3), "fails on images"),
    ],
)
def test_what_is_no_classifier_is_refused(model, text):
    first = preflight(model, sample=torch.zeros(2, 1, 8, 8))[0]
    assert first.severity == "error"
    with pytest.raises(InputError, match=text):
        raise InputError(str(first))


class Silent(nn.Sequential):
    """Fails without saying why."""

    def forward(self, images):
        raise AssertionError


class Without(nn.Sequential):
    """Computes as for inference."""

    @torch.no_grad()
    def forward(self, images):
        return super().forward(images)


def test_an_error_without_a_text_is_named_by_its_type():
    found = preflight(Silent(nn.Flatten(), nn.Linear(64, 2)), sample=torch.zeros(2, 1, 8, 8))
    assert "fails on images of shape (2, 1, 8, 8) (AssertionError)" in str(found[0])


def test_a_model_that_computes_without_gradients_is_refused():
    model = Without(nn.Flatten(), nn.Linear(64, 2))
    assert "computes its logits without gradients" in str(preflight(model, sample=torch.zeros(2, 1, 8, 8))[0])
    assert preflight(model.requires_grad_(False), sample=torch.zeros(2, 1, 8, 8))[0].severity == "error"


def test_a_model_that_rounds_its_images_can_be_masked():
    model = nn.Sequential(Rounding(), nn.Flatten(), nn.Linear(64, 2)).requires_grad_(False)
    assert preflight(model, sample=torch.zeros(2, 1, 8, 8)) == []


class Rounding(nn.Module):
    def forward(self, images):
        return (images * 255).byte().float() / 255


def test_the_image_spec_tries_the_forward_pass():
    spec = ImageSpec(channels=3, height=8, width=8, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert "fails on images of shape (2, 3, 8, 8)" in str(preflight(image_net(), image=spec)[0])
    grey = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
    assert preflight(image_net(), image=grey) == []


def test_the_model_and_the_callers_gradient_mode_stay():
    model = image_net().train()
    before = digest_of(model)
    with torch.inference_mode():
        assert preflight(model, sample=torch.zeros(2, 1, 8, 8)) == []
        assert torch.is_inference_mode_enabled()
    assert digest_of(model) == before
    assert all(module.training for module in model.modules())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
