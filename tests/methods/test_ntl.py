"""NTL's loss as its authors' code computes it, written out again in numpy; the layer it looks at; a small run."""

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from tests.methods import toy
from torch import Tensor, nn

from modelfence import NTL, ImageSpec, protect
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.methods.labelled import labelled_steps
from modelfence.methods.loop import Session
from modelfence.methods.ntl import feature_layer, learn_ntl, ntl_terms
from modelfence.methods.registry import method_for
from modelfence.models.zoo import create_model

CLASSES = 10


def elementwise(logits: Tensor, labels: Tensor) -> float:
    """Return the divergence of one-hot labels from a softmax, meaned over images and classes."""
    array = logits.detach().double().numpy()
    array = array - array.max(1, keepdims=True)
    logs = array - np.log(np.exp(array).sum(1, keepdims=True))
    one_hot = np.eye(array.shape[1])[labels.numpy()]
    return float((one_hot * (0 - logs)).mean())


def discrepancy(first: Tensor, second: Tensor) -> float:
    """Sum five kernels over all pairs of both halves, as if the two were equally many."""
    rows = torch.cat([first, second]).flatten(1).detach().double().numpy()
    squares = ((rows[:, None] - rows[None, :]) ** 2).sum(2)
    width = squares.sum() / (len(rows) ** 2 - len(rows)) / 2**2
    kernel = sum(np.exp(-squares / (width * 2**power)) for power in range(5))
    half = len(first)
    each = kernel[:half, :half] + kernel[half:, half:] - kernel[:half, half:] - kernel[half:, :half]
    return float(each.mean())


