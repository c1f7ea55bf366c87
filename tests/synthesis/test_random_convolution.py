"""Warps and random convolutions."""

import numpy as np
import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded
from torch.nn import functional as F

from modelfence.synthesis.random_convolution import random_convolution, random_convolution_copies, stretch
from modelfence.synthesis.warp import warp


@pytest.fixture
def blobs() -> torch.Tensor:
    """Smooth images (64, 3, 24, 20)."""
    return F.interpolate(torch.rand(64, 3, 4, 4), size=(24, 20), mode="bilinear")


def test_copies_are_images_of_their_own_and_depend_on_the_seed_alone(blobs):
    copies = random_convolution_copies(blobs, seeded(1))
    assert copies.shape == blobs.shape
    assert_unit(copies)
    assert torch.equal(copies, random_convolution_copies(blobs, seeded(1)))
    assert not torch.equal(copies, random_convolution_copies(blobs, seeded(2)))
    assert ((copies - blobs).abs().mean(dim=(1, 2, 3)) > 0.01).all()


def test_grey_and_flat_images_stay_finite():
    assert_unit(random_convolution_copies(torch.ones(5, 1, 8, 8), seeded()))
    assert_unit(random_convolution_copies(torch.zeros(5, 1, 8, 8), seeded()))


def test_every_image_gets_a_kernel_of_1_3_or_5_pixels():
    """A single white pixel shows the kernel."""
    images = torch.zeros(400, 1, 11, 11)
    images[:, :, 5, 5] = 1
    drawn = random_convolution(images, seeded())[:, 0]
    reach = np.array([(one != 0).nonzero().sub(5).abs().max().item() for one in drawn])
    assert set(reach) == {0, 1, 2}
    assert all(90 < (reach == size).sum() < 180 for size in (0, 1, 2))
    # the weights of a kernel have the variance 1 / k^2: their squares sum to 1 on average
    for size in (0, 1, 2):
        assert drawn[reach == size].square().sum(dim=(1, 2)).mean().item() == pytest.approx(1, abs=0.3)


def test_channels_are_mixed_within_an_image_and_images_are_not():
    images = torch.zeros(3, 3, 9, 9)
    images[1, 0, 4, 4] = 1
    found = random_convolution(images, seeded()).abs().sum(dim=(2, 3))
    assert (found[1] > 0).all()
    assert found[0].sum() == found[2].sum() == 0


def test_stretch():
    images = torch.rand(4, 2, 3, 3) * 7 - 3
    expected = [(one - one.min()) / (one.max() - one.min()) for one in images.numpy()]
    np.testing.assert_allclose(stretch(images).numpy(), np.stack(expected), atol=1e-6)


def test_warp_moves_zooms_and_turns_as_it_says():
    images = torch.zeros(200, 1, 33, 33)
    images[:, :, 15:18, 15:18] = 1  # a square in the middle
    y, x = torch.meshgrid(*[torch.arange(33.0) - 16] * 2, indexing="ij")

    def centres(moved: torch.Tensor) -> torch.Tensor:
        mass = moved.sum(dim=(1, 2, 3))
        return torch.stack([(moved[:, 0] * axis).sum(dim=(1, 2)) / mass for axis in (x, y)], dim=1)

    moved = centres(warp(images, seeded(), shift=0.2))
    assert 5.5 < moved.abs().max() <= 0.2 * 33 + 0.01
    assert moved.min() < -5.5
    areas = warp(images, seeded(), zoom=(2, 2)).sum(dim=(1, 2, 3)) / 9
    torch.testing.assert_close(areas, torch.full((200,), 4.0), rtol=0.02, atol=0)
    torch.testing.assert_close(centres(warp(images, seeded(), turn=45)), torch.zeros(200, 2), rtol=0, atol=1e-3)
