import numpy as np
import pytest
import torch
from tests.methods import toy
from torch import Tensor
from torch.nn import functional as F

from modelfence import ImageSpec, SAMap, protect
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.models.autocast import attention_in_float32, autocast, default_precision, resolve_precision
from modelfence.models.training import TrainConfig, train
from modelfence.models.zoo import create_model


@pytest.mark.parametrize(
    ("name", "bf16", "amx", "expected"),
    [
        ("AMD EPYC", 1, 0, "bf16"),
        ("AMD EPYC", 0, 0, "fp32"),
        ("Intel(R) Xeon(R) Processor", 1, 1, "bf16"),
        ("Intel(R) Xeon(R) Processor", 1, 0, "fp32"),
        ("Intel64 Family 6 Model 207 Stepping 2, GenuineIntel", 1, 0, "fp32"),
        ("", 1, 0, "bf16"),
        ("", 0, 1, "bf16"),
    ],
)
def test_processors_with_fast_bf16_use_it(monkeypatch, name, bf16, amx, expected):
    monkeypatch.setattr("modelfence.models.autocast.processor", lambda: name)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(bf16), raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx), raising=False)
    assert default_precision("cpu") == expected
    assert resolve_precision("auto", "cpu") == expected


def test_a_torch_without_the_question_computes_in_fp32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert default_precision("cpu") == "fp32"


def test_other_devices_compute_in_fp32():
    assert default_precision("meta") == "fp32"


def test_a_precision_given_is_kept():
    assert resolve_precision("bf16", "cpu") == "bf16"
    assert resolve_precision("fp32", "cpu") == "fp32"


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match="precision 'fp16' isn't known; use 'auto', 'bf16' or 'fp32'"):
        autocast("cpu", "fp16")


def test_fp32_turns_an_outer_autocast_off():
    layer, images = torch.nn.Linear(4, 2), torch.ones(1, 4)
    with autocast("cpu", "bf16"):
        assert layer(images).dtype == torch.bfloat16
        with autocast("cpu", "fp32"):
            assert layer(images).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.fixture
def seen(monkeypatch):
    """The dtypes that attention is computed in."""
    dtypes, fused = set(), F.scaled_dot_product_attention

    def noted(*args, **kwargs):
        dtypes.update(value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return dtypes


def attention_by_hand(query, key, value, bias):
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]) + bias
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return (shares / shares.sum(-1, keepdims=True)) @ value


def test_attention_on_a_cpu_is_computed_in_float32_under_autocast(seen):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(5, 5, dtype=torch.bfloat16)
    with attention_in_float32("cpu", "bf16"), autocast("cpu", "bf16"):
        found = F.scaled_dot_product_attention(query, key=key, value=value, attn_mask=bias)
    assert seen == {torch.float32}
    assert found.dtype == torch.bfloat16
    exact = attention_by_hand(*(one.double().numpy() for one in (query, key, value, bias)))
    np.testing.assert_allclose(found.double().numpy(), exact, rtol=2**-8)  # rounded once


def test_attention_is_left_alone_without_autocast(seen):
    heads = torch.randn(1, 1, 3, 4, dtype=torch.bfloat16)
    with attention_in_float32("cpu", "bf16"), autocast("cpu", "fp32"):
        assert F.scaled_dot_product_attention(heads, heads, heads).dtype == torch.bfloat16
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("causal", [False, True])
def test_double_precision_is_left_alone_as_autocast_does(causal, seen):
    heads = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with attention_in_float32("cpu", "bf16"), autocast("cpu", "bf16"):
        found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=causal)
    assert seen == {found.dtype} == {torch.float64}


@pytest.mark.parametrize(("device", "precision"), [("meta", "bf16"), ("cpu", "fp32"), ("cpu", "32-true")])
def test_other_devices_and_precisions_change_nothing(device, precision):
    fused = F.scaled_dot_product_attention
    with attention_in_float32(device, precision):
        assert F.scaled_dot_product_attention is fused


def test_torch_is_as_it_was_after_an_error():
    fused, inside = F.scaled_dot_product_attention, None

    def fail():
        nonlocal inside
        with attention_in_float32("cpu", "bf16"):
            inside = F.scaled_dot_product_attention
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside not in (None, fused)
    assert F.scaled_dot_product_attention is fused


def test_multi_head_attention_is_computed_in_float32_too(seen):
    torch.manual_seed(0)
    attention, tokens = torch.nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    with attention_in_float32("cpu", "bf16"), autocast("cpu", "bf16"):
        attention(tokens, tokens, tokens, need_weights=False)[0].sum().backward()
    assert seen == {torch.float32}


def small_vit():
    torch.manual_seed(0)
    image = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.25,))
    args = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 3}
    return create_model("vit_tiny_patch16_224", 10, image, **args)


def test_a_checkpointed_network_is_trained_with_attention_in_float32(seen):
    model = small_vit()
    model.set_grad_checkpointing(True)
    data = as_domain(toy.blobs(64), name="blobs")
    history = train(model, data, data, TrainConfig(epochs=1, batch_size=32, precision="bf16"))
    assert len(history) == 1
    assert seen == {torch.float32}


def test_masks_are_learned_and_measured_with_attention_in_float32(seen):
    model = small_vit()
    method = SAMap(steps=2, batch_size=8, precision="bf16")
    protect(model, authorized=toy.blobs(40), unauthorized=toy.blobs(40, inverted=True), method=method)
    assert seen == {torch.float32}


def test_a_mask_is_learned_on_a_checkpointed_network(seen):
    model = small_vit()
    model.set_grad_checkpointing(True)
    method = SAMap(steps=2, batch_size=8, precision="bf16")
    protect(model, authorized=toy.blobs(40), unauthorized=toy.blobs(40, inverted=True), method=method)
    assert seen == {torch.float32}
