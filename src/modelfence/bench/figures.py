"""Figures of the benchmark: accuracy matrix, bars, convergence curves, t-SNE panels."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelfence.bench import paper
from modelfence.evaluation.text import shorten
from modelfence.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Accuracies = Mapping[str, tuple[float, float]]
Curve = tuple[str, bool, Sequence[tuple[float, float]]]
"""Name of a domain, whether it is the source, and pairs of step and accuracy."""


@style.styled()
def matrix_figure(methods: Mapping[str, Mapping[str, Accuracies]], domains: Sequence[str]) -> "Figure":
    """Draw accuracy on every domain for every source: one panel before, and one after for each method.

    Args:
        methods: By method and source: fractions before and after by domain; some may be missing.
        domains: In the order of the columns.
    """
    import numpy as np

    panels: dict[str, Any] = {}
    for method, sources in methods.items():
        for title, place in (("before", 0), (paper.title(method), 1)):
            rows = np.array(
                [
                    [100 * found[name][place] if name in found else math.nan for name in domains]
                    for found in sources.values()
                ]
            )
            known = panels.get(title, rows)  # "before" is the same whatever the method; some may lack a run
            panels[title] = np.where(np.isnan(known), rows, known)
    sources_shown = list(next(iter(methods.values()), {}))
    axes_of = _grid(len(panels), height=1.9, columns=2)
    for axes, (title, values) in zip(axes_of, panels.items(), strict=False):
        axes.imshow(np.ma.masked_invalid(values), vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for row, column in np.argwhere(~np.isnan(values)):
            shown = values[row, column]
            axes.text(
                column, row, f"{shown:.1f}", ha="center", va="center", fontsize=8, color="w" if shown < 60 else "k"
            )
        axes.set_xticks(range(len(domains)), [paper.short(name) for name in domains])
        axes.set_yticks(range(len(values)), [paper.short(name) for name in sources_shown])
        axes.set_title(f"{title}: source (rows), tested on (columns)", fontsize=8)
        axes.tick_params(length=0)
    return axes_of[0].figure  # type: ignore[return-value]  # not a sub-figure


@style.styled()
def bars_figure(bars: Sequence[tuple[str, float, float]]) -> "Figure":
    """Draw source and target accuracy as bars and their difference as a line, as in the paper.

    Args:
        bars: Label, source accuracy, target accuracy (fractions).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 0.9 + 0.42 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for row, (_, source, target) in enumerate(bars):
        axes.barh(row - 0.2, 100 * source, height=0.38, color=style.AUTHORIZED, label="source" if row == 0 else None)
        axes.barh(row + 0.2, 100 * target, height=0.38, color=style.UNAUTHORIZED, label="target" if row == 0 else None)
        for shift, value in ((-0.2, source), (0.2, target)):
            axes.text(100 * value + 0.8, row + shift, f"{100 * value:.1f}", va="center", fontsize=7.5)
    gaps = [100 * (source - target) for _, source, target in bars]
    axes.plot(gaps, range(len(bars)), color=style.INK, marker="o", markersize=3, linewidth=1, label="source - target")
    axes.set_yticks(range(len(bars)), [shorten(label, 34) for label, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(min(0, *gaps, 0), 108)
    axes.set_xlabel("accuracy (percent), difference (points)")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@style.styled()
def curves_figure(methods: Mapping[str, Sequence[Curve]]) -> "Figure":
    """Draw accuracy over steps, one panel a method.

    Args:
        methods: By method: its curves, accuracies as fractions.
    """
    axes_of = _grid(len(methods), height=1.9, columns=min(3, max(1, len(methods))))
    for axes, (title, curves) in zip(axes_of, methods.items(), strict=False):
        for name, source, points in curves:
            steps, values = [step for step, _ in points], [100 * value for _, value in points]
            colour = style.AUTHORIZED if source else style.UNAUTHORIZED
            axes.plot(steps, values, color=colour, label=name, marker="." if len(steps) < 3 else None)
        axes.set_ylim(0, 101)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend(loc="best", fontsize=7.5)
    return axes_of[0].figure  # type: ignore[return-value]  # not a sub-figure


@style.styled()
def panels_figure(methods: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> "Figure":
    """Draw t-SNE panels: the first domain, the source, in one colour, the others in another.

    Args:
        methods: By method and domain: "x" and "y".
    """
    axes_of = _grid(len(methods), height=2.2, columns=2)
    colours = (style.AUTHORIZED, style.UNAUTHORIZED)
    for axes, (title, domains) in zip(axes_of, methods.items(), strict=False):
        for place, (name, points) in enumerate(domains.items()):
            axes.scatter(points["x"], points["y"], s=3, linewidths=0, color=colours[min(place, 1)], label=name)
        axes.set_title(title)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="best", fontsize=7, markerscale=2)
    return axes_of[0].figure  # type: ignore[return-value]  # not a sub-figure


def _grid(count: int, *, height: float, columns: int) -> "list[Axes]":
    """Return the axes of a grid of panels; those that aren't needed are hidden."""
    from matplotlib.figure import Figure

    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(style.WIDTH, height * rows), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in found[max(1, count) :]:
        axes.set_visible(False)
    return found
