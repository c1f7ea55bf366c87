"""Batch statistics in place of running ones, against torch's own train mode and, jointly, against one process."""

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import timm.layers
import torch
from tests import processes
from tests.masking import zoo
from torch import Tensor, nn
from torch.func import functional_call

from modelfence.masking.batch_mode import BatchStatistics, has_batch_norm
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel


def network(affine: bool = True) -> nn.Sequential:
    model = zoo.lively(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    ).eval()
    if not affine:
        model[1].weight = model[1].bias = None
    return model


def in_train_mode(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for module in twin.modules():
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    return twin


@pytest.mark.parametrize("affine", [True, False])
def test_equals_batchnorm_in_train_mode(affine):
    model, images = network(affine), zoo.images(count=6)
    expected = in_train_mode(model)(images)
    with BatchStatistics():
        assert torch.equal(model(images), expected)
    assert not torch.allclose(model(images), expected)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, timm.layers.BatchNormAct2d])
def test_every_kind_of_batchnorm_against_numpy(kind):
    ndim = {nn.BatchNorm1d: 2, nn.BatchNorm3d: 5}.get(kind, 4)
    norm = zoo.lively(kind(3)).eval()
    values = torch.randn(8, 3, *[2] * (ndim - 2)) * 3 + 1
    with BatchStatistics():
        found = norm(values)
    array = values.double().numpy()
    axes = tuple(axis for axis in range(ndim) if axis != 1)
    shape = [1, 3] + [1] * (ndim - 2)
    scaled = (array - array.mean(axes, keepdims=True)) / np.sqrt(array.var(axes, keepdims=True) + norm.eps)
    expected = scaled * norm.weight.detach().numpy().reshape(shape) + norm.bias.detach().numpy().reshape(shape)
    if kind is timm.layers.BatchNormAct2d:
        expected = np.maximum(expected, 0)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_buffers_and_flags_stay_as_they_are():
    model = network()
    before, flags = digest_of(model), [module.training for module in model.modules()]
    with BatchStatistics():
        model(zoo.images()).sum().backward()
        with torch.no_grad():
            model(zoo.images())
    assert digest_of(model) == before
    assert [module.training for module in model.modules()] == flags


def test_works_through_functional_call_and_ends_with_the_context():
    model, images = network(), zoo.images(count=4)
    weights = {"0.weight": model[0].weight.detach() * 0.5}
    scaled = copy.deepcopy(model)
    scaled[0].weight.data.mul_(0.5)
    with BatchStatistics():
        inside = functional_call(model, weights, (images,))
    assert torch.equal(inside, in_train_mode(scaled)(images))
    assert torch.equal(functional_call(model, weights, (images,)), scaled(images))


def test_each_group_of_the_masked_model_has_statistics_of_its_own():
    masked = MaskedModel(network())
    images = zoo.images(count=8)
    whole, first, second = masked(images, batch_mode=[images[:4], images[4:]])
    train = in_train_mode(network())
    assert torch.equal(whole, masked(images))
    assert torch.allclose(first, train(images[:4]))
    assert torch.allclose(second, train(images[4:]))
    assert len(masked(images, batch_mode=())) == 1


def test_has_batch_norm_knows_what_could_be_refreshed():
    assert has_batch_norm(network())
    assert not has_batch_norm(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))
    assert not has_batch_norm(nn.Sequential(nn.GroupNorm(1, 3), nn.InstanceNorm2d(3, track_running_stats=True)))


# Two processes: what each returns for its half of a batch, against one process with the whole.


@functools.cache
def joint_images() -> Tensor:
    return torch.cat([zoo.images(count=4), 2 + 3 * zoo.images(count=4).flip(3)])


def _half(affine: bool) -> tuple[Tensor, Tensor, Tensor, str]:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    return _forward_and_gradients(network(affine), joint_images()[rank::world].clone(), world)


def _forward_and_gradients(model: nn.Module, images: Tensor, world: int) -> tuple[Tensor, Tensor, Tensor, str]:
    before = digest_of(model)
    images.requires_grad_(True)
    with BatchStatistics(world):
        logits = model(images)
    logits.square().sum().backward()
    assert digest_of(model) == before
    return logits.detach(), images.grad, model[0].weight.grad, before


def _both_halves() -> list[tuple[Tensor, Tensor, Tensor, str]]:
    return [_half(True), _half(False)]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Tensor, Tensor, Tensor, str]]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    return processes.ranks(_both_halves, folder=folder)


@pytest.mark.parametrize("affine", [True, False])
def test_two_processes_share_one_batchs_statistics_and_gradients(affine, halves):
    logits, pixel_grad, weight_grad, _ = _forward_and_gradients(network(affine), joint_images().clone(), 1)
    parts = [half[0 if affine else 1] for half in halves]
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part[0], logits[rank::2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part[1], pixel_grad[rank::2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(parts[0][2] + parts[1][2], weight_grad, rtol=1e-3, atol=1e-3)
    alone = _forward_and_gradients(network(affine), joint_images()[0::2].clone(), 1)
    assert not torch.allclose(alone[0], logits[0::2], rtol=1e-2)  # the halves do differ
