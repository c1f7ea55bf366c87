"""What must hold for every kind of network that a user may bring."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests import processes
from tests.masking import zoo
from tests.masking.zoo import Case
from torch import Tensor, nn

from modelfence.masking.digest import digest_of
from modelfence.masking.mask import Mask
from modelfence.masking.masked_model import MaskedModel
from modelfence.masking.preflight import preflight
from modelfence.masking.selection import maskable
from modelfence.masking.unwrap import unwrap
from modelfence.models.outputs import logits_of

# torch says so once for each process; what is tested is the result
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def masked_at_random(model: nn.Module, share: float = 0.3) -> MaskedModel:
    """Cut about a share of the weights."""
    masked = MaskedModel(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for score in masked.scores:
            score[torch.rand(score.shape, generator=generator) < share] = 0.0
    return masked


def bits(value: Tensor) -> np.ndarray:
    """Bytes in logical order: tells +0.0 from -0.0."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def facts(model: nn.Module) -> dict[str, Any]:
    """Everything about a user's model that masking must leave as it was."""
    base = unwrap(model)
    return {
        "digest": digest_of(base),
        "flags": [module.training for module in model.modules()],
        "grads": {name: (value.requires_grad, value.grad is None) for name, value in base.named_parameters()},
        "strides": {name: value.stride() for name, value in base.state_dict().items()},
        "storage": {name: value.data_ptr() for name, value in base.state_dict().items()},
        "attributes": [sorted(vars(module)) for module in base.modules()],
    }


def test_preflight_finds_no_error(case: Case):
    errors = [str(found) for found in preflight(case.model, sample=case.images) if found.severity == "error"]
    assert errors == []


def test_the_folded_model_equals_the_masked_one_bit_for_bit(case: Case):
    masked = masked_at_random(case.model)
    folded = Mask.of(case.model, masked.kept()).apply(case.model).eval()
    # torch picks the kernel of a matrix product by whether the weight needs a gradient, so both have it alike
    frozen = copy.deepcopy(folded).requires_grad_(False)
    frozen_scores = copy.deepcopy(masked)
    frozen_scores.scores.requires_grad_(False)
    for one, other in ((masked, folded.requires_grad_(True)), (frozen_scores, frozen)):
        expected = logits_of(other(case.images))
        assert torch.equal(one(case.images), expected)
        assert expected.dtype == case.images.dtype
        with torch.inference_mode():
            assert torch.equal(frozen_scores(case.images), logits_of(frozen(case.images)))
    assert not torch.equal(expected, MaskedModel(case.model)(case.images))


def test_the_folded_model_is_the_users_own_with_zeros(case: Case):
    base, masked = unwrap(case.model), masked_at_random(case.model)
    mask = Mask.of(case.model, masked.kept())
    folded = mask.apply(case.model)
    assert type(folded) is type(base)
    assert list(folded.state_dict()) == list(base.state_dict())
    assert [type(module) for module in folded.modules()] == [type(module) for module in base.modules()]
    assert [module.training for module in folded.modules()] == [module.training for module in base.modules()]
    cut = dict(mask.kept) | {other: mask.kept[name] for other, name in mask.aliases.items()}
    for name, value in base.state_dict().items():
        other = folded.state_dict()[name]
        assert (other.dtype, other.shape, other.stride()) == (value.dtype, value.shape, value.stride()), name
        expected = value.masked_fill(~cut[name], 0) if name in cut else value
        np.testing.assert_array_equal(bits(other), bits(expected), err_msg=name)
    assert 0.1 < mask.cut_share() < 0.6
    assert {name: p.requires_grad for name, p in folded.named_parameters()} == {
        name: p.requires_grad for name, p in base.named_parameters()
    }


def test_folding_twice_equals_folding_once(case: Case):
    mask = Mask.of(case.model, masked_at_random(case.model).kept())
    once = mask.apply(case.model)
    assert digest_of(once) == mask.folded_digest != mask.base_digest == digest_of(unwrap(case.model))
    assert (mask.is_in(once), mask.is_in(case.model)) == (True, False)
    assert digest_of(mask.apply(once)) == mask.folded_digest


