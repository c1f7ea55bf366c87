"""The generator that fresh and memory images come from."""

import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded, spec
from torch import nn

from modelfence.errors import InputError
from modelfence.losses.generation import balance, confidence
from modelfence.synthesis.decoder import Decoder
from modelfence.synthesis.fresh import FreshGenerator

SIZES = [(1, 28), (3, 32), (3, 33), (1, 8), (3, 96), (3, 224), (4, 30)]


@pytest.mark.parametrize(("channels", "side"), SIZES)
def test_images_fit_the_spec_and_are_possible_ones(channels, side):
    image = spec(channels, side)
    images = FreshGenerator(image, latent=10).sample(2, seeded())
    assert images.shape == (2, channels, side, side)
    assert_unit(image.to_unit(images), slack=1e-5)
    assert images.std() > 0.05  # not one grey


def test_images_need_not_be_square():
    assert Decoder(spec(3, 20, 45), latent=4, width=16)(torch.randn(3, 4)).shape == (3, 3, 20, 45)


def test_the_largest_of_them_stays_modest():
    sizes = {side: sum(one.numel() for one in FreshGenerator(spec(3, side)).parameters()) for side in (32, 224)}
    assert all(count < 1_100_000 for count in sizes.values()), sizes


def test_the_seed_decides_the_images():
    fresh = FreshGenerator(spec(), latent=10, width=16).eval()
    one = fresh.sample(4, seeded(1))
    torch.randn(3)  # the global generator plays no part
    assert torch.equal(one, fresh.sample(4, seeded(1)))
    assert not torch.equal(one, fresh.sample(4, seeded(2)))


def test_in_eval_mode_an_image_does_not_depend_on_its_batch():
    fresh = FreshGenerator(spec(), latent=10, width=16).eval()
    codes = fresh.codes(4, seeded())
    torch.testing.assert_close(fresh(codes)[:1], fresh(codes[:1]), rtol=1e-4, atol=1e-5)
    assert not torch.equal(fresh(codes)[0], fresh(codes)[1])


def test_a_few_steps_make_a_classifier_sure_of_several_classes():
    image = spec(1, 16)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(256, 4)).requires_grad_(False)
    classifier[1].weight.mul_(4)
    fresh, draws = FreshGenerator(image, latent=16, width=32), seeded()
    optimizer = torch.optim.Adam(fresh.parameters(), lr=2e-3)
    losses = []
    for _ in range(20):
        logits = classifier(fresh.sample(32, draws))
        losses.append((confidence(logits).item(), balance(logits).item()))
        optimizer.zero_grad()
        (confidence(logits) + 5 * balance(logits)).backward()
        optimizer.step()
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert losses[-1][1] < -1.1  # of at least -ln 4, where all four are as frequent
    assert all(parameter.grad.isfinite().all() for parameter in fresh.parameters())


def test_impossible_sizes_are_refused():
    with pytest.raises(InputError, match="latent is 0"):
        FreshGenerator(spec(), latent=0)
    with pytest.raises(InputError, match="width is -1"):
        FreshGenerator(spec(), width=-1)
