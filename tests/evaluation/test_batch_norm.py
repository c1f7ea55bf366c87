"""The BatchNorm refresh against statistics worked out in numpy."""

import copy

import numpy as np
import pytest
import timm.layers
import torch
from torch import nn

from modelfence.errors import InputError
from modelfence.evaluation.batch_norm import refreshed
from modelfence.masking.batch_mode import has_batch_norm


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 2))


def test_running_statistics_equal_numpys_over_equal_batches():
    model = nn.Sequential(nn.BatchNorm2d(2)).eval()
    batches = [torch.randn(6, 2, 3, 3) * 2 + 1, torch.randn(6, 2, 3, 3) - 4]
    norm = refreshed(model, batches)[0]
    arrays = [batch.double().numpy() for batch in batches]
    mean = np.mean([array.mean(axis=(0, 2, 3)) for array in arrays], axis=0)
    var = np.mean([array.var(axis=(0, 2, 3), ddof=1) for array in arrays], axis=0)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-5)


def test_large_batches_are_cut_into_equal_parts():
    sizes = []
    model = nn.Sequential(nn.BatchNorm1d(1))
    images = torch.randn(500, 1)

    class Watched(nn.Module):
        def forward(self, values):
            sizes.append(len(values))
            return values

    norm = refreshed(nn.Sequential(Watched(), *model), [images])[1]
    assert sizes == [125] * 4
    parts = images.view(4, 125).double().numpy()
    np.testing.assert_allclose(norm.running_var.item(), parts.var(axis=1, ddof=1).mean(), rtol=1e-5)


def test_the_model_is_untouched_and_only_statistics_of_the_copy_differ():
    model = network().train()
    model[2].eval()
    kept, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    twin = refreshed(model, [torch.randn(8, 2, 2, 2)])
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in kept.items())
    assert not any(module.training for module in twin.modules())
    changed = {key for key, value in twin.state_dict().items() if not torch.equal(value, kept[key])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert twin[1].momentum == model[1].momentum == 0.1


def test_dropout_stays_off_while_statistics_are_estimated():
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(1))
    twin = refreshed(model.train(), [torch.full((50, 1), 3.0)])
    assert twin[1].running_mean.item() == 3.0


def test_the_old_statistics_leave_no_trace():
    images = torch.randn(10, 2, 2, 2)
    fresh, used = network().eval(), None
    used = copy.deepcopy(fresh)
    used[1].running_mean.fill_(100.0)
    used[1].running_var.fill_(1e4)
    assert torch.equal(refreshed(fresh, [images])(images), refreshed(used, [images])(images))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm3d(2), True),
        (nn.SyncBatchNorm(2), True),
        (timm.layers.BatchNormAct2d(2), True),
        (nn.BatchNorm2d(2, track_running_stats=False), False),
        (nn.GroupNorm(1, 2), False),
        (nn.InstanceNorm2d(2, track_running_stats=True), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_which_layers_count(layer, expected):
    assert has_batch_norm(nn.Sequential(layer)) is expected


def test_timms_fused_layer_is_refreshed():
    model = nn.Sequential(timm.layers.BatchNormAct2d(1)).eval()
    twin = refreshed(model, [torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)])
    assert (twin[0].running_mean.item(), twin[0].running_var.item()) == (3.0, 8.0)


def test_wrappers_are_left_out_of_the_copy():
    inner = network().eval()
    assert type(refreshed(nn.DataParallel(inner), [torch.randn(4, 2, 2, 2)])) is nn.Sequential


def test_too_few_images_and_models_without_batch_norm():
    with pytest.raises(InputError, match="1 image"):
        refreshed(network(), [torch.randn(1, 2, 2, 2)])
    with pytest.raises(InputError, match="0 image"):
        refreshed(network(), [])
    model = nn.Linear(2, 2)
    twin = refreshed(model, [])
    assert twin is not model
    assert torch.equal(twin.weight, model.weight)


def test_a_model_that_cannot_be_copied_is_named():
    model = network()
    model[4].remembered = model[4].weight * 2  # a non-leaf tensor, as pruning leaves behind
    with pytest.raises(InputError, match=r"Sequential.*can't be copied.*permanent"):
        refreshed(model, [torch.randn(4, 2, 2, 2)])
