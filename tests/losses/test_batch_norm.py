"""Distances to running BatchNorm statistics, against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from modelfence.losses.batch_norm import BatchNormDistance


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
        model.train()
        for _ in range(5):
            model(torch.randn(8, 2, 9, 9) * 2 + 1)
    return model.eval()


def images() -> torch.Tensor:
    return torch.randn(6, 2, 9, 9, generator=torch.Generator().manual_seed(1))


def inputs(model: nn.Module) -> list[tuple[np.ndarray, nn.BatchNorm2d]]:
    first = model[0](images())
    second = model[3](model[2](model[1](first)))
    return [(first.detach().double().numpy(), model[1]), (second.detach().double().numpy(), model[4])]


def test_the_batch_is_compared_by_mean_and_deviation():
    model = network()
    with BatchNormDistance() as found:
        result = model(images())
    expected = []
    for values, norm in inputs(model):
        mean, deviation = values.mean(axis=(0, 2, 3)), values.std(axis=(0, 2, 3))
        true_mean, true_variance = norm.running_mean.double().numpy(), norm.running_var.double().numpy()
        distance = (mean - true_mean) ** 2 + (deviation - np.sqrt(true_variance)) ** 2
        expected.append(distance.mean() / true_variance.mean())
    assert [layer.item() for layer in found.layers] == pytest.approx(expected, rel=1e-4)
    assert found.total().item() == pytest.approx(np.mean(expected), rel=1e-4)
    assert torch.equal(result, model(images()))


def test_gradients_reach_the_images_and_no_buffer_changes():
    model, leaf = network(), images().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with BatchNormDistance() as found:
        model(leaf)
    found.total().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_network_without_batch_norm_has_no_distance():
    with BatchNormDistance() as found:
        nn.Linear(2, 2)(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="no BatchNorm layer"):
        found.total()