def batch(*, sure: float = 1.0, images: int = 6, targets: int = 1) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return logits, features and labels of one authorized and some unauthorized domains."""
    generator = torch.Generator().manual_seed(0)
    logits = [sure * torch.randn(images, CLASSES, generator=generator) for _ in range(1 + targets)]
    features = [torch.randn(images, 3, 2, 2, generator=generator) + 0.4 * number for number in range(1 + targets)]
    labels = [torch.randint(CLASSES, (images,), generator=generator) for _ in range(1 + targets)]
    for value in (*logits, *features):
        value.requires_grad_(True)
    return logits, features, labels


# The loss


@pytest.mark.parametrize("sure", [1.0, 300.0])
@pytest.mark.parametrize("distance", [0.1, 3.0])
def test_the_loss_is_the_published_one_times_the_number_of_classes(sure, distance):
    logits, features, labels = batch(sure=sure)
    found = sum(ntl_terms(logits, features, labels, NTL(distance=distance)).values())
    ascent = 0.1 * elementwise(logits[1], labels[1])
    apart = distance * discrepancy(*features)
    assert (ascent > 1, apart > 1) == (sure > 1, distance > 1)
    expected = elementwise(logits[0], labels[0]) - min(ascent, 1) * min(apart, 1)
    assert found.item() == pytest.approx(CLASSES * expected, rel=1e-4)


def test_with_cross_entropies_as_means_the_bound_is_in_nats():
    logits, features, labels = batch(sure=30.0)
    terms = ntl_terms(logits, features, labels, NTL(scale="mean"))
    assert 0.1 * CLASSES * elementwise(logits[1], labels[1]) > 1
    assert terms["target"].item() == pytest.approx(-0.1 * discrepancy(*features), rel=1e-4)
    assert terms["source"].item() == pytest.approx(CLASSES * elementwise(logits[0], labels[0]), rel=1e-4)


def test_beyond_the_bound_on_the_cross_entropy_only_the_discrepancy_has_a_gradient():
    logits, features, labels = batch(sure=300.0)
    ntl_terms(logits, features, labels, NTL())["target"].backward()
    assert logits[1].grad is None or not logits[1].grad.any()
    assert features[0].grad.any()
    assert features[1].grad.any()


def test_beyond_the_bound_on_the_discrepancy_only_the_cross_entropy_has_a_gradient():
    logits, features, labels = batch()
    ntl_terms(logits, features, labels, NTL(distance=3.0))["target"].backward()
    assert not features[0].grad.any()
    assert not features[1].grad.any()
    wanted = torch.softmax(logits[1].detach(), 1) - nn.functional.one_hot(labels[1], CLASSES)
    torch.testing.assert_close(logits[1].grad, -0.1 * wanted / len(labels[1]))


def test_the_products_of_several_domains_are_averaged():
    logits, features, labels = batch(targets=2)
    config = NTL(distance=0.2)
    alone = [
        ntl_terms(*([values[0], values[number]] for values in (logits, features, labels)), config)["target"].item()
        for number in (1, 2)
    ]
    assert ntl_terms(logits, features, labels, config)["target"].item() == pytest.approx(np.mean(alone), rel=1e-5)


# The layer


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("vgg11", "features.9", nn.ReLU),
        ("vgg13", "features.9", nn.MaxPool2d),
        ("vgg11_bn", "features.13", nn.ReLU),
        ("vgg13_bn", "features.13", nn.MaxPool2d),
    ],
)
def test_in_a_vgg_it_is_the_tenth_layer_without_counting_batch_norm(name, layer, kind):
    spec = ImageSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.5,))
    model = create_model(name, 3, spec)
    assert feature_layer(model, spec.shape) == layer
    assert isinstance(model.get_submodule(layer), kind)


def test_elsewhere_it_is_the_middle_convolution_or_linear_layer():
    assert feature_layer(toy.mlp(), (1, 8, 8)) == "1"
    layers = [nn.Conv2d(1, 1, 1) for _ in range(3)]
    assert feature_layer(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2), nn.Linear(2, 2)), (1, 2, 2)) == "2"


@pytest.mark.parametrize(
    ("layer", "text"),
    [("9", "layer: the model has no module '9'"), ("side", "layer: module 'side' isn't run"), ("twice", "run 2 times")],
)
def test_a_layer_that_cannot_be_used_is_named(layer, text):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(self.twice(x.flatten(1)))

    with pytest.raises(InputError, match=text):
        feature_layer(Odd(), (1, 2, 2), layer)


# Runs


def session(**values: object) -> Session:
    return Session(
        Fabric(accelerator="cpu", devices=1),
        authorized=as_domain(toy.blobs(80, seed=1), name="authorized"),
        unauthorized={"far": as_domain(toy.blobs(80, seed=2, inverted=True), name="far")},
        **values,
    )


def test_the_weights_are_those_of_the_published_loop():
    """Adam on all weights, rate times 0.999 after every step, domains one after the other; the first layer compared."""
    config = NTL(steps=8, batch_size=16, learning_rate=1e-2, precision="fp32", layer="1")
    learned = learn_ntl(toy.mlp_from(3), config, session())
    model = toy.mlp_from(3).train()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.999**step)
    steps = labelled_steps(config, session(), 0)
    for _ in range(8):
        step = next(steps)
        losses, features = [], []
        for images, labels in zip(step.groups, step.labels, strict=True):
            features.append(model[:2](images))
            logs = torch.log_softmax(model[2:](features[-1]), dim=1)
            losses.append(-(nn.functional.one_hot(labels, CLASSES) * logs).mean())
        joint = torch.cat(features)
        squares = torch.stack([(joint - one).square().sum(1) for one in joint])
        width = squares.detach().sum() / (16 * 16 - 16) / 4
        kernel = sum(torch.exp(-squares / (width * 2**power)) for power in range(5))
        apart = (kernel[:8, :8] + kernel[8:, 8:] - kernel[:8, 8:] - kernel[8:, :8]).mean()
        adam.zero_grad()
        (CLASSES * (losses[0] - (0.1 * losses[1]).clamp(0, 1) * (0.1 * apart).clamp(0, 1))).backward()
        adam.step()
        decay.step()
    assert learned.kept == {}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(learned.weights[name], value, rtol=1e-3, atol=2e-4)


def test_both_domains_are_one_batch_so_that_batch_norm_does_not_hide_how_far_they_are_apart():
    before = toy.trained("cnn").get_buffer("1.num_batches_tracked")
    learned = learn_ntl(toy.trained("cnn"), NTL(steps=3, batch_size=16, precision="fp32"), session())
    assert learned.weights["1.num_batches_tracked"] == before + 3


def test_features_are_what_the_layer_returned_though_a_relu_then_works_in_place():
    def learned(*, inplace: bool) -> dict[str, Tensor]:
        model = toy.mlp_from(3)
        model[2] = nn.ReLU(inplace=inplace)
        config = NTL(steps=3, batch_size=16, learning_rate=1e-2, precision="fp32", layer="1")
        return learn_ntl(model, config, session()).weights

    one, other = learned(inplace=False), learned(inplace=True)
    assert all(torch.equal(other[name], value) for name, value in one.items())


@pytest.mark.parametrize("scale", ["elementwise", "mean"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_target_is_lost_and_the_source_is_kept(kind, scale):
    method = NTL(steps=150, learning_rate=3e-3, precision="fp32", scale=scale, evaluate_every=150)
    result = protect(
        toy.trained(kind), authorized=toy.blobs(seed=1), unauthorized=toy.blobs(seed=2, inverted=True), method=method
    )
    assert toy.accuracy(result.model, toy.blobs(seed=3)) > 0.9
    assert toy.accuracy(result.model, toy.blobs(seed=4, inverted=True)) < 0.5
    assert result.mask is None
    assert result.history[-1]["gap"] > 0.5


def test_the_defaults_are_those_of_the_published_code():
    config = NTL()
    assert (config.learning_rate, config.decay_per_step, config.batch_size, config.steps) == (1e-4, 0.999, 64, 156 * 30)
    assert (config.ascent, config.limit, config.distance, config.distance_limit) == (0.1, 1.0, 0.1, 1.0)
    assert (config.scale, config.start, config.layer) == ("elementwise", "given", None)


def test_it_is_never_chosen_by_the_data_alone():
    assert type(method_for(None, {"authorized": True, "unauthorized": True})[1]).__name__ == "SAMap"
    with pytest.raises(InputError, match="NTL needs unauthorized="):
        method_for(NTL(), {"authorized": True, "unauthorized": False})
