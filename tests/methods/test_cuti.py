"""CUTI's isolation domain against numpy, where it stands in a network, both ways of its matrices; a small run."""

from types import ModuleType

import jaxtyping
import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from tests.losses.checked import checked_copy
from tests.methods import toy
from torch import Tensor, nn

from modelfence import CUTI, ImageSpec, protect
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.methods import cuti
from modelfence.methods.cuti import cuti_terms, learn_cuti
from modelfence.methods.isolation import Gates, drawn, isolated, isolating, isolation_layers
from modelfence.methods.loop import Session
from modelfence.models.zoo import create_model


@pytest.fixture(scope="module")
def isolation() -> ModuleType:
    return checked_copy("modelfence.methods.isolation")


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def expected(source: Tensor, target: Tensor, mean: Tensor, deviation: Tensor) -> np.ndarray:
    """Go through images, channels and pixels one by one."""
    one, other, over, under = (value.detach().double().numpy() for value in (source, target, mean, deviation))
    result = np.empty_like(other)
    for image, channel in np.ndindex(other.shape[:2]):
        means = np.array([one[image, c].mean() for c in range(one.shape[1])])
        pixels = one[image].reshape(one.shape[1], -1)
        spread = ((pixels - means[:, None]) ** 2).sum(1) / max(pixels.shape[1] - 1, 1)
        shift = sigmoid(sum(over[channel, c] * means[c] for c in range(len(means))))
        gate = sigmoid(sum(under[channel, c] * np.sqrt(spread[c] + 1e-5) for c in range(len(means))))
        result[image, channel] = other[image, channel] * gate + shift
    return result


@pytest.mark.parametrize("pixels", [(3, 2), (1, 1)])
def test_features_are_scaled_by_one_gate_and_moved_by_the_other(isolation, pixels):
    source, target = torch.randn(4, 5, *pixels) * 2 + 1, torch.randn(4, 5, *pixels)
    matrices = torch.randn(5, 5), torch.randn(5, 5)
    found = isolation.isolated(source, target, *matrices)
    np.testing.assert_allclose(found.numpy(), expected(source, target, *matrices), rtol=1e-4, atol=1e-5)


def test_half_precision_features_stay_so_and_gates_are_computed_in_float32():
    source, target = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    matrices = torch.randn(3, 3), torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = isolated(source.bfloat16(), target.bfloat16(), *matrices)
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.float().numpy(), expected(source, target, *matrices), rtol=0.02, atol=0.02)


def test_gradients_reach_target_and_the_style_of_the_source():
    """By differences of the numpy version, at some pixels."""
    source, target = (torch.randn(2, 3, 2, 2, requires_grad=True) for _ in range(2))
    matrices = torch.randn(3, 3), torch.randn(3, 3)
    isolated(source, target, *matrices).sum().backward()
    for values in (source, target):
        for place in [(0, 0, 0, 0), (1, 2, 1, 0), (1, 1, 0, 1)]:
            step = torch.zeros_like(values, dtype=torch.float64)
            step[place] = 1e-5
            up, down = (
                expected(
                    source + sign * step if values is source else source,
                    target + sign * step if values is target else target,
                    *matrices,
                ).sum()
                for sign in (1, -1)
            )
            assert values.grad[place].item() == pytest.approx((up - down) / 2e-5, abs=1e-3)


def test_shapes_that_do_not_fit_are_caught(isolation):
    with pytest.raises(jaxtyping.TypeCheckError):
        isolation.isolated(torch.zeros(2, 3, 1, 1), torch.zeros(2, 4, 1, 1), torch.zeros(3, 3), torch.zeros(3, 3))


def test_the_matrices_are_drawn_as_a_convolution_draws_them_and_anew_each_time():
    first, second = drawn(64, torch.device("cpu")), drawn(64, torch.device("cpu"))
    reference = nn.Conv2d(64, 64, 1, bias=False).weight
    for matrix in (*first, *second):
        assert matrix.abs().max() <= 1 / 8
        assert matrix.std().item() == pytest.approx(reference.std().item(), rel=0.1)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])


# In the network


def small() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(24, toy.CLASSES),
        )


def test_the_second_half_of_a_batch_takes_the_style_of_the_first_at_every_stage():
    network, images = small(), torch.randn(6, 1, 8, 8)
    gates = Gates({"2": 4, "5": 6}, seed=3)
    plain = network(images)
    with isolating(network, ["2", "5"], lambda layer, _: gates.of(layer)):
        found = network(images)
    assert torch.equal(network(images), plain)  # the hooks are gone
    source, target = network[:3](images[:3]), network[:3](images[3:])
    target = torch.tensor(expected(source, target, *gates.of("2"))).float()
    source, target = network[3:6](source), network[3:6](target)
    target = torch.tensor(expected(source, target, *gates.of("5"))).float()
    torch.testing.assert_close(found[:3], plain[:3])
    torch.testing.assert_close(found[3:], network[6:](target), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[3:], plain[3:])


