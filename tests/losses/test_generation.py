"""The terms of Eq. 2 against numpy."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from tests import processes
from tests.losses.checked import checked_copy
from torch import Tensor


@pytest.fixture(scope="module")
def generation() -> ModuleType:
    return checked_copy("modelfence.losses.generation")


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, 4) * 3


def softmax(logits: Tensor) -> np.ndarray:
    powers = np.exp(logits.detach().double().numpy())
    return powers / powers.sum(axis=1, keepdims=True)


def test_confidence_is_the_cross_entropy_of_the_own_decision(generation, logits):
    np.testing.assert_allclose(generation.confidence(logits).item(), -np.log(softmax(logits).max(axis=1)).mean(), 1e-5)


def test_a_step_down_the_confidence_loss_makes_the_network_surer(generation):
    logits = torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.1, 0.2]], requires_grad=True)
    generation.confidence(logits).backward()
    after = logits - logits.grad
    assert (after.softmax(1).amax(1) > logits.softmax(1).amax(1)).all()


def test_balance_is_the_negative_entropy_of_the_mean(generation, logits):
    mean = softmax(logits).mean(axis=0)
    np.testing.assert_allclose(generation.balance(logits).item(), (mean * np.log(mean)).sum(), rtol=1e-5)


def test_the_gradient_of_balance(generation):
    logits = torch.randn(5, 3, dtype=torch.float64).float().requires_grad_(True)
    generation.balance(logits).backward()

    def value(values: np.ndarray) -> float:
        powers = np.exp(values)
        mean = (powers / powers.sum(axis=1, keepdims=True)).mean(axis=0)
        return float((mean * np.log(mean)).sum())

    start = logits.detach().double().numpy()
    for row, column in np.ndindex(5, 3):
        step = np.zeros((5, 3))
        step[row, column] = 1e-5
        expected = (value(start + step) - value(start - step)) / 2e-5
        assert logits.grad[row, column].item() == pytest.approx(expected, abs=1e-6)


def test_balance_where_a_class_is_never_predicted(generation):
    logits = torch.tensor([[500.0, 0.0, -500.0]] * 2, requires_grad=True)
    loss = generation.balance(logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.isfinite().all()


def test_jensen_shannon(generation, logits):
    other = torch.randn(6, 4)
    one, two = softmax(logits), softmax(other)
    middle = (one + two) / 2
    each = (one * np.log(one / middle) + two * np.log(two / middle)).sum(axis=1) / 2
    found = generation.jensen_shannon(logits, other).item()
    np.testing.assert_allclose(found, each.mean(), rtol=1e-5)
    assert found == pytest.approx(generation.jensen_shannon(other, logits).item())


def test_jensen_shannon_lies_between_0_and_ln_2_and_moves_both(generation):
    sure = torch.tensor([[300.0, 0.0], [0.0, 300.0]], requires_grad=True)
    assert generation.jensen_shannon(sure, sure.detach().flip(1)).item() == pytest.approx(np.log(2))
    one, two = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    loss = generation.jensen_shannon(one, two)
    loss.backward()
    nearer = generation.jensen_shannon(one - one.grad, two - two.grad)
    assert nearer < loss
    assert generation.jensen_shannon(one - one.grad, two) < loss


def test_activation(generation):
    features = torch.tensor([[[1.0, -2.0]], [[0.0, 5.0]]])
    assert generation.activation(features).item() == -2


def test_half_precision_is_summed_in_float32(generation, logits):
    for found in (
        generation.confidence(logits.bfloat16()),
        generation.balance(logits.bfloat16()),
        generation.jensen_shannon(logits.bfloat16(), logits.bfloat16()),
        generation.activation(logits.bfloat16()),
    ):
        assert found.dtype == torch.float32


@pytest.mark.parametrize("name", ["confidence", "balance"])
def test_nan_is_not_hidden(generation, name):
    assert getattr(generation, name)(torch.tensor([[float("nan"), 0.0]])).isnan()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("confidence", (torch.zeros(3),)),
        ("balance", (torch.zeros(3, 2, 1),)),
        ("jensen_shannon", (torch.zeros(3, 2), torch.zeros(3, 4))),
    ],
)
def test_shapes_that_do_not_fit_are_caught(generation, name, arguments):
    with pytest.raises(jaxtyping.TypeCheckError):
        getattr(generation, name)(*arguments)


def share() -> tuple[float, Tensor]:
    """Return value and gradient of one process, which holds every second image of the joint batch."""
    import torch.distributed as dist

    from modelfence.losses.generation import balance

    def mean(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / dist.get_world_size()

    logits = joint_batch()[dist.get_rank() :: 2].clone().requires_grad_(True)
    loss = balance(logits, mean)
    loss.backward()
    return loss.item(), logits.grad


def joint_batch() -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(3)) * 4


def test_balance_of_two_processes_is_that_of_the_joint_batch(generation, tmp_path):
    halves = processes.ranks(share, folder=tmp_path)
    logits = joint_batch().requires_grad_(True)
    loss = generation.balance(logits)
    loss.backward()
    assert sum(value for value, _ in halves) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for rank, (_, gradient) in enumerate(halves):
        torch.testing.assert_close(gradient / 2, logits.grad[rank::2])
    apart = [generation.balance(joint_batch()[rank::2]).item() for rank in range(2)]
    assert abs(sum(apart) / 2 - loss.item()) > 0.01  # the mean of the processes' own values is something else
