"""The losses against numpy, written out again from the equations."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from tests import processes
from torch import Tensor


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropies(logits: Tensor, labels: Tensor) -> np.ndarray:
    """-sum_k y_k log p_k for each image."""
    table = labels.numpy() if labels.is_floating_point() else np.eye(logits.shape[1])[labels.numpy()]
    return -(table * log_softmax(logits.detach().double().numpy())).sum(axis=1)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, 4) * 3


@pytest.fixture(params=["hard", "soft"])
def labels(request: pytest.FixtureRequest) -> Tensor:
    return torch.tensor([0, 3, 1, 1, 2, 0]) if request.param == "hard" else torch.rand(6, 4).softmax(1)


def test_cross_entropy(classification: ModuleType, logits, labels):
    found = classification.cross_entropy(logits, labels)
    np.testing.assert_allclose(found.item(), cross_entropies(logits, labels).mean(), rtol=1e-5)


def test_distillation_is_kl_of_the_teacher_against_the_student(classification, logits):
    student = torch.randn(6, 4)
    teacher, other = log_softmax(logits.double().numpy()), log_softmax(student.double().numpy())
    expected = (np.exp(teacher) * (teacher - other)).sum(axis=1).mean()
    backwards = (np.exp(other) * (other - teacher)).sum(axis=1).mean()
    found = classification.distillation(logits, student).item()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found - backwards) > 0.1


def test_distillation_where_teacher_or_student_rule_a_class_out(classification):
    sure, even = torch.tensor([[300.0, 0.0, 0.0]]), torch.zeros(1, 3)
    assert classification.distillation(sure, even).item() == pytest.approx(np.log(3))
    assert classification.distillation(even, sure).item() == pytest.approx(200 - np.log(3), rel=1e-5)
    assert classification.distillation(sure, sure + 5).item() == pytest.approx(0, abs=1e-6)


def test_distillation_moves_the_student_toward_the_teacher(classification, logits):
    student = torch.randn(6, 4, requires_grad=True)
    classification.distillation(logits, student).backward()
    # d KL(p || q) / d student logits = (q - p) / N
    expected = (student.softmax(1) - logits.softmax(1)).detach() / 6
    torch.testing.assert_close(student.grad, expected)


@pytest.mark.parametrize("weight", [0.1, 1.0])
@pytest.mark.parametrize("limit", [0.2, 1.0, 50.0])
def test_clamped_ascent(classification, logits, labels, weight, limit):
    each = weight * cross_entropies(logits, labels)
    ascent = classification.clamped_ascent
    batch = ascent(logits, labels, weight=weight, limit=limit, clamp="batch").item()
    sample = ascent(logits, labels, weight=weight, limit=limit, clamp="sample").item()
    np.testing.assert_allclose(batch, min(each.mean(), limit), rtol=1e-5)
    np.testing.assert_allclose(sample, np.minimum(each, limit).mean(), rtol=1e-5)


def test_the_papers_values_are_the_default(classification, logits):
    labels = torch.tensor([0, 3, 1, 1, 2, 0])
    by_hand = min(0.1 * cross_entropies(logits, labels).mean(), 1.0)
    assert classification.clamped_ascent(logits, labels).item() == pytest.approx(by_hand, rel=1e-5)


def test_beyond_the_limit_the_gradient_is_zero_for_the_batch_or_for_the_image(classification):
    # cross-entropies of class 0: about 30, log 2 and about 0
    values = torch.tensor([[0.0, 30.0], [0.0, 0.0], [20.0, 0.0]])
    labels = torch.zeros(3, dtype=torch.int64)

    def gradient(limit: float, clamp: str) -> Tensor:
        logits = values.clone().requires_grad_(True)
        loss = classification.clamped_ascent(logits, labels, weight=1.0, limit=limit, clamp=clamp)
        loss.backward()
        return logits.grad

    free = (values.softmax(1) - torch.tensor([1.0, 0.0])) / 3
    torch.testing.assert_close(gradient(100.0, "batch"), free)
    torch.testing.assert_close(gradient(100.0, "sample"), free)
    assert torch.equal(gradient(5.0, "batch"), torch.zeros(3, 2))  # the mean, 10.2, is beyond it
    stopped = gradient(5.0, "sample")
    assert torch.equal(stopped[0], torch.zeros(2))
    torch.testing.assert_close(stopped[1:], free[1:])


def test_a_loss_that_is_nan_is_not_hidden_by_the_limit(classification):
    for clamp in ("batch", "sample"):
        logits = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
        assert classification.clamped_ascent(logits, torch.tensor([0, 1]), clamp=clamp).isnan()


def test_half_precision_logits_are_summed_in_float32(classification):
    logits = (torch.randn(512, 10) * 4).bfloat16()
    labels = torch.arange(512) % 10
    for value in (
        classification.cross_entropy(logits, labels),
        classification.clamped_ascent(logits, labels, weight=1.0, limit=1e9),
    ):
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value.item(), cross_entropies(logits.float(), labels).mean(), rtol=1e-5)
    student = torch.randn(512, 10).bfloat16()
    exact = classification.distillation(logits.float(), student.float())
    torch.testing.assert_close(classification.distillation(logits, student), exact)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("cross_entropy", (torch.zeros(3), torch.zeros(3, dtype=torch.int64))),
        ("cross_entropy", (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))),
        ("cross_entropy", (torch.zeros(3, 2), torch.zeros(3, 5))),
        ("cross_entropy", (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))),
        ("distillation", (torch.zeros(3, 2), torch.zeros(2, 2))),
        ("distillation", (torch.zeros(3, 2), torch.zeros(3, 3))),
        ("clamped_ascent", (torch.zeros(3, 2, 1), torch.zeros(3, dtype=torch.int64))),
        ("clamped_ascent", (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64))),
    ],
)
def test_shapes_that_do_not_fit_their_annotation_are_caught(classification, function, arguments):
    with pytest.raises(jaxtyping.TypeCheckError):
        getattr(classification, function)(*arguments)


# In two processes. Each holds every second image of the joint batch; a process's share of the loss has the gradient of
# its images, and the engine averages over processes.


def joint_batch(name: str) -> tuple[Tensor, Tensor]:
    if name == "anchors":  # weighted cross-entropies 0.5 and 3.0 on the processes: mean of clamps 0.75, joint 1.0
        ce = torch.tensor([0.5, 3.0]).double()
        return torch.stack([torch.zeros(2).double(), ce.exp().sub(1).log()], dim=1), torch.zeros(2, dtype=torch.int64)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 5, generator=generator) * 4, torch.arange(8) % 5


SETTINGS = [
    (name, limit, clamp)
    for name in ("anchors", "random")
    for limit in (1.0, 2.0, 100.0)
    for clamp in ("batch", "sample")
]


def shares() -> list[tuple[float, Tensor]]:
    import torch.distributed as dist

    from modelfence.losses.classification import clamped_ascent

    def mean(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / dist.get_world_size()

    found = []
    for name, limit, clamp in SETTINGS:
        logits, labels = (part[dist.get_rank() :: 2] for part in joint_batch(name))
        logits = logits.clone().requires_grad_(True)
        share = clamped_ascent(logits, labels, weight=1.0, limit=limit, clamp=clamp, mean_over_processes=mean)
        share.backward()
        found.append((share.item(), logits.grad))
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[float, Tensor]]]:
    return processes.ranks(shares, folder=tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize(("index", "setting"), list(enumerate(SETTINGS)))
def test_two_processes_equal_one_with_the_joint_batch(classification, halves, index, setting):
    name, limit, clamp = setting
    logits, labels = joint_batch(name)
    logits.requires_grad_(True)
    loss = classification.clamped_ascent(logits, labels, weight=1.0, limit=limit, clamp=clamp)
    loss.backward()
    parts = [half[index] for half in halves]
    assert sum(share for share, _ in parts) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for rank, (_, gradient) in enumerate(parts):
        torch.testing.assert_close(gradient / 2, logits.grad[rank::2])


def test_the_clamp_is_that_of_the_joint_mean(halves):
    index = SETTINGS.index(("anchors", 1.0, "batch"))
    assert [half[index][0] for half in halves] == [1.0, 1.0]
    index = SETTINGS.index(("anchors", 1.0, "sample"))
    assert sum(half[index][0] for half in halves) / 2 == pytest.approx(0.75)


def mutual_information(logits: Tensor) -> float:
    """Entropy of the mean answer less the mean entropy of the answers."""
    each = np.exp(log_softmax(logits.detach().double().numpy()))
    mean = each.mean(axis=0)
    return float((each * np.log(each)).sum(axis=1).mean() - (mean * np.log(mean)).sum())


def test_dependence_is_mutual_information(classification, logits):
    found = classification.dependence(logits)
    assert found.item() == pytest.approx(mutual_information(logits), rel=1e-4)
    assert found.item() > 0.1
    assert classification.dependence(logits[:1].expand(5, 4)).item() == pytest.approx(0, abs=1e-6)


def test_dependence_has_the_gradient_of_mutual_information(classification, logits):
    """The mean answer is taken as a constant in it; finite differences of the whole say whether that is right."""
    leaf = logits.clone().requires_grad_(True)
    classification.dependence(leaf).backward()
    step = 1e-4
    expected = torch.zeros_like(logits, dtype=torch.float64)
    for index in np.ndindex(*logits.shape):
        more, less = logits.double().clone(), logits.double().clone()
        more[index] += step
        less[index] -= step
        expected[index] = (mutual_information(more) - mutual_information(less)) / (2 * step)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=1e-3, atol=1e-5)


def test_dependence_takes_the_mean_answer_of_all_processes(classification, logits):
    other = torch.randn(6, 4)
    joint = torch.cat([logits, other]).softmax(1).mean(0)
    parts = [classification.dependence(part, mean_over_processes=lambda _: joint) for part in (logits, other)]
    assert (sum(parts) / 2).item() == pytest.approx(mutual_information(torch.cat([logits, other])), rel=1e-4)
