"""Figures of a protection run: pure functions from numbers to a matplotlib ``Figure``."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.scores import DomainScore
from modelfence.evaluation.text import shorten
from modelfence.report import style
from modelfence.report.labels import beside, shorten_path, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW = 0.17  # inches per bar
_MOST_SAMPLES = 8


@style.styled()
def accuracy_figure(evaluation: Evaluation) -> "Figure":
    """Draw the accuracy on every domain before and after, and after a BatchNorm refresh where there is one.

    Args:
        evaluation: The table; any number of domains.

    Returns:
        Horizontal bars, grouped by domain, each with its value; chance is a dashed line.
    """
    scores = list(evaluation.scores)
    series = _series(scores)
    pitch = len(series) + 0.9
    figure, axes = _canvas(0.75 + _ROW * pitch * len(scores))
    for row, score in enumerate(scores):
        for place, (kind, value) in enumerate(_values(score, series)):
            if value is None:
                continue
            height = row * pitch + place
            axes.barh(height, 100 * value, height=0.86, color=_bar_colour(kind, score), linewidth=0)
            place_x = beside(100 * value + 0.8, avoid=100 * evaluation.chance, width=6.0)
            axes.text(place_x, height, f"{100 * value:.1f}", va="center", fontsize=7.5)
    centre = (len(series) - 1) / 2
    axes.set_yticks([row * pitch + centre for row in range(len(scores))], [shorten(score.name) for score in scores])
    axes.set_ylim(len(scores) * pitch - 0.9, -0.7)
    axes.set_xlim(0, 107)
    axes.set_xticks(range(0, 101, 20))
    axes.axvline(100 * evaluation.chance, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlabel(f"accuracy (percent); dashed line: chance, {100 * evaluation.chance:.1f}")
    _accuracy_legend(figure, scores, series)
    return figure


def _series(scores: list[DomainScore]) -> list[str]:
    series = ["before"] if any(score.before for score in scores) else []
    series.append("after")
    return series + (["refreshed"] if any(score.refreshed_accuracy is not None for score in scores) else [])


def _values(score: DomainScore, series: list[str]) -> list[tuple[str, float | None]]:
    known = {
        "before": score.before.accuracy if score.before else None,
        "after": score.accuracy,
        "refreshed": score.refreshed_accuracy,
    }
    return [(kind, known[kind]) for kind in series]


def _bar_colour(kind: str, score: DomainScore) -> str:
    if kind == "after":
        return style.AUTHORIZED if score.role == "authorized" else style.UNAUTHORIZED
    return style.BEFORE if kind == "before" else style.REFRESHED


def _accuracy_legend(figure: "Figure", scores: list[DomainScore], series: list[str]) -> None:
    from matplotlib.patches import Patch

    after = "after" if "before" in series else "accuracy"
    entries = [(style.BEFORE, "before")] if "before" in series else []
    roles = {score.role for score in scores}
    entries += [(style.AUTHORIZED, f"{after}, authorized")] if "authorized" in roles else []
    entries += [(style.UNAUTHORIZED, f"{after}, unauthorized")] if "unauthorized" in roles else []
    entries += [(style.REFRESHED, "after BatchNorm refresh")] if "refreshed" in series else []
    handles = [Patch(color=colour, label=label) for colour, label in entries]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(2, len(handles)), handlelength=1.0)


@style.styled()
def layer_figure(layers: Sequence[tuple[str, int, int]]) -> "Figure":
    """Draw how much of every layer the mask cuts, with the share that is kept written beside the bar.

    Args:
        layers: Name, kept weights and all weights of each masked layer, in the network's order.

    Returns:
        One horizontal bar per layer.
    """
    cut = [100 * (total - kept) / total if total else 0.0 for _, kept, total in layers]
    figure, axes = _canvas(0.55 + 1.25 * _ROW * max(1, len(layers)))
    places = range(len(layers))
    axes.barh(places, cut, height=0.72, color=style.AUTHORIZED, linewidth=0)
    limit = max([*cut, 0.1]) * 1.45
    for place, share, (_, _, total) in zip(places, cut, layers, strict=True):
        kept = f"{100 - share:.2f}" if share < 1 else f"{100 - share:.1f}"
        axes.text(share + limit / 100, place, f"{kept} % of {_count(total)} kept", va="center", fontsize=7.5)
    axes.set_yticks(list(places), [shorten_path(name.removesuffix(".weight")) for name, _, _ in layers], fontsize=8)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set_xlim(0, min(limit, 145))
    axes.set_xlabel("weights cut (percent of the layer)")
    return figure


def _count(number: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


@style.styled()
def history_figure(history: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw accuracies, loss and the kept share over the steps of a run.

    Args:
        history: Records with ``step`` and any of ``source_accuracy``, ``target_accuracy``,
            ``target_accuracy:<name>``, ``watch:<name>``, ``source_agreement`` and ``target_agreement:<name>``
            (fractions), ``loss`` and ``kept`` (a fraction). A record may lack some.

    Returns:
        One panel for each kind of number that is there, over a common step axis; lines carry their names.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    panels: list[tuple[str, dict[str, tuple[list[float], list[float]]], float]] = []
    for title, starts in _SHARES.items():
        curves = _curves(history, lambda key, starts=starts: key.startswith(starts), scale=100)
        if curves:
            panels.append((title, curves, max(2.2, 0.18 * len(curves) + 0.5)))
    panels += [
        (title, found, 1.1)
        for key, title, scale in (("loss", "loss", 1), ("kept", "weights kept (percent)", 100))
        if (found := _curves(history, key.__eq__, scale=scale))
    ]
    steps = sorted({step for _, found, _ in panels for known, _ in found.values() for step in known})
    heights = [height for _, _, height in panels] or [1.0]
    figure = Figure(figsize=(style.WIDTH, sum(heights) + 0.45 + 0.25 * len(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, found, height) in zip(grid, panels, strict=False):
        _draw_curves(axes, title, found, height)
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True) if len(steps) > 1 else FixedLocator(steps))
    grid[-1].set_xlabel("step")
    return figure


_SHARES = {
    "accuracy (percent)": ("source_accuracy", "target_accuracy", "watch:"),
    "agreement with the original model (percent)": ("source_agreement", "target_agreement:"),
}


def _curves(
    history: Sequence[Mapping[str, Any]], wanted: Any, scale: float
) -> dict[str, tuple[list[float], list[float]]]:
    keys = dict.fromkeys(key for record in history for key in record if wanted(key))
    curves = {}
    for key in keys:
        known = [(record["step"], record[key]) for record in history if _is_number(record.get(key))]
        if known:
            curves[key] = ([float(step) for step, _ in known], [scale * float(value) for _, value in known])
    return curves


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw_curves(
    axes: "Axes", title: str, curves: Mapping[str, tuple[list[float], list[float]]], height: float
) -> None:
    axes.set_title(title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    shares = title in _SHARES
    if shares:
        axes.set_ylim(0, 101)
    if len(curves) == 1 and not shares:
        ((steps, values),) = curves.values()
        axes.plot(steps, values, color=style.MUTED, linewidth=1.4, marker=_marker(steps))
        return
    ends = spread([values[-1] for _, values in curves.values()], gap=100 * 0.16 / height, low=2, high=99)
    targets = [key for key in curves if not key.startswith("source_")]
    for (key, (steps, values)), end in zip(curves.items(), ends, strict=True):
        colour, dashes, width = _line_look(targets.index(key) if key in targets else None)
        axes.plot(steps, values, color=colour, linestyle=dashes, linewidth=width, marker=_marker(steps))
        beside_axes = axes.get_yaxis_transform()
        axes.plot([1.005, 1.035], [values[-1], end], color=colour, linewidth=1, transform=beside_axes, clip_on=False)
        label = f"{values[-1]:.1f} {shorten(_curve_name(key), 20)}"
        axes.text(1.045, end, label, va="center", fontsize=8, transform=beside_axes)
    axes.set_xlim(right=max(steps[-1] for steps, _ in curves.values()))


_TARGET_COLOURS = (style.UNAUTHORIZED, "#7c5cbf", "#2f6fb3", style.REFRESHED, "#b0387a", "#5b7f2b")
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def _marker(steps: list[float]) -> str | None:
    """Return the mark of a curve: none, or a dot where a single value makes no line."""
    return "." if len(steps) == 1 else None


def _line_look(target: int | None) -> tuple[str, Any, float]:
    """Return colour, dashes and width of the line of the authorized domain (None) or of a target by number."""
    if target is None:
        return style.AUTHORIZED, "-", 2.0
    return _TARGET_COLOURS[target % len(_TARGET_COLOURS)], _DASHES[target // len(_TARGET_COLOURS) % len(_DASHES)], 1.4


def _curve_name(key: str) -> str:
    kind, _, name = key.partition(":")
    known = {"source_accuracy": "authorized", "target_accuracy": "unauthorized", "source_agreement": "near the source"}
    return f"{name}, watched" if kind == "watch" else name or known.get(key, key)


@style.styled()
def sample_figure(samples: Mapping[str, Tensor]) -> "Figure":
    """Lay out sample images, one row per domain.

    Args:
        samples: Domain name to uint8 images (N, C, H, W); the first 8 are shown. One channel is grey, three
            are RGB; of any other number the first is shown in grey.

    Returns:
        The contact sheet.
    """
    from matplotlib.figure import Figure

    rows = {name: images for name, images in samples.items() if len(images)}
    width, label = style.WIDTH, 1.45
    tile = (width - label) / _MOST_SAMPLES
    ratio = max((images.shape[2] / images.shape[3] for images in rows.values()), default=1.0)
    figure = Figure(figsize=(width, max(1, len(rows)) * (tile * ratio + 0.06)))
    left, share = label / width, 1 / max(1, len(rows))
    for row, (name, images) in enumerate(rows.items()):
        axes = figure.add_axes((left, 1 - (row + 0.97) * share, 1 - left, 0.94 * share))
        axes.imshow(strip(images[:_MOST_SAMPLES]).numpy(), interpolation="nearest", aspect="auto")
        axes.set_axis_off()
        middle = 1 - (row + 0.5) * share
        figure.text(left - 0.015, middle, shorten(name, 20), ha="right", va="center", color=style.INK)
    return figure


def strip(images: Tensor) -> Tensor:
    """Return images side by side.

    Args:
        images: uint8 (N, C, H, W), at most 8.

    Returns:
        uint8 (H, 8 W and gaps, 4), transparent where there is none.
    """
    images = images.cpu()
    count, channels, height, width = images.shape
    colour = images if channels == 3 else images[:, :1].expand(-1, 3, -1, -1)
    gap = max(1, width // 16)
    strip = torch.zeros(height, _MOST_SAMPLES * (width + gap) - gap, 4, dtype=torch.uint8)
    for place in range(count):
        left = place * (width + gap)
        strip[:, left : left + width, :3] = colour[place].permute(1, 2, 0)
        strip[:, left : left + width, 3] = 255
    return strip


def _canvas(height: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)
    return figure, axes
