"""Tiny images and specs for the tests of the data layer."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from modelfence.data.image_spec import ImageSpec


@pytest.fixture
def grey_spec() -> ImageSpec:
    return ImageSpec(channels=1, height=2, width=2, mean=(0.0,), std=(1 / 255,))


@pytest.fixture
def rgb_spec() -> ImageSpec:
    return ImageSpec(channels=3, height=4, width=4, mean=(0.0,) * 3, std=(1 / 255,) * 3)


@pytest.fixture
def png() -> Callable[[int], bytes]:
    """Make a 4 x 4 RGB PNG filled with one value."""

    def make(value: int, mode: str = "RGB") -> bytes:
        buffer = io.BytesIO()
        shape = (4, 4, 3) if mode == "RGB" else (4, 4)
        Image.fromarray(np.full(shape, value, dtype=np.uint8)).save(buffer, format="PNG")
        return buffer.getvalue()

    return make


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see real data only through the fixture ``data_root``."""
    monkeypatch.delenv("MODELFENCE_DATA", raising=False)
