"""Features and layers, found in networks of many kinds without changing them."""

import pytest
import torch
from tests.methods.generating import NETWORKS
from torch import nn

from modelfence.errors import InputError
from modelfence.masking.digest import digest_of
from modelfence.methods.features import features_of, layers_to_compare, outputs_of

EXPECTED = {
    "linear": ("1", "3"),
    "BatchNorm": ("0", "5"),
    "convolutional": ("0", "2"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_layers_are_spread_evenly_and_end_with_the_last(name):
    make, spec = NETWORKS[name]
    model = make().train()
    before = digest_of(model)
    layers = layers_to_compare(model, spec.shape)
    assert digest_of(model) == before
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert 1 <= len(layers) <= 4
    assert layers == EXPECTED.get(name, layers)
    model.eval()
    images = torch.randn(3, *spec.shape)
    with outputs_of(model, layers) as found:
        logits = model(images)
    assert len(found) == len(layers)
    assert all(isinstance(value, torch.Tensor) for value in found)
    if name != "convolutional":
        assert found[-1] is logits
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_what_the_last_linear_layer_gets(name):
    make, spec = NETWORKS[name]
    model, images = make(), torch.randn(3, *spec.shape, requires_grad=True)
    logits, features = features_of(model, images)
    assert torch.equal(logits, model(images))
    last = [module for module in model.modules() if isinstance(module, nn.Linear)]
    expected = logits if not last else None
    if expected is None:
        assert features.shape == (3, last[-1].in_features)
        torch.testing.assert_close(last[-1](features), logits)
    else:
        assert torch.equal(features, expected)
    first = features[:, 0].sum()  # the sum of all is the same whatever the images after a layer norm
    assert torch.autograd.grad(first, images)[0].abs().sum() > 0


def test_features_work_when_the_input_is_given_by_name():
    class Named(nn.Module):
        def forward(self, x):
            return nn.functional.linear(bias=None, weight=torch.ones(3, 4), input=x.flatten(1))

    assert features_of(Named(), torch.randn(2, 1, 2, 2))[1].shape == (2, 4)


def test_hooks_are_gone_after_an_error():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes"), outputs_of(model, ["1"]):
        model(torch.zeros(1, 1, 3, 3))
    assert not model[1]._forward_hooks


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.unused, self.last = Pair(), nn.Linear(2, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.pair(x)[0])


class Pair(nn.Module):
    def forward(self, x):
        return x.flatten(1), None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lost", "memory_layers: the model has no module 'lost'.* Did you mean 'last'"),
        ("unused", "memory_layers: module 'unused' isn't run"),
        ("pair", "memory_layers: module 'pair' returns tuple"),
    ],
)
def test_layers_that_cannot_be_compared_are_refused(name, text):
    with pytest.raises(InputError, match=text) as caught:
        layers_to_compare(Odd(), (1, 2, 2), [name])
    assert "\n" not in str(caught.value)
    assert layers_to_compare(Odd(), (1, 2, 2), ["last"]) == ("last",)
    assert layers_to_compare(Odd(), (1, 2, 2), []) == ()
