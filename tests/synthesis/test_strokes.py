"""Drawn images."""

import numpy as np
import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded, spec

from modelfence.errors import InputError
from modelfence.synthesis.strokes import _distances, draw

KINDS = ("strokes", "shapes", "textures", "mixed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("channels", "height", "width"), [(1, 28, 28), (3, 32, 32), (3, 33, 33), (1, 8, 12), (3, 96, 224)]
)
def test_images_fit_the_spec_and_depend_on_the_seed_alone(kind, channels, height, width):
    image = spec(channels, height, width)
    images = draw(7, image, seeded(1), kind)
    assert images.shape == (7, *image.shape)
    assert images.dtype == torch.float32
    assert_unit(images, slack=1e-5)
    assert torch.equal(images, draw(7, image, seeded(1), kind))
    assert not torch.equal(images, draw(7, image, seeded(2), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_is_empty_and_no_two_are_alike(kind):
    images = draw(100, spec(3, 32), seeded(), kind)
    spread = images.amax(dim=(2, 3)) - images.amin(dim=(2, 3))
    assert (spread.amax(dim=1) > 0.05).float().mean() > 0.95
    assert torch.cdist(images.flatten(1), images.flatten(1)).fill_diagonal_(1).min() > 0.1


def test_strokes_are_thin_smooth_and_half_of_them_white_on_black():
    images = draw(200, spec(1, 32), seeded(), "strokes")
    plain = images[(images.amin(dim=(1, 2, 3)) == 0) & (images.amax(dim=(1, 2, 3)) > 0.99)]
    assert 70 < len(plain) < 130
    ink = plain.mean(dim=(1, 2, 3))
    assert ink.min() > 0.005
    assert ink.max() < 0.5
    between = ((plain > 0.05) & (plain < 0.95)).float().mean(dim=(1, 2, 3))
    assert (between > 0).all()  # borders are smooth


def test_mixed_holds_all_three_kinds():
    images = draw(60, spec(3, 32), seeded(), "mixed")
    two_colours = [len((one * 255).round().flatten(1).T.unique(dim=0)) for one in images]
    assert min(two_colours) < 120  # strokes: two colours and what lies between
    assert max(two_colours) > 400  # noise


def test_distances_are_those_of_points_from_pieces():
    rng = np.random.default_rng(0)
    pixels, begins, ends = rng.normal(size=(9, 2)) * 5, rng.normal(size=(2, 4, 2)) * 5, rng.normal(size=(2, 4, 2)) * 5
    ends[0, 0] = begins[0, 0]  # a point
    radius = rng.uniform(1, 2, size=(2, 4))
    along = np.linspace(0, 1, 20_001)[:, None]
    expected = np.array(
        [
            [
                min(
                    np.hypot(*(a + along * (b - a) - pixel).T).min() / r
                    for a, b, r in zip(begins[n], ends[n], radius[n], strict=True)
                )
                for pixel in pixels
            ]
            for n in range(2)
        ]
    )
    found = _distances(*(torch.from_numpy(one).float() for one in (pixels, begins, ends, radius)))
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)


def test_bad_requests_are_refused():
    with pytest.raises(InputError, match="count is 0"):
        draw(0, spec(), seeded())
    with pytest.raises(InputError, match=r"isn't known; use .* Did you mean 'strokes'"):
        draw(1, spec(), seeded(), kind="stroke")
