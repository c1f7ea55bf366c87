"""Eq. 3 against numpy."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from tests.losses.checked import checked_copy


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    return checked_copy("modelfence.losses.memory")


def test_reconstruction_sums_the_mean_differences_of_images_and_layers(memory):
    shapes = [(3, 1, 4, 5), (3, 7, 2, 2), (3, 9)]
    first, second = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    pairs = [(a.double().numpy(), b.double().numpy()) for a, b in zip(first, second, strict=True)]
    expected = sum(np.abs(a - b).mean() for a, b in pairs)
    found = memory.reconstruction(first[0], second[0], first[1:], second[1:]).item()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    image_only = memory.reconstruction(first[0], second[0], [], []).item()
    np.testing.assert_allclose(image_only, np.abs(pairs[0][0] - pairs[0][1]).mean(), rtol=1e-5)


def test_reconstruction_pulls_the_rebuilt_toward_the_original(memory):
    images, rebuilt = torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2, requires_grad=True)
    memory.reconstruction(images, rebuilt, [images * 2], [rebuilt * 2]).backward()
    torch.testing.assert_close(rebuilt.grad, torch.full((2, 1, 2, 2), 3 / 8))


def test_layers_that_do_not_fit_are_refused(memory):
    images = torch.zeros(2, 1, 2, 2)
    with pytest.raises(ValueError, match="differ"):
        memory.reconstruction(images, images, [torch.zeros(2, 3)], [torch.zeros(2, 1)])
    with pytest.raises(ValueError, match="zip"):
        memory.reconstruction(images, images, [torch.zeros(2, 3)], [])
    with pytest.raises(jaxtyping.TypeCheckError):
        memory.reconstruction(images, images[:1], [], [])


def test_standard_normal_is_the_divergence_from_it(memory):
    mean, log_variance = torch.randn(4, 3), torch.randn(4, 3) / 2
    # by sampling: E ln N(z; mu, s) - ln N(z; 0, 1)
    mu, sigma = mean.double().numpy(), np.exp(log_variance.double().numpy() / 2)
    z = mu + sigma * np.random.default_rng(0).standard_normal((200_000, 4, 3))
    ratio = -np.log(sigma) - ((z - mu) / sigma) ** 2 / 2 + z**2 / 2
    expected = ratio.sum(axis=2).mean(axis=0).mean()
    assert memory.standard_normal(mean, log_variance).item() == pytest.approx(expected, rel=0.01)
    assert memory.standard_normal(torch.zeros(2, 3), torch.zeros(2, 3)).item() == 0
