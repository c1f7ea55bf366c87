import io

import numpy as np
import pytest
import torch
from PIL import Image

from modelfence.data import images
from modelfence.data.image_spec import ImageSpec
from modelfence.data.images import decode, fits, from_memory, on_demand, to_pixels
from modelfence.errors import InputError

RGB = ImageSpec(channels=3, height=4, width=6, mean=(0.5,) * 3, std=(0.5,) * 3)
GREY = ImageSpec(channels=1, height=4, width=6, mean=(0.5,), std=(0.5,))


class Source:
    """Images from a list; counts how many were read."""

    def __init__(self, items):
        self.items = items
        self.read = 0

    def read_many(self, indices):
        self.read += len(indices)
        return [self.items[index] for index in indices]

    def where(self, index):
        return f"list: row {index}"


def encoded(array: np.ndarray, fmt: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=fmt)
    return buffer.getvalue()


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_pixels_of_the_right_shape_are_unchanged():
    array = noise(4, 6, 3)
    for image in (array, encoded(array), Image.fromarray(array), torch.from_numpy(array).permute(2, 0, 1)):
        assert np.array_equal(to_pixels(image, RGB, "here"), array)
    grey = noise(4, 6)
    for image in (grey, grey[..., None], encoded(grey), torch.from_numpy(grey)[None]):
        assert np.array_equal(to_pixels(image, GREY, "here"), grey[..., None])


def test_resizing_is_pils_bilinear():
    array = noise(9, 11, 3)
    expected = np.asarray(Image.fromarray(array).resize((6, 4), Image.Resampling.BILINEAR))
    assert np.array_equal(to_pixels(encoded(array), RGB, "here"), expected)
    assert np.array_equal(to_pixels(array, RGB, "here"), expected)


def test_grey_and_colour_are_converted_into_each_other():
    grey = noise(4, 6)
    assert np.array_equal(to_pixels(grey, RGB, "here"), np.repeat(grey[..., None], 3, axis=2))
    colour = noise(4, 6, 3)
    assert np.array_equal(to_pixels(colour, GREY, "here")[..., 0], np.asarray(Image.fromarray(colour).convert("L")))


def test_transparency_palettes_and_16_bits():
    transparent = np.dstack([noise(4, 6, 3), np.zeros((4, 6), dtype=np.uint8)])
    assert np.array_equal(to_pixels(encoded(transparent), RGB, "here"), transparent[..., :3])
    palette = Image.fromarray(noise(4, 6, 3)).quantize(8)
    palette.info["transparency"] = bytes(range(8))
    buffer = io.BytesIO()
    palette.save(buffer, format="PNG")
    assert to_pixels(buffer.getvalue(), RGB, "here").shape == (4, 6, 3)
    deep = noise(4, 6).astype(np.uint16) * 256 + 17
    assert np.array_equal(to_pixels(encoded(deep), GREY, "here")[..., 0], (deep >> 8).astype(np.uint8))


@pytest.mark.parametrize(
    "content", [b"", b"not an image", encoded(noise(4, 6, 3))[:60], encoded(noise(64, 64, 3), "JPEG")[:400]]
)
def test_undecodable_images_say_where(content):
    with pytest.raises(InputError, match="list: row 1: image can't be decoded"):
        decode(Source([encoded(noise(4, 6)), content]), [0, 1], RGB)


@pytest.mark.parametrize(
    ("image", "channels", "text"),
    [
        (noise(4, 6, 5), 3, "channels: 5; the image spec needs 3"),
        (encoded(noise(4, 6, 3)), 4, "channels: mode RGB; the image spec needs 4"),
        (noise(5, 5, 4), 4, r"size \(5, 5\); 4 x 6 is needed"),
        (np.zeros((4, 6)), 3, "float64 array"),
        (3, 3, "int isn't an image"),
    ],
)
def test_wrong_channels_sizes_and_types(image, channels, text):
    spec = ImageSpec(channels=channels, height=4, width=6, mean=(0.5,) * channels, std=(0.5,) * channels)
    with pytest.raises(InputError, match=f"here: .*{text}"):
        to_pixels(image, spec, "here")


def test_any_channels_pass_when_the_shape_is_right():
    spec = ImageSpec(channels=5, height=4, width=6, mean=(0.5,) * 5, std=(0.5,) * 5)
    array = noise(4, 6, 5)
    assert np.array_equal(to_pixels(array, spec, "here"), array)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_keep_the_order(monkeypatch, threads):
    monkeypatch.setattr(images, "_threads", lambda: threads)
    arrays = [np.full((4, 6, 3), value, dtype=np.uint8) for value in range(200)]
    decoded = decode(Source([encoded(array) for array in arrays]), list(range(199, -1, -1)), RGB)
    assert decoded[:, 0, 0, 0].tolist() == list(range(199, -1, -1))


def test_memory_and_disk_give_the_same_images():
    source = Source([encoded(noise(8, 8, 3) // (row + 1)) for row in range(10)])
    rows = [7, 1, 3]
    kept, decoded = from_memory(source, rows, RGB), on_demand(source, rows, RGB)
    reads = source.read
    indices = torch.tensor([2, 0, 0])
    assert torch.equal(kept(indices), decoded(indices))
    assert source.read == reads + 3  # only the second one reads again
    assert kept(indices).is_contiguous(memory_format=torch.channels_last)


def test_on_demand_finds_an_unusable_source_at_once():
    with pytest.raises(InputError, match="row 1"):
        on_demand(Source([encoded(noise(4, 6)), b"broken"]), [1], RGB)


def test_fits_counts_one_byte_a_value():
    assert fits(2**20, ImageSpec(channels=1, height=32, width=32, mean=(0,), std=(1,)), 1.0)
    assert not fits(2**20 + 1, ImageSpec(channels=1, height=32, width=32, mean=(0,), std=(1,)), 1.0)


def test_images_of_many_channels_are_taken_at_their_size_alone():
    spec = ImageSpec(channels=5, height=4, width=6, mean=(0.5,) * 5, std=(0.5,) * 5)
    assert np.array_equal(to_pixels(noise(4, 6, 5), spec, "here"), noise(4, 6, 5))
    with pytest.raises(InputError, match=r"here: size \(8, 6\); 4 x 6 is needed"):
        to_pixels(noise(8, 6, 5), spec, "here")