def test_the_stages_of_vgg11_are_the_published_ones():
    spec = ImageSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.5,))
    found = isolation_layers(create_model("vgg11", 3, spec), spec.shape)
    places, channels = (2, 5, 10, 15, 20), (64, 128, 256, 512, 512)
    assert found == {f"features.{place}": count for place, count in zip(places, channels, strict=True)}


def test_a_network_without_pooling_gets_evenly_spaced_convolutions():
    network = nn.Sequential(*[nn.Conv2d(1, 1, 1) for _ in range(10)], nn.Flatten())
    assert list(isolation_layers(network, (1, 2, 2))) == ["1", "3", "5", "7", "9"]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (None, "layers: the model has no convolution"),
        (["9"], "layers: the model has no module '9'"),
        (["3"], "layers: module '3' returns 2 axes; choose one with maps"),
    ],
)
def test_a_layer_without_maps_is_refused(layers, text):
    with pytest.raises(InputError, match=text):
        isolation_layers(toy.mlp(), (1, 8, 8), layers)


# The loss


@pytest.mark.parametrize(("scale", "bound"), [("elementwise", 10.0), ("mean", 1.0)])
@pytest.mark.parametrize("sure", [1.0, 400.0])
def test_the_loss_is_bounded_cross_entropy_and_has_no_gradient_beyond(scale, bound, sure):
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(8, 10, generator=generator, requires_grad=True) for _ in range(2)]
    labels = [torch.randint(10, (8,), generator=generator) for _ in range(2)]
    terms = cuti_terms((logits[0], sure * logits[1]), labels, CUTI(scale=scale))
    entropies = []
    for values, truth, factor in zip(logits, labels, (1.0, sure), strict=True):
        array = factor * values.detach().double().numpy()
        array -= array.max(1, keepdims=True)
        entropies.append(np.mean(np.log(np.exp(array).sum(1)) - array[np.arange(8), truth.numpy()]))
    assert (0.1 * entropies[1] > bound) == (sure > 1)
    assert terms["source"].item() == pytest.approx(entropies[0], rel=1e-4)
    assert terms["target"].item() == pytest.approx(-min(0.1 * entropies[1], bound), rel=1e-4)
    terms["target"].backward()
    moved = logits[1].grad is not None and bool(logits[1].grad.any())
    assert moved == (sure == 1)


# Runs


def session() -> Session:
    return Session(
        Fabric(accelerator="cpu", devices=1),
        authorized=as_domain(toy.blobs(80, seed=1), name="authorized"),
        unauthorized={"far": as_domain(toy.blobs(80, seed=2, inverted=True), name="far")},
    )


@pytest.mark.parametrize("way", ["code", "paper"])
def test_every_second_step_has_the_isolation_domain_and_both_domains_are_one_batch(monkeypatch, way):
    used: list[Tensor] = []
    batches: list[tuple[int, bool]] = []
    original = cuti.isolating

    def spy(network: nn.Module, layers: list[str], projections: object) -> object:
        def noting(layer: str, output: Tensor) -> object:
            batches.append((len(output), network.training))
            matrices = projections(layer, output)
            used.extend(matrix.detach().clone() for matrix in matrices)
            return matrices

        return original(network, layers, noting)

    monkeypatch.setattr(cuti, "isolating", spy)
    learn_cuti(small(), CUTI(steps=5, batch_size=16, learning_rate=1e-2, precision="fp32", isolation=way), session())
    assert batches == [(16, True)] * 4  # two stages in steps 1 and 3 of 0..4
    first, second = used[:4], used[4:]
    changed = [float((a - b).abs().max()) for a, b in zip(first, second, strict=True)]
    assert all(0.003 < change < 0.011 for change in changed) if way == "paper" else min(changed) > 0.1


@pytest.mark.parametrize("way", ["code", "paper"])
@pytest.mark.parametrize("scale", ["elementwise", "mean"])
def test_the_target_is_lost_and_the_source_is_kept(way, scale):
    method = CUTI(steps=150, learning_rate=3e-3, precision="fp32", isolation=way, scale=scale, evaluate_every=150)
    result = protect(
        toy.trained("cnn"), authorized=toy.blobs(seed=1), unauthorized=toy.blobs(seed=2, inverted=True), method=method
    )
    assert toy.accuracy(result.model, toy.blobs(seed=3)) > 0.9
    assert toy.accuracy(result.model, toy.blobs(seed=4, inverted=True)) < 0.5
    assert result.mask is None
    assert result.model.state_dict().keys() == toy.cnn().state_dict().keys()


def test_several_unauthorized_domains_share_the_batch():
    images, labels = toy.blobs(seed=5, inverted=True).tensors
    faint = torch.utils.data.TensorDataset(0.5 * images + 0.2, labels)
    result = protect(
        toy.trained("cnn"),
        authorized=toy.blobs(seed=1),
        unauthorized={"inverted": toy.blobs(seed=2, inverted=True), "faint": faint},
        method=CUTI(steps=150, learning_rate=3e-3, precision="fp32"),
    )
    assert toy.accuracy(result.model, toy.blobs(seed=3)) > 0.9
    assert toy.accuracy(result.model, toy.blobs(seed=4, inverted=True)) < 0.5
    assert toy.accuracy(result.model, faint) < 0.5
