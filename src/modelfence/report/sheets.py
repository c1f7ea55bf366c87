"""Contact sheets: synthetic images, each with the class that the model gives it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from modelfence.evaluation.text import percent, shorten
from modelfence.report import style
from modelfence.report.figures import strip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW = 8  # images side by side
_LABEL = 0.16  # inches

WHAT: Mapping[str, str] = {
    "generated": "generated from noise until the model was sure of them",
    "translated": "translated from unauthorized images, or drawings, into what the model takes for its source's style",
    "restyled": "unauthorized images in random styles, to be kept",
    "neighbours": "images in random styles that stand in for unauthorized ones, to be unlearned",
}
"""What the parts are, by name."""


class Sheets(NamedTuple):
    """What there is to show of synthetic images.

    Attributes:
        samples: Images, uint8 (N, C, H, W), and the class that the model gives each, int64 (N,), by part.
        facts: Numbers about all images of a part, by part.
        names: The model's class names in label order, where they are known.
    """

    samples: Mapping[str, tuple[Tensor, Tensor]]
    facts: Mapping[str, Mapping[str, float]]
    names: Sequence[str] | None = None


@style.styled()
def sheet_figure(images: Tensor, classes: Tensor, names: Sequence[str] | None = None) -> "Figure":
    """Lay out images in rows of eight, each with the class that the model gives it below.

    Args:
        images: uint8 (N, C, H, W), at least one; channels as for :func:`modelfence.report.figures.sample_figure`.
        classes: What the model says of each, int64 (N,).
        names: Class names in label order; None writes numbers.
    """
    from matplotlib.figure import Figure

    rows = list(zip(torch.split(images, _ROW), torch.split(classes, _ROW), strict=True))
    tile = style.WIDTH / _ROW
    height = tile * images.shape[2] / images.shape[3] + _LABEL
    figure = Figure(figsize=(style.WIDTH, height * len(rows)))
    for number, (some, given) in enumerate(rows):
        top = 1 - number / len(rows)
        share = (height - _LABEL) / height / len(rows)
        axes = figure.add_axes((0, top - share, 1, share))
        axes.imshow(strip(some).numpy(), interpolation="nearest", aspect="auto")
        axes.set_axis_off()
        for place, label in enumerate(given.tolist()):
            text = shorten(names[label], 10) if names and label < len(names) else str(label)
            middle = top - share - _LABEL / 2 / height / len(rows)
            figure.text((place + 0.47) / _ROW, middle, text, ha="center", va="center", fontsize=7, color=style.INK)
    return figure


def contact_sheet(images: Tensor, classes: Tensor, names: Sequence[str] | None = None) -> bytes:
    """Return :func:`sheet_figure` as the content of a PNG file; the arguments are the same."""
    return style.png(sheet_figure(images, classes, names))


def facts_text(facts: Mapping[str, float]) -> str:
    """Say in words what is known of all images of a part.

    Example:
        >>> facts_text({"images": 1024.0, "classes": 9.0, "of_classes": 10.0, "confidence": 0.914})
        '1,024 images, 9 of 10 classes, mean confidence 91.4 %'
    """
    said = [f"{facts['images']:,.0f} images"] if "images" in facts else []
    if {"classes", "of_classes"} <= facts.keys():
        said.append(f"{facts['classes']:.0f} of {facts['of_classes']:.0f} classes")
    if "confidence" in facts:
        said.append(f"mean confidence {percent(facts['confidence'])} %")
    return ", ".join(said)
