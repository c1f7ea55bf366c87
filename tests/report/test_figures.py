"""Figures: every number is drawn, no label covers another, nothing global changes."""

import itertools
import re
import sys

import matplotlib as mpl
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from modelfence.errors import ArtifactError
from modelfence.report import figures, style

NAMES = [f"domain_number_{index}_with_a_name" for index in range(12)]
LAYERS = [(f"features.{index}.weight", 990 - index, 1000) for index in range(40)]
HISTORY = [
    {"step": step, "loss": 2.0 - step / 100, "kept": 1 - step / 1e4, "source_accuracy": 0.98}
    | ({f"target_accuracy:{name}": 0.8 - step / 150 for name in NAMES[1:]} if step % 50 == 0 else {})
    for step in range(0, 101, 10)
]


def texts(figure):
    found = [text for axes in figure.axes for text in axes.texts]
    found += [
        label for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis) for label in drawn(axis)
    ]
    found += [axes.title for axes in figure.axes] + [axes._left_title for axes in figure.axes]
    found += [label for legend in figure.legends for label in legend.get_texts()] + list(figure.texts)
    return [text for text in found if text.get_text() and text.get_visible()]


def drawn(axis):
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def assert_tidy(figure):
    """No two texts overlap and none leaves the figure."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-0.5)) for text in texts(figure)]
    frame = figure.bbox.padded(2)
    for text, box in boxes:
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text
    for (one, first), (other, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), (one, other)


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("count", [2, 12])
def test_accuracies(make_evaluation, compared, refresh, count):
    figure = figures.accuracy_figure(make_evaluation(NAMES[:count], compared=compared, refresh=refresh))
    bars = figure.axes[0].patches
    assert len(bars) == count * (1 + compared + refresh)
    expected = {97.1, 11.2} | ({98.6, 78.4} if compared else set()) | ({98.4, 71.6} if refresh else set())
    assert {round(bar.get_width(), 1) for bar in bars} == expected
    assert {text.get_text() for text in figure.axes[0].texts} == {f"{value:.1f}" for value in expected}
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [pytest.approx(10)]
    assert_tidy(figure)


def test_layers():
    figure = figures.layer_figure(LAYERS)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([100 * (1000 - kept) / 1000 for _, kept, _ in LAYERS])
    assert figure.axes[0].texts[0].get_text() == "99.0 % of 1 k kept"
    assert_tidy(figure)


@pytest.mark.parametrize("layers", [[("w", 0, 10)], [("w", 10, 10)], [("w", 0, 0)], [("a" * 90, 1, 3_000_000)]])
def test_layers_at_the_ends_of_the_range(layers):
    assert_tidy(figures.layer_figure(layers))


def test_history_of_many_domains():
    figure = figures.history_figure(HISTORY)
    accuracy, loss, kept = figure.axes
    labels = [text.get_text() for text in accuracy.texts]
    assert len(labels) == 12
    assert labels[0] == "98.0 authorized"
    assert list(loss.lines[0].get_ydata()) == [record["loss"] for record in HISTORY]
    assert kept.lines[0].get_ydata()[-1] == pytest.approx(99)
    target = next(line for line in accuracy.lines if line.get_ydata()[0] == pytest.approx(80))
    assert list(target.get_xdata()) == [0, 50, 100]
    assert_tidy(figure)


@pytest.mark.parametrize(
    ("history", "panels"),
    [
        ([{"step": 0, "loss": 1.0}], 1),
        ([{"step": 0, "loss": None, "source_accuracy": 0.9}, {"step": 5, "loss": float("nan")}], 1),
        ([{"step": 0, "seconds": 1.0}], 1),
        ([{"step": 0, "loss": 1.0, "kept": 1.0, "source_accuracy": 0.5, "target_accuracy": 0.5}], 3),
        ([{"step": 0, "loss": 1.0, "source_agreement": 0.5, "target_agreement:usps": 0.5, "watch:usps": 0.3}], 3),
    ],
)
def test_history_with_holes(history, panels):
    figure = figures.history_figure(history)
    assert len(figure.axes) == panels
    assert_tidy(figure)


def test_samples_show_the_pixels_given():
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
    figure = figures.sample_figure({"rgb": images, "grey": images[:, :1], "empty": images[:0]})
    rgb, grey = (axes.images[0].get_array() for axes in figure.axes)
    assert (rgb[:, :4, :3] == images[0].permute(1, 2, 0).numpy()).all()
    assert (rgb[:, 5:9, :3] == images[1].permute(1, 2, 0).numpy()).all()
    assert (grey[:, :4, 1] == images[0, 0].numpy()).all()
    assert (rgb[:, 9:, 3] == 0).all()
    assert_tidy(figure)


def test_settings_stay_and_pyplot_is_never_loaded(make_evaluation, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = mpl.rcParams.copy()
    style.inline_svg(figures.accuracy_figure(make_evaluation()), "label")
    assert mpl.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_files_are_written_and_repeatable(make_evaluation, tmp_path):
    for folder in ("one", "two"):
        style.save_figure(figures.accuracy_figure(make_evaluation()), tmp_path / folder, "accuracy")
    files = [[path.read_bytes() for path in sorted((tmp_path / folder).iterdir())] for folder in ("one", "two")]
    assert files[0] == files[1]
    assert files[0][0].startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError):
        style.save_figure(figures.layer_figure(LAYERS), tmp_path / "file", "layers")


def test_inline_figures_carry_the_theme_and_unique_ids(make_evaluation):
    svg = style.inline_svg(figures.accuracy_figure(make_evaluation()), 'Bars: <b> & "quotes"')
    assert svg.startswith('<svg role="img" aria-label="Bars: &lt;b&gt; &amp; &quot;quotes&quot;"')
    assert "var(--unauthorized)" in svg
    assert not any(colour in svg for colour in style.THEME)
    assert "http" not in svg
    other = style.inline_svg(figures.accuracy_figure(make_evaluation()), "Other")
    assert not set(_ids(svg)) & set(_ids(other))
    assert len(_ids(svg)) == len(set(_ids(svg)))


def _ids(svg):
    return re.findall(r' id="([^"]+)"', svg)


def test_dollar_signs_in_names_are_no_formula(make_evaluation):
    figure = figures.accuracy_figure(make_evaluation(["price $5_$ off", "$x^2$"]))
    assert_tidy(figure)
    assert "$x^2$" in style.inline_svg(figure, "accuracies")
