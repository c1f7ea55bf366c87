"""Eq. 5 against numpy, density by density."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from tests.losses.checked import checked_copy


@pytest.fixture(scope="module")
def information() -> ModuleType:
    return checked_copy("modelfence.losses.information")


def log_densities(mean: torch.Tensor, log_variance: torch.Tensor, codes: torch.Tensor) -> np.ndarray:
    """ln q(z'_j | z_i) at [i, j]."""
    mu, variance, z = mean.double().numpy(), np.exp(log_variance.double().numpy()), codes.double().numpy()
    table = np.empty((len(mu), len(z)))
    for i, j in np.ndindex(*table.shape):
        density = np.exp(-((z[j] - mu[i]) ** 2) / (2 * variance[i])) / np.sqrt(2 * np.pi * variance[i])
        table[i, j] = np.log(density).sum()
    return table


@pytest.fixture
def gaussians() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(6, 3), torch.randn(6, 3) / 2, torch.randn(6, 3) + 2


def test_club(information, gaussians):
    table = log_densities(*gaussians)
    expected = (np.diag(table) - table.mean(axis=1)).mean()
    assert information.club(*gaussians).item() == pytest.approx(expected, rel=1e-4)


def test_gaussian_nll(information, gaussians):
    expected = -np.diag(log_densities(*gaussians)).mean()
    assert information.gaussian_nll(*gaussians).item() == pytest.approx(expected, rel=1e-5)


def test_the_best_gaussian_has_the_residuals_mean_and_variance(information):
    codes = torch.randn(4000, 1) * 3 + 5
    mean = codes.mean().requires_grad_(True)
    log_variance = codes.var(correction=0).log().requires_grad_(True)
    best = information.gaussian_nll(mean.expand(4000, 1), log_variance.expand(4000, 1), codes)
    best.backward()
    assert mean.grad.item() == pytest.approx(0, abs=1e-4)
    assert log_variance.grad.item() == pytest.approx(0, abs=1e-4)
    for shift, widening in ((0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)):
        other = (mean + shift).expand(4000, 1), (log_variance + widening).expand(4000, 1)
        assert information.gaussian_nll(*other, codes) > best


def test_the_bound_holds_for_a_pair_of_gaussians_and_is_zero_for_independent_ones(information):
    correlation = 0.8
    z = torch.randn(20_000, 1)
    codes = correlation * z + (1 - correlation**2) ** 0.5 * torch.randn(20_000, 1)
    variance = torch.full_like(z, 1 - correlation**2)
    found = information.club(correlation * z, variance.log(), codes).item()
    assert found == pytest.approx(correlation**2 / (1 - correlation**2), rel=0.05)  # the bound in closed form
    assert found > -np.log(1 - correlation**2) / 2  # the mutual information
    shuffled = codes[torch.randperm(20_000)]
    assert information.club(torch.zeros_like(z), torch.zeros_like(z), shuffled).item() == pytest.approx(0, abs=1e-5)


def test_a_step_down_the_bound_makes_codes_less_alike_their_images(information):
    mean = torch.randn(8, 2)
    codes = mean.clone().requires_grad_(True)
    loss = information.club(mean, torch.zeros(8, 2), codes)
    loss.backward()
    assert information.club(mean, torch.zeros(8, 2), codes - codes.grad) < loss


def test_shapes_that_do_not_fit_are_caught(information):
    for name in ("club", "gaussian_nll"):
        with pytest.raises(jaxtyping.TypeCheckError):
            getattr(information, name)(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 2))
