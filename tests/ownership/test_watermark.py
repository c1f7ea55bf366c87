from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from modelfence.errors import InputError
from modelfence.ownership.watermark import Watermark

SIZES = [(1, 1), (2, 3), (7, 5), (32, 32)]


def by_hand(images: np.ndarray, value: int, channel: int, both: bool) -> np.ndarray:
    """Pixel by pixel in wide integers, after NTL's description."""
    out = images.astype(np.int64)
    for row in range(images.shape[2]):
        for column in range(images.shape[3]):
            even = [row % 2 == 0, column % 2 == 0]
            if all(even) if both else any(even):
                out[:, channel, row, column] = np.minimum(out[:, channel, row, column] + value, 255)
    return out.astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "value", "both"), [("digits", 20, False), ("objects", 80, False), ("visda", 100, True)]
)
def test_marks_are_those_of_the_paper(kind: str, value: int, both: bool, size: tuple[int, int]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, *size), dtype=np.uint8)
    marked = Watermark(kind).apply(torch.from_numpy(images))
    np.testing.assert_array_equal(marked.numpy(), by_hand(images, value, 0, both))


@pytest.mark.parametrize("value", [1, 20, 255])
@pytest.mark.parametrize("channel", [0, 2])
def test_every_pixel_value_saturates(value: int, channel: int) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(256, 3, 1, 1)
    marked = Watermark("digits", value=value, channel=channel).apply(images)
    assert marked[:, channel].flatten().tolist() == [min(pixel + value, 255) for pixel in range(256)]
    others = [one for one in range(3) if one != channel]
    assert torch.equal(marked[:, others], images[:, others])


def test_the_images_given_stay_and_so_does_their_memory_format() -> None:
    images = torch.randint(256, (2, 3, 6, 6), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    marked = Watermark("objects").apply(images)
    assert torch.equal(images, before)
    assert marked.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(marked, images)


def test_a_grey_image_is_marked_in_its_only_channel() -> None:
    marked = Watermark("visda").apply(torch.zeros(1, 1, 3, 3, dtype=torch.uint8))
    assert marked[0, 0].tolist() == [[100, 0, 100], [0, 0, 0], [100, 0, 100]]


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    cells = torch.tensor([[1, 0, 0], [0, 0, 7]])
    Image.fromarray((cells.numpy() * 30).astype(np.uint8)).save(tmp_path / "mark.png")
    of_file = Watermark("custom", value=9, pattern=tmp_path / "mark.png")
    of_tensor = Watermark("custom", value=9, pattern=cells)
    marked = of_file.apply(torch.full((1, 1, 2, 3), 250, dtype=torch.uint8))
    assert marked[0, 0].tolist() == [[255, 250, 250], [250, 250, 255]]
    assert of_file == of_tensor
    assert hash(of_file) == hash(of_tensor)
    assert of_file.to_dict() == {"kind": "custom", "value": 9, "channel": 0, "pattern_sha256": of_file.pattern_digest}
    assert of_file != Watermark("custom", value=9, pattern=cells.flip(0))
    cells.zero_()
    assert bool(of_tensor.cells(2, 3).any())


def test_a_strong_mark_is_granted_more() -> None:
    marks = [Watermark("digits"), Watermark("digits", value=21), Watermark("objects"), Watermark("visda", value=5)]
    assert [mark.tolerance for mark in marks] == [0.3, 0.8, 0.8, 0.3]


def test_a_table_of_a_run_file() -> None:
    assert TypeAdapter(Watermark).validate_python({"kind": "digits", "value": 80}) == Watermark("digits", value=80)
    assert TypeAdapter(Watermark).validate_python({"kind": "visda"}) == Watermark("visda")
    with pytest.raises(ValidationError, match="unknown kind 'vista'"):
        TypeAdapter(Watermark).validate_python({"kind": "vista"})


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"kind": "digit"}, "Did you mean 'digits'"),
        ({"kind": ["digits"]}, "unknown kind"),
        ({"kind": "custom", "value": 9, "pattern": np.ones((2, 2))}, "pattern: is ndarray; the path of an image, or a"),
        ({"value": 0}, "value is 0; a whole number from 1 to 255"),
        ({"value": 256}, "value is 256"),
        ({"value": True}, "value is True"),
        ({"value": 2.0}, "value is 2.0"),
        ({"channel": -1}, "channel is -1"),
        ({"kind": "custom", "pattern": torch.ones(2, 2)}, "needs value"),
        ({"kind": "custom", "value": 3}, "needs pattern"),
        ({"kind": "digits", "pattern": torch.ones(2, 2)}, "has its own pattern"),
        ({"kind": "custom", "value": 3, "pattern": torch.zeros(2, 2)}, "marks nothing"),
        ({"kind": "custom", "value": 3, "pattern": torch.ones(1, 2, 2)}, "shape (1, 2, 2)"),
        ({"kind": "custom", "value": 3, "pattern": "nowhere.png"}, "nowhere.png can't be read"),
    ],
)
def test_a_wrong_argument(arguments: dict, fragment: str) -> None:
    with pytest.raises(InputError) as caught:
        Watermark(**arguments)
    assert fragment in str(caught.value)


def test_a_pattern_file_in_colour(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2), "white").save(tmp_path / "mark.png")
    with pytest.raises(InputError, match="mode RGB; save it as 8-bit greyscale"):
        Watermark("custom", value=3, pattern=str(tmp_path / "mark.png"))


def test_images_that_can_not_be_marked() -> None:
    with pytest.raises(InputError, match="float32 of shape"):
        Watermark().apply(torch.zeros(1, 3, 2, 2))
    with pytest.raises(InputError, match="channel 1 of images with 1"):
        Watermark(channel=1).apply(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"the pattern is \(3, 3\), the images are \(2, 2\)"):
        Watermark("custom", value=1, pattern=torch.ones(3, 3)).apply(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
