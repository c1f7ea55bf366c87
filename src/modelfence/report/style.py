"""Colours and type of every figure, and how figures are written."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from modelfence.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#1b1f24"
MUTED = "#66707b"
GRID = "#dde1e6"
BEFORE = "#a9b3be"
AUTHORIZED = "#0b7a75"
UNAUTHORIZED = "#c2410c"
REFRESHED = "#e8a33d"

THEME = {INK: "ink", MUTED: "muted", GRID: "grid", BEFORE: "before", AUTHORIZED: "authorized"} | {
    UNAUTHORIZED: "unauthorized",
    REFRESHED: "refreshed",
}
"""Which CSS variable stands for which colour where a page sets its own theme."""

WIDTH = 5.8
"""Width of every figure in inches: one column, so that a phone shows it at readable size."""

_SETTINGS = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.color": INK,
    "text.parse_math": False,  # names of domains and classes may have two dollar signs
    "axes.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "modelfence",
}

_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Hold matplotlib's settings to ours inside a ``with`` block; they are restored afterwards."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def save_figure(figure: "Figure", folder: Path, name: str) -> None:
    """Write a figure as ``name.png`` (160 dots per inch) and ``name.svg``.

    Args:
        figure: What a function of :mod:`modelfence.report.figures` returned.
        folder: Where to; made when missing.
        name: File name without ending.

    Raises:
        ArtifactError: The folder can't be written.
    """
    atomic_write(folder / f"{name}.png", png(figure))
    save_svg(figure, folder / f"{name}.svg")


def save_svg(figure: "Figure", path: Path) -> None:
    """Write a figure as one SVG file.

    Args:
        figure: As for :func:`save_figure`.
        path: Where to.

    Raises:
        ArtifactError: It can't be written.
    """
    atomic_write(path, _svg(figure, facecolor="white"))


def png(figure: "Figure") -> bytes:
    """Return a figure as the content of a PNG file, 160 dots per inch."""
    image = io.BytesIO()
    with styled():
        figure.savefig(image, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return image.getvalue()


def inline_svg(figure: "Figure", label: str) -> str:
    """Return a figure as an ``<svg>`` element that can stand in a page beside others.

    Colours become CSS variables (see :data:`THEME`) so that the page's light or dark theme holds inside the
    figure; element ids carry the label's slug so that figures don't collide; nothing refers to another
    address.

    Args:
        figure: What a function of :mod:`modelfence.report.figures` returned.
        label: What a screen reader says.

    Returns:
        Markup, the label escaped.
    """
    import html

    text = _svg(figure, facecolor="none")
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", text)
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text))
    slug = re.sub(r"\W+", "-", label.lower())[:24].strip("-")
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{slug}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{slug}-", text)
    for colour, variable in THEME.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


def _svg(figure: "Figure", facecolor: str) -> str:
    drawn = io.StringIO()
    with styled():
        figure.savefig(drawn, format="svg", facecolor=facecolor, metadata=_NO_METADATA)
    return drawn.getvalue()
