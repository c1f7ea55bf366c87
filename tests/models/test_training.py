import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.splits import MOST_SEED
from modelfence.errors import InputError, NonFiniteError
from modelfence.models import training
from modelfence.models.training import TrainConfig, accuracy_on, learning_rate_at, shifted, train
from modelfence.models.zoo import create_model

SPEC = ImageSpec(1, 16, 16, (0.5,), (0.5,))


def bars(count=96, seed=0, labelled=True, classes=None):
    """Images with one bright bar: its place is the class (0..3)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    pixels = torch.randint(0, 60, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[0, 4 * label : 4 * label + 3] += 180
    return IndexedDomain(
        "bars", pixels.__getitem__, count, classes=classes, spec=SPEC, labels=labels if labelled else None
    )


def small_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(512, 4),
    )


FAST = TrainConfig(epochs=3, batch_size=16, learning_rate=5e-3, shift=0, precision="fp32")


def test_a_small_network_learns_and_is_left_ready_for_use():
    model, rows = small_net(), []
    history = train(model, bars(), bars(48, seed=1), FAST, progress=rows.append)
    assert rows == history
    assert [row["epoch"] for row in history] == [1.0, 2.0, 3.0]
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["validation_accuracy"] > 0.9
    assert not any(module.training for module in model.modules())
    assert all(value.dtype == torch.float32 and value.is_contiguous() for value in model.parameters())
    best = max(row["validation_accuracy"] for row in history)
    assert accuracy_on(model, bars(48, seed=1)) == best


def test_bf16_training_leaves_float32_weights():
    model = small_net()
    config = TrainConfig(epochs=2, batch_size=16, learning_rate=5e-3, shift=1, precision="bf16")
    assert math.isfinite(train(model, bars(), bars(32, seed=1), config)[-1]["loss"])
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_the_same_seed_gives_the_same_weights_and_the_callers_random_numbers_are_untouched():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model = small_net()
        train(model, bars(), bars(32, seed=1), TrainConfig(epochs=1, batch_size=16, shift=2, precision="fp32"))
        results.append((model.state_dict(), torch.rand(1)))
    torch.manual_seed(3)
    small_net()
    assert torch.equal(results[0][1], torch.rand(1))
    assert all(torch.equal(value, results[1][0][key]) for key, value in results[0][0].items())


def test_the_best_epoch_is_restored_and_the_later_of_equals(monkeypatch):
    seen, accuracies = [], iter([0.5, 0.75, 0.75, 0.25])

    def fake_accuracy(model, *_, **__):
        seen.append({key: value.clone() for key, value in model.state_dict().items()})
        return next(accuracies)

    monkeypatch.setattr(training, "accuracy_on", fake_accuracy)
    model = small_net()
    train(model, bars(32), bars(16), TrainConfig(epochs=4, batch_size=16, precision="fp32"))
    assert all(torch.equal(value, seen[2][key]) for key, value in model.state_dict().items())


def test_the_largest_seed_is_taken_and_a_larger_one_is_refused():
    config = TrainConfig(epochs=1, batch_size=16, seed=MOST_SEED, precision="fp32")
    assert len(train(small_net(), bars(32), bars(16), config)) == 1
    with pytest.raises(ValueError, match="(?s)seed.*less than or equal to"):
        TrainConfig(seed=MOST_SEED + 1)


def test_one_step_is_adamw_with_clipping_and_decay_on_matrices_only():
    """A step on one batch against AdamW's first update, worked out by hand."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    domain = bars(16)
    images, labels = next(iter(domain.once(16)))
    weight, bias = (value.detach().clone().requires_grad_() for value in model[1].parameters())
    F.cross_entropy(F.linear(images.flatten(1), weight, bias), labels, label_smoothing=0.1).backward()
    norm = torch.cat([weight.grad.flatten(), bias.grad]).norm()
    assert norm > 0.25  # so that the clipping acts
    config = TrainConfig(
        *(1, 16, 0.01),
        warmup=0.0,
        weight_decay=0.5,
        gradient_clip=0.25,
        label_smoothing=0.1,
        shift=0,
        precision="fp32",
    )
    train(model, domain, domain, config)
    for value, before, decay in ((model[1].weight, weight, 0.5), (model[1].bias, bias, 0.0)):
        gradient = before.grad * 0.25 / norm
        expected = before * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_a_step_begins_without_gradients_whatever_the_caller_left():
    """The forward pass is where memory peaks: gradients of the last step have no place there."""
    results, held = [], []
    for left in (None, 1.0):
        torch.manual_seed(0)
        model = small_net()
        for value in model.parameters():
            value.grad = None if left is None else torch.full_like(value, left)
        model[0].register_forward_pre_hook(
            lambda module, _: held.append(module.weight.grad) if module.training else None
        )
        train(model, bars(48), bars(16), TrainConfig(epochs=1, batch_size=16, precision="fp32"))
        results.append(model[0].weight.detach())
    assert held == [None] * 6
    assert torch.equal(*results)


