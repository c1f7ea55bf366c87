import numpy as np
import pytest
import torch

from modelfence.data import embedded
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.errors import InputError

NAMES = ("sklearn_digits", "photo_digits", "font_digits")
SIZES = {"sklearn_digits": (808, 269), "photo_digits": (1080, 360), "font_digits": (900, 300)}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_labels(name):
    for split, size in zip(("train", "test"), SIZES[name], strict=True):
        pixels, labels = embedded.build(name, split)
        assert pixels.shape == (size, 32, 32, 3 if name == "photo_digits" else 1)
        assert pixels.dtype == np.uint8
        assert len(labels) == size
        assert torch.bincount(labels, minlength=10).min() >= size // 20


@pytest.mark.parametrize("name", NAMES)
def test_they_are_made_the_same_each_time(name):
    pixels, labels = embedded.build(name, "train")
    embedded._BUILDERS[name].cache_clear()
    again = embedded.build(name, "train")
    assert np.array_equal(pixels, again[0])
    assert torch.equal(labels, again[1])


@pytest.mark.parametrize("name", NAMES)
def test_no_image_is_in_train_and_test(name):
    train, test = ({image.tobytes() for image in embedded.build(name, split)[0]} for split in ("train", "test"))
    assert not train & test


def test_photo_digits_are_made_of_other_digits():
    plain = {image.tobytes() for image in embedded._handwritten(0, embedded._PLAIN)[0]}
    others = {image.tobytes() for image in embedded._handwritten(embedded._PLAIN, 1797)[0]}
    assert not plain & others
    assert len(plain) + len(others) == 1797
    assert {image[..., 0].tobytes() for image in embedded.build("sklearn_digits", "train")[0]} <= plain


def test_blending_is_the_absolute_difference():
    digit = np.full((32, 32), 200, dtype=np.uint8)
    photo = np.full((40, 200, 3), 100, dtype=np.uint8)
    blended = embedded._blended(digit, [photo], np.random.default_rng(0), left=True)
    assert np.unique(blended).tolist() == [round(abs(100 * embedded._PHOTO_STRENGTH - 200))]


def test_printed_digits_are_bright_on_black():
    pixels, _ = embedded.build("font_digits", "test")
    assert pixels[:, 0, 0].mean() < 10
    assert pixels.reshape(len(pixels), -1).max(axis=1).min() > 80


def test_they_are_domains():
    spec = ImageSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    for name in NAMES:
        domain = as_domain(name, image=spec, split="test", classes=10)
        assert domain.size == SIZES[name][1]
        assert next(domain.batches(16, seed=0)).images.shape == (16, 3, 32, 32)


def test_wrong_names():
    with pytest.raises(InputError, match="no built-in domain"):
        embedded.build("digits", "train")
    with pytest.raises(InputError, match="split 'val'"):
        embedded.build("font_digits", "val")
