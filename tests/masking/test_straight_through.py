"""The straight-through step, against numpy and by bits."""

import math

import numpy as np
import pytest
import torch

from modelfence.masking.straight_through import masked_weight

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_forward_keeps_above_the_threshold_and_only_there(dtype):
    weight = torch.tensor([-2.0, 3.0, -4.0, 5.0], dtype=dtype)
    score = torch.tensor([0.5, 0.6, 0.4, math.inf])
    out = masked_weight(score, weight, 0.5)
    assert out.dtype == dtype
    assert out.tolist() == [0.0, 3.0, 0.0, 5.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [-1.5, -0.0, math.nan, math.inf, -math.inf])
def test_a_cut_weight_is_plus_zero_whatever_it_was(dtype, value):
    out = masked_weight(torch.zeros(3), torch.full((3,), value, dtype=dtype), 0.5)
    assert out.tolist() == [0.0] * 3
    assert not out.signbit().any()


def test_a_score_that_is_nan_cuts():
    assert masked_weight(torch.tensor([math.nan]), torch.ones(1), 0.5).item() == 0.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_is_dl_dw_times_w_also_where_the_weight_is_cut(dtype):
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.normal(size=(4, 3))).to(dtype)
    score = torch.from_numpy(rng.uniform(size=(4, 3)).astype(np.float32)).requires_grad_(True)
    inputs = torch.from_numpy(rng.normal(size=(5, 3))).to(dtype)
    out_grad = torch.from_numpy(rng.normal(size=(5, 4))).to(dtype)
    (inputs @ masked_weight(score, weight, 0.5).T).backward(out_grad)
    # by hand: L = sum(G * (X W'^T)), so dL/dW' = G^T X; then times W
    expected = (out_grad.double().numpy().T @ inputs.double().numpy()) * weight.double().numpy()
    tolerance = {8: 1e-6, 4: 1e-6, 2: 2e-2}[dtype.itemsize]
    assert score.grad.dtype == torch.float32
    np.testing.assert_allclose(score.grad.numpy(), expected, rtol=tolerance, atol=tolerance)
    cut = (score.detach() <= 0.5).numpy()
    assert cut.any()
    assert (score.grad.numpy()[cut] != 0).all()


def test_the_product_is_taken_in_float32_for_half_precision_weights():
    score, weight = torch.ones(1, requires_grad=True), torch.tensor([1.0078125], dtype=torch.bfloat16)
    masked_weight(score, weight, 0.5).backward(torch.tensor([1.0078125], dtype=torch.bfloat16))
    assert score.grad.item() == 1.0078125**2  # needs 15 bits; bfloat16 has 8


def test_the_weight_gets_no_gradient():
    score, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    masked_weight(score, weight, 0.5).sum().backward()
    assert weight.grad is None


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_strides_of_the_weight_are_kept(layout):
    weight = torch.randn(4, 6, 3, 3)
    if layout == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        weight = weight.transpose(0, 1)
    score = torch.full_like(weight, 1.0).requires_grad_(True)
    out = masked_weight(score, weight, 0.5)
    assert out.stride() == weight.stride()
    out.sum().backward()
    assert score.grad.stride() == score.stride()