def test_frozen_parameters_stay():
    model = small_net()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    train(model, bars(32), bars(16), TrainConfig(epochs=1, batch_size=16, precision="fp32"))
    assert torch.equal(model[0].weight, before)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter with requires_grad"):
        train(model, bars(32), bars(16), FAST)


def test_a_loss_that_is_not_finite_names_epoch_and_step():
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))

    def spoil(module, inputs, output):
        spoil.calls += 1
        return output * float("nan") if spoil.calls == 3 else output

    spoil.calls = 0
    model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match="the cross-entropy of epoch 1, step 3 is nan; lower learning_rate"):
        train(model, bars(), bars(16), FAST)
    assert not model.training


def test_domains_that_cannot_be_trained_on_are_named():
    model = small_net()
    with pytest.raises(InputError, match="domain 'bars' has no labels; training needs them"):
        train(model, bars(labelled=False), bars(16), FAST)
    with pytest.raises(InputError, match="domain 'bars' has no labels; validation needs them"):
        train(model, bars(), bars(labelled=False), FAST)
    with pytest.raises(InputError, match="has 8 images, fewer than one batch of 16; lower batch_size"):
        train(model, bars(8), bars(16), FAST)
    stream = bars()
    stream.size = None
    with pytest.raises(InputError, match=r"stream of unknown length; set train\.steps_per_epoch"):
        train(model, stream, bars(16), FAST)
    two_logits = nn.Sequential(nn.Flatten(), nn.Linear(256, 2))
    with pytest.raises(InputError, match="label 3 has no logit, the model has 2"):
        train(two_logits, bars(), bars(16), FAST)
    with pytest.raises(InputError, match="domain 'bars' has no labels; accuracy needs them"):
        accuracy_on(model, bars(labelled=False))


def test_a_stream_trains_for_the_steps_given():
    stream = bars()
    stream.size = None
    calls = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    model.register_forward_hook(lambda module, *_: calls.append(module.training))
    config = TrainConfig(epochs=2, batch_size=8, steps_per_epoch=5, precision="fp32")
    train(model, stream, bars(16), config)
    assert calls.count(True) == 10


def run_training(fabric, batch_size):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 4))
    config = TrainConfig(epochs=2, batch_size=batch_size, shift=0, precision="fp32")
    history = train(model, bars(), bars(32, seed=1), config, fabric=fabric)
    return history, {key: value.numpy() for key, value in model.state_dict().items()}


def test_two_processes_take_the_steps_of_one():
    from lightning_fabric import Fabric

    one_history, one = run_training(Fabric(accelerator="cpu", devices=1), 16)
    two = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    two_history, both = two.launch(run_training, 8)
    for key, value in one.items():
        np.testing.assert_allclose(both[key], value, rtol=1e-4, atol=1e-6)
    assert [row["loss"] for row in two_history] == pytest.approx([row["loss"] for row in one_history], rel=1e-4)


def test_learning_rate_rises_then_falls():
    rates = [learning_rate_at(step, 100, peak=2.0, warmup=0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.001
    assert learning_rate_at(0, 1, peak=1.0, warmup=0.0) == 1.0


def test_shifts_are_per_image_within_bounds_and_repeat_the_border():
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(200, 2, 1, 1)
    moved = shifted(images, 2, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    padded = F.pad(images[:1], (2,) * 4, mode="replicate")[0]
    windows = {(y, x): padded[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
    found = {next(at for at, window in windows.items() if torch.equal(window, image)) for image in moved}
    assert found == set(windows)


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"precision": "fp16"}, {"lr": 1.0}]
)
def test_wrong_settings_name_their_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**wrong)


@pytest.mark.slow
def test_the_demo_network_learns_real_digits(data_root):
    import io

    import pyarrow.parquet as pq
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rows = pq.read_table(data_root / "mnist" / "train.parquet").slice(0, 1250).to_pydict()
    images = [np.array(Image.open(io.BytesIO(cell["bytes"]))) for cell in rows["image"]]
    pixels = torch.from_numpy(np.stack(images))[:, None]
    spec = ImageSpec(1, 28, 28, (0.13,), (0.31,))
    labels = torch.tensor(rows["label"])
    domain = IndexedDomain("mnist", pixels.__getitem__, len(labels), spec=spec, labels=labels)
    model = create_model("small_vgg_bn", 10, spec)
    history = train(
        model,
        domain.subset(torch.arange(1000)),
        domain.subset(torch.arange(1000, 1250)),
        TrainConfig(epochs=3, learning_rate=2e-3, batch_size=32),
    )
    assert history[-1]["validation_accuracy"] > 0.85
