"""Contact sheets: every image with its class, within the frame."""

import pytest
import torch
from tests.report.test_figures import assert_tidy

from modelfence.report.sheets import contact_sheet, sheet_figure


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (8, 1), (9, 2), (64, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_has_its_class(count, rows, channels):
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, channels, 4, 6).contiguous()
    figure = sheet_figure(images, torch.arange(count) % 10)
    assert len(figure.axes) == rows
    assert [text.get_text() for text in figure.texts] == [str(number % 10) for number in range(count)]
    last = figure.axes[-1].images[0].get_array()
    place = (count - 1) % 8 * 7
    assert (last[:, place : place + 6, :3] == count - 1).all()
    assert (last[:, place : place + 6, 3] == 255).all()
    assert (last[:, place + 6 :, 3] == 0).all()
    assert_tidy(figure)


def test_names_take_the_place_of_numbers():
    images = torch.zeros(9, 1, 4, 4, dtype=torch.uint8)
    names = ["cat", "a very long name of a class"]
    figure = sheet_figure(images, torch.tensor([0] * 4 + [1] * 4 + [2]), names)
    assert [text.get_text() for text in figure.texts] == ["cat"] * 4 + ["a ...class"] * 4 + ["2"]
    assert_tidy(figure)
    assert contact_sheet(images, torch.zeros(9, dtype=torch.int64), names).startswith(b"\x89PNG")
