"""Which images the rows of a run with a watermark or a key are measured on."""

import pytest
import torch

from modelfence.cli.marks import with_marks
from modelfence.cli.runfile import Run
from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.ownership.watermark import Watermark

SPEC = ImageSpec(channels=1, height=2, width=2, mean=(0.0,), std=(1 / 255,))
PIXELS = torch.full((4, 1, 2, 2), 100, dtype=torch.uint8)
KEY, MARK = Watermark("visda", value=30), Watermark("digits", value=5)
PLAIN, KEYED = [100, 100, 100, 100], [130, 100, 100, 100]


@pytest.mark.parametrize(
    ("run", "roles", "expected"),
    [
        (Run(), ["a"], {"a": PLAIN, "b": PLAIN}),
        (Run(watermark=MARK), ["a"], {"a": PLAIN, "b": PLAIN, "watermark": [105, 105, 105, 100]}),
        (Run(key=KEY), ["a+key"], {"a+key": KEYED, "a": PLAIN, "b": PLAIN, "b+key": KEYED}),
        (
            Run(key=KEY, watermark=MARK),
            ["a+key"],
            {"a+key": KEYED, "a": PLAIN, "b": PLAIN, "b+key": KEYED, "watermark": [135, 105, 105, 100]},
        ),
    ],
    ids=["no mark", "watermark", "key", "both"],
)
def test_each_row_has_the_pixels_that_its_name_says(run: Run, roles: list[str], expected: dict[str, list[int]]) -> None:
    tests = {name: IndexedDomain(name, PIXELS.__getitem__, 4, spec=SPEC) for name in ("a", "b")}
    shown, authorized = with_marks(run, tests, ["a"], SPEC)
    assert authorized == roles
    found = {name: next(iter(one.once(1))).images.flatten().round().int().tolist() for name, one in shown.items()}
    assert list(found) == list(expected)
    assert found == expected
