"""Three small digit domains made from what installed packages carry: no download, for demos and first tries.

``sklearn_digits`` are scanned handwritten digits, ``photo_digits`` are other handwritten digits blended into
photographs, ``font_digits`` are printed ones. All are 32 x 32 and made the same way each time.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modelfence.data.splits import permutation
from modelfence.errors import InputError

SIDE = 32
_SEED = 1797
_PLAIN = 1077  # of scikit-learn's 1,797 digits for sklearn_digits; photo_digits has the others
_TEST_SHARE = 0.25
_CROPS = 2  # photographs behind each digit of photo_digits
_PHOTO_STRENGTH = 0.6
_FONT_IMAGES = 1200
_FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10"),
)

Pixels = npt.NDArray[np.uint8]


class Arrays:
    """Images in an array.

    Args:
        name: The domain, for errors.
        pixels: uint8 (N, H, W, C).
    """

    def __init__(self, name: str, pixels: Pixels) -> None:
        self._name = name
        self._pixels = pixels

    def read_many(self, indices: Sequence[int]) -> Sequence[object]:
        """Return the images."""
        return list(self._pixels[list(indices)])

    def where(self, index: int) -> str:
        """Say which image it is."""
        return f"domain {self._name!r}: image {index}"


def build(name: str, split: str) -> tuple[Pixels, Tensor]:
    """Make one split of a built-in domain.

    Args:
        name: ``sklearn_digits``, ``photo_digits`` or ``font_digits``.
        split: ``train`` or ``test``; no digit image, and no photograph crop, is behind images of both.

    Returns:
        Images uint8 (N, 32, 32, C), C being 3 for ``photo_digits`` and 1 for the others, and labels int64 (N,).

    Raises:
        InputError: There is no such domain or split.

    Example:
        >>> pixels, labels = build("sklearn_digits", "test")
        >>> pixels.shape[1:], len(pixels) == len(labels)
        ((32, 32, 1), True)
    """
    if name not in _BUILDERS or split not in ("train", "test"):
        raise InputError(f"no built-in domain {name!r} with split {split!r}; there are {', '.join(_BUILDERS)}")
    pixels, labels, tests = _BUILDERS[name]()
    first, last = (0, tests) if split == "test" else (tests, len(pixels))
    return pixels[first:last], labels[first:last]


def _handwritten(first: int, last: int) -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Return some of scikit-learn's digits in a fixed random order, enlarged to (N, 32, 32), white on black."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = permutation(len(digits.target), _SEED)[first:last].numpy()
    grey = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in grey]
    return np.stack(large), digits.target[chosen].astype(np.int64)


@cache
def _sklearn_digits() -> tuple[Pixels, Tensor, int]:
    pixels, labels = _handwritten(0, _PLAIN)
    return pixels[..., None], torch.from_numpy(labels), round(len(pixels) * _TEST_SHARE)


@cache
def _photo_digits() -> tuple[Pixels, Tensor, int]:
    """Blend digits into photographs by absolute difference, as MNIST-M does (Ganin and Lempitsky, 2015)."""
    from sklearn.datasets import load_sample_images

    digits, labels = _handwritten(_PLAIN, 1797)
    tests = round(len(digits) * _TEST_SHARE)
    photos = [np.asarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(_SEED)
    images = [
        _blended(digit, photos, rng, left=number < tests) for number, digit in enumerate(digits) for _ in range(_CROPS)
    ]
    return np.stack(images), torch.from_numpy(labels.repeat(_CROPS)), tests * _CROPS


def _blended(digit: Pixels, photos: list[Pixels], rng: np.random.Generator, *, left: bool) -> Pixels:
    """Put one digit on a random crop: of the left quarter of a photograph for tests, else of the rest."""
    photo = photos[rng.integers(len(photos))]
    border = photo.shape[1] // 4
    lowest, highest = (0, border - SIDE) if left else (border, photo.shape[1] - SIDE)
    y, x = rng.integers(photo.shape[0] - SIDE + 1), rng.integers(lowest, highest + 1)
    crop = photo[y : y + SIDE, x : x + SIDE].astype(np.float32) * _PHOTO_STRENGTH
    blended: Pixels = np.abs(crop - digit[..., None].astype(np.float32)).round().astype(np.uint8)
    return blended


@cache
def _font_digits() -> tuple[Pixels, Tensor, int]:
    """Print digits in the fonts that come with matplotlib, at several sizes, angles and places."""
    import matplotlib as mpl

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    rng = np.random.default_rng(_SEED)
    fonts = itertools.cycle(folder / f"{font}.ttf" for font in _FONTS)
    labels = np.arange(_FONT_IMAGES) % 10
    # one font for each ten digits, so that every font prints every digit
    images = [
        _printed(int(digit), font, rng)
        for font, tens in zip(fonts, labels.reshape(-1, 10), strict=False)
        for digit in tens
    ]
    order = permutation(_FONT_IMAGES, _SEED)
    pixels = np.stack(images)[order.numpy(), ..., None]
    return pixels, torch.from_numpy(labels)[order], round(_FONT_IMAGES * _TEST_SHARE)


def _printed(digit: int, font: Path, rng: np.random.Generator) -> Pixels:
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    face = ImageFont.truetype(str(font), int(rng.integers(32, 40)), layout_engine=ImageFont.Layout.BASIC)
    angle, shift_x, shift_y = rng.uniform(-8, 8), *rng.uniform(-2, 2, size=2)
    image = Image.new("L", (SIDE, SIDE))
    left, top, right, bottom = face.getbbox(str(digit))
    corner = (SIDE - left - right) / 2 + shift_x, (SIDE - top - bottom) / 2 + shift_y
    ImageDraw.Draw(image).text(corner, str(digit), fill=255, font=face)
    image = image.rotate(angle, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1.5))
    pixels: Pixels = np.asarray(image)
    return pixels


_BUILDERS: dict[str, Callable[[], tuple[Pixels, Tensor, int]]] = {
    "sklearn_digits": _sklearn_digits,
    "photo_digits": _photo_digits,
    "font_digits": _font_digits,
}
