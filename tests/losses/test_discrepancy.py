"""Maximum mean discrepancy against numpy, pair by pair."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from tests.losses.checked import checked_copy
from torch import Tensor


@pytest.fixture(scope="module")
def discrepancy() -> ModuleType:
    return checked_copy("modelfence.losses.discrepancy")


def squared_mmd(first: Tensor, second: Tensor, bandwidth: float | None = None) -> float:
    """Sum the kernels over all pairs; the bandwidth is the mean over pairs of two different samples."""
    one, two = first.detach().double().numpy(), second.detach().double().numpy()
    both = list(np.concatenate([one, two]))
    if bandwidth is None:
        pairs = [(i, j) for i in range(len(both)) for j in range(len(both)) if i != j]
        bandwidth = np.mean([((both[i] - both[j]) ** 2).sum() for i, j in pairs])

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        widths = [bandwidth / 4 * 2**i for i in range(5)]
        return float(np.mean([sum(np.exp(-((x - y) ** 2).sum() / w) for w in widths) for x in a for y in b]))

    return mean(one, one) + mean(two, two) - 2 * mean(one, two)


@pytest.mark.parametrize(("n", "m", "d"), [(4, 4, 3), (2, 7, 5), (1, 1, 2), (5, 3, 400)])
def test_gaussian_mmd(discrepancy, n, m, d):
    first, second = torch.randn(n, d), torch.randn(m, d) * 1.5 + 0.5
    found = discrepancy.gaussian_mmd(first, second).item()
    assert found == pytest.approx(squared_mmd(first, second), rel=1e-4)
    assert found == pytest.approx(discrepancy.gaussian_mmd(second, first).item(), rel=1e-5)


def test_the_bandwidth_has_no_gradient(discrepancy):
    first, second = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    discrepancy.gaussian_mmd(first, second).backward()
    both = torch.cat([first.detach(), second]).double().numpy()
    fixed = sum(((a - b) ** 2).sum() for a in both for b in both) / (7 * 6)
    for row, column in np.ndindex(3, 2):
        step = torch.zeros(3, 2, dtype=torch.float64)
        step[row, column] = 1e-5
        up, down = (squared_mmd(first.double() + sign * step, second, fixed) for sign in (1, -1))
        assert first.grad[row, column].item() == pytest.approx((up - down) / 2e-5, abs=1e-4)


def test_features_far_from_zero_are_compared_as_exactly(discrepancy):
    first, second = torch.randn(6, 8), torch.randn(6, 8) + 1
    moved = discrepancy.gaussian_mmd(first + 1000, second + 1000).item()
    assert moved == pytest.approx(squared_mmd(first, second), rel=1e-3)


def test_the_same_samples_are_at_zero_and_the_gradient_is_finite(discrepancy):
    for samples in (torch.randn(5, 3), torch.ones(5, 3)):
        first = samples.clone().requires_grad_(True)
        loss = discrepancy.gaussian_mmd(first, samples)
        loss.backward()
        assert loss.item() == pytest.approx(0, abs=1e-5)
        assert first.grad.isfinite().all()


def test_autocast_changes_nothing(discrepancy):
    first, second = torch.randn(6, 64), torch.randn(6, 64) + 0.2
    plain = discrepancy.gaussian_mmd(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(discrepancy.gaussian_mmd(first, second), plain)


def test_an_empty_set_is_refused(discrepancy):
    with pytest.raises(ValueError, match="at least one"):
        discrepancy.gaussian_mmd(torch.zeros(0, 3), torch.zeros(2, 3))


def test_class_mmd_is_the_mean_over_classes_that_are_there_twice(discrepancy):
    first, second = torch.randn(7, 3), torch.randn(7, 3) + 1
    labels = torch.tensor([4, 0, 4, 7, 0, 4, 2])
    expected = [squared_mmd(first[labels == k], second[labels == k]) for k in (0, 4)]
    found = discrepancy.class_mmd(first, second, labels).item()
    assert found == pytest.approx(np.mean(expected), rel=1e-4)


def test_class_mmd_without_such_a_class_is_zero_with_a_gradient(discrepancy):
    first = torch.randn(3, 2, requires_grad=True)
    loss = discrepancy.class_mmd(first, torch.randn(3, 2), torch.tensor([0, 1, 2]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(first.grad, torch.zeros(3, 2))


def test_an_image_alone_in_its_class_has_no_gradient(discrepancy):
    first = torch.randn(5, 2, requires_grad=True)
    discrepancy.class_mmd(first, torch.randn(5, 2), torch.tensor([0, 0, 1, 2, 2])).backward()
    assert (first.grad.abs().sum(dim=1) > 0).tolist() == [True, True, False, True, True]


def test_shapes_that_do_not_fit_are_caught(discrepancy):
    with pytest.raises(jaxtyping.TypeCheckError):
        discrepancy.gaussian_mmd(torch.zeros(3, 2), torch.zeros(3, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        discrepancy.class_mmd(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