def test_nothing_of_the_users_model_changes(case: Case):
    before = facts(case.model)
    masked = masked_at_random(case.model)
    masked.train()
    masked(case.images, batch_mode=[case.images]) if case.images.dtype.itemsize > 2 else masked(case.images)
    masked(case.images).float().square().sum().backward()
    masked.teacher(case.images)
    Mask.of(case.model, masked.kept()).apply(case.model)
    preflight(case.model, sample=case.images)
    assert facts(case.model) == before


def test_the_teacher_stays_the_network_as_it_was(case: Case):
    masked = masked_at_random(case.model)
    base, logits = digest_of(masked.base), masked.teacher(case.images)
    assert base == digest_of(unwrap(case.model))
    for _ in range(2):
        masked(case.images).float().square().sum().backward()
    with torch.no_grad():
        masked(case.images)
    assert digest_of(masked.base) == base
    assert torch.equal(masked.teacher(case.images), logits)
    assert not any(module.training for module in masked.base.modules())


@torch.no_grad()
def test_every_selected_weight_is_heard(case: Case):
    masked = MaskedModel(case.model)
    masked.scores.requires_grad_(True)
    assert masked.names == tuple(maskable(unwrap(case.model)))
    for training, gradients in ((True, True), (False, True), (False, False)):
        masked.train(training)
        with torch.set_grad_enabled(gradients):
            whole = masked(case.images).detach()
            for name, score in zip(masked.names, masked.scores, strict=True):
                saved = score.detach().clone()
                score.data.zero_()
                assert not torch.equal(masked(case.images), whole), f"{name} in train={training}, grad={gradients}"
                score.data.copy_(saved)


def test_the_score_gradient_is_that_of_the_folded_weight_times_the_weight(case: Case):
    masked = masked_at_random(case.model)
    folded = Mask.of(case.model, masked.kept()).apply(case.model).eval().requires_grad_(False)
    weights = {name: folded.get_parameter(name) for name in masked.names}
    for value in weights.values():
        value.requires_grad_(True)
    direction = torch.randn(len(case.images), zoo.CLASSES)
    (masked(case.images).float() * direction).sum().backward()
    (logits_of(folded(case.images)).float() * direction).sum().backward()
    tolerance = {2: 5e-2, 4: 1e-4, 8: 1e-6}[case.images.dtype.itemsize]
    for name, score in zip(masked.names, masked.scores, strict=True):
        expected = weights[name].grad.double() * unwrap(case.model).get_parameter(name).detach().double()
        assert score.grad is not None
        assert score.grad.dtype == torch.float32
        error = (score.grad - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < tolerance, name
        assert expected.abs().max() > 0, name
    assert masked.base.training is False
    assert all(value.grad is None for value in masked.base.parameters())


def test_copies_and_pickles_give_the_same_logits(case: Case):
    masked = masked_at_random(case.model)
    mask = Mask.of(case.model, masked.kept())
    folded = mask.apply(case.model).eval()
    for model in (masked, folded):
        expected = logits_of(model(case.images))
        assert torch.equal(logits_of(copy.deepcopy(model)(case.images)), expected)
        if not zoo.parametrized(model):
            assert torch.equal(logits_of(pickle.loads(pickle.dumps(model))(case.images)), expected)  # noqa: S301


def test_a_spawned_process_gives_the_same_logits(tmp_path):
    names = "resnet vit_torchvision swin_torchvision lstm_head shared_submodule tied_embedding bfloat16_cnn"
    models: dict[str, tuple[MaskedModel, nn.Module, Tensor]] = {}
    for name in [*names.split(), "made_in_inference_mode", "channels_last_base", "compiled_in_place"]:
        model, images = zoo.ZOO[name]()
        masked = masked_at_random(model)
        folded = Mask.of(model, masked.kept()).apply(model).eval()
        models[name] = masked, folded, images
    expected = _logits(models)
    found = processes.call(_logits, pickle.dumps(models), folder=tmp_path)
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert all(map(torch.equal, found[name], pair)), name


@torch.no_grad()
def _logits(models: Any) -> dict[str, tuple[Tensor, Tensor]]:
    if isinstance(models, bytes):
        models = pickle.loads(models)  # noqa: S301
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other process: the number of threads decides the order of sums
    try:
        return {name: (masked(x), logits_of(folded(x))) for name, (masked, folded, x) in models.items()}
    finally:
        torch.set_num_threads(threads)
