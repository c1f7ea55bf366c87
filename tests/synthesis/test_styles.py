"""Every style by itself, and several at random."""

import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded, spec

from modelfence.errors import InputError
from modelfence.synthesis import styles
from modelfence.synthesis.strokes import draw
from modelfence.synthesis.styles import GEOMETRIC, PHOTOMETRIC, STYLES, random_style


def drawn(channels: int, side: int, count: int = 6) -> torch.Tensor:
    return draw(count, spec(channels, side), seeded(), kind="shapes")


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 33), (1, 8), (3, 96)])
def test_a_style_gives_other_images_of_the_same_shape(name, channels, side):
    images = drawn(channels, side)
    before = images.clone()
    styled = STYLES[name](images, seeded(1))
    assert torch.equal(images, before)  # the input is left alone
    assert styled.shape == images.shape
    assert styled.dtype == torch.float32
    assert_unit(styled, slack=1e-5)
    assert torch.equal(styled, STYLES[name](images, seeded(1)))
    if name != "grey" or channels > 1:
        assert ((styled - images).abs().amax(dim=(1, 2, 3)) > 0.01).all()


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_flat_images_stay_finite(name, value):
    assert_unit(STYLES[name](torch.full((3, 3, 16, 16), value), seeded()), slack=1e-5)


def test_the_two_families_share_nothing():
    assert not GEOMETRIC.keys() & PHOTOMETRIC.keys()
    assert GEOMETRIC.keys() | PHOTOMETRIC.keys() == STYLES.keys()


def test_thicken_grows_and_thin_shrinks_what_is_bright():
    images = torch.zeros(1, 1, 32, 32)
    images[:, :, 12:17, 12:17] = 1
    reached = styles.thicken(images, seeded())[0, 0] > 0
    assert reached.nonzero().aminmax(dim=0).min.tolist() == [11, 11]
    assert reached.sum() == 49
    assert (styles.thin(images, seeded())[0, 0] == 1).sum() == 9


def test_blur_keeps_the_mean_and_sharpen_undoes_some_of_it():
    images = torch.zeros(1, 1, 32, 32)
    images[:, :, 10:20, 10:20] = 0.8
    blurred = styles.blur(images, seeded())
    assert blurred.mean().item() == pytest.approx(images.mean().item(), rel=1e-4)
    assert (styles.sharpen(blurred, seeded()) - images).abs().mean() < (blurred - images).abs().mean()


def test_the_photometric_ones_by_hand():
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(styles.invert(images, seeded()), 1 - images)
    grey = styles.grey(images, seeded())
    torch.testing.assert_close(grey[:, 1], images.mean(dim=1))
    assert set(styles.binarize(images, seeded()).unique().tolist()) == {0.0, 1.0}
    pixels = styles.pixelate(torch.rand(1, 1, 32, 32), seeded())
    assert 64 <= len(pixels.unique()) <= 256


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 33), (1, 8)])
def test_random_style(channels, side):
    images = drawn(channels, side, count=75)
    styled = random_style(images, seeded(1))
    assert styled.shape == images.shape
    assert_unit(styled)
    assert torch.equal(styled, random_style(images, seeded(1)))
    assert not torch.equal(styled, random_style(images, seeded(2)))
    assert ((styled - images).abs().amax(dim=(1, 2, 3)) > 0.004).float().mean() > 0.95


def test_as_many_styles_are_applied_as_asked_for(monkeypatch):
    calls: list[str] = []

    def noted(name):
        return lambda images, generator: calls.append(name) or images

    monkeypatch.setattr(styles, "STYLES", {name: noted(name) for name in "abcde"})
    for count in ((1, 1), (2, 4), (5, 5)):
        for seed in range(20):
            calls.clear()
            random_style(torch.rand(16, 1, 8, 8), seeded(seed), count)
            assert count[0] <= len(calls) <= count[1]
            assert len(set(calls)) == len(calls)
    random_style(torch.rand(33, 1, 8, 8), seeded(), (5, 5))
    assert len(calls) == 5 + 15  # groups of 16, 16 and 1


@pytest.mark.parametrize("count", [(0, 1), (3, 2), (1, 99)])
def test_impossible_counts_are_refused(count):
    with pytest.raises(InputError, match="count is"):
        random_style(torch.rand(2, 3, 8, 8), seeded(), count)
