"""Translations into the source's style, and that they keep their content."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.translation import faded, translate

SPEC = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))


def by_hand(originals, images):
    """The share of the expected contrast that is missing, image by image in numpy."""
    before = [np.std(one, ddof=1) for one in originals.numpy()]
    after = [np.std(one, ddof=1) for one in images.numpy()]
    missing = []
    for was, became in zip(before, after, strict=True):
        expected = 0.8 * was / np.mean(before) * np.mean(after)
        missing.append(max(0.0, 1 - became / expected))
    return np.mean(missing)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 6))
def test_faded_is_the_missing_share_of_the_expected_contrast(seed, count):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, 1, 1, 1, generator=generator) + 0.01
    originals = torch.randn(count, 2, 3, 4, generator=generator)
    images = scale * torch.randn(count, 2, 3, 4, generator=generator)
    assert np.isclose(float(faded(originals, images)), by_hand(originals, images), atol=1e-5)


def test_a_style_change_common_to_all_images_costs_nothing():
    originals = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert float(faded(originals, 0.1 * originals + 3)) == 0.0


def test_the_gradient_brings_back_an_image_that_is_nearly_gone_and_stays_finite_for_one_that_is():
    originals = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    images = originals.clone()
    images[0] *= 0.01
    images[1] = 0.0
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(faded(originals, images), images)
    assert torch.isfinite(gradient).all()
    step = images.detach() - 0.1 * gradient
    assert step[0].std() > images[0].std()
    assert torch.equal(gradient[2], torch.zeros_like(gradient[2]))


def test_blank_originals_are_not_a_division_by_zero():
    blank = torch.zeros(3, 1, 4, 4)
    assert float(faded(blank, blank)) <= 1.0
    assert float(faded(blank, torch.randn(3, 1, 4, 4))) == 0.0


def test_no_class_fades_away_where_the_classifier_says_it_of_nothing():
    """The classifier says 0 of a blank image; half the images show class 0."""

    class Brightness(nn.Module):
        """Class 0 up to a mean of 0.2 of the scale; its BatchNorm wants darker images than those given."""

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(1)
            self.norm.running_mean.fill_(-0.9)
            self.norm.running_var.fill_(0.05)

        def forward(self, images):
            bright = (self.norm(images).mean(dim=(1, 2, 3)) * 5).unsqueeze(1)
            return torch.cat([-bright, bright], dim=1)

    pixels = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    pixels[:32, :, :, 3] = 255
    pixels[32:, :, 2:6, 2:6] = 255
    made = translate(Judge(Brightness().eval(), SPEC), pixels, 64, steps=40, batch_size=32, seed=0)
    contrast = made.float().flatten(1).std(1)
    assert contrast[:32].mean() > 0.5 * contrast[32:].mean()
