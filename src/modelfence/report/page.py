"""The report of a run: one HTML file that needs nothing else, not even scripts."""

import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent, ratio
from modelfence.files import atomic_write
from modelfence.report import figures, proxies, style, wording
from modelfence.report.sheets import WHAT, Sheets, facts_text, sheet_figure
from modelfence.report.template import PAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(
    folder: Path,
    *,
    evaluation: Evaluation | None,
    layers: Sequence[tuple[str, int, int]] = (),
    history: Sequence[Mapping[str, Any]] = (),
    agreement: Mapping[str, float] | None = None,
    samples: Mapping[str, Tensor] | None = None,
    synthetic: Sheets | None = None,
    warnings: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    title: str,
    masked: bool = True,
) -> Path:
    """Write ``report.html`` and, in ``figures/``, every figure as PNG and SVG.

    Args:
        folder: Where to; made when missing.
        evaluation: The table; None where nothing labelled was at hand.
        layers: Name, kept weights and all weights of each masked layer.
        history: Records of the run, see :func:`modelfence.report.figures.history_figure`.
        agreement: How far the model agrees with the original, see :func:`modelfence.report.proxies.agreement_of`.
        samples: Domain name to uint8 images (N, C, H, W).
        synthetic: What was synthesized for learning.
        warnings: Sentences about what may make the result worse than it looks.
        config: The resolved configuration, nested mappings of plain values.
        title: Heading of the page, plain text.
        masked: Whether a mask confines the model; else it was retrained.

    Returns:
        The path of the page. Parts without data are left out of it.

    Raises:
        ArtifactError: The folder can't be written.
    """
    names = [score.name for score in evaluation.authorized] if evaluation is not None else []
    pairs = proxies.pairs_of(history, names)
    drawn = _figures(evaluation, layers, history, samples or {}, pairs)
    drawn |= {} if synthetic is None else _sheets(synthetic)
    for name, (figure, _, _) in drawn.items():
        style.save_figure(figure, folder / "figures", name)
    shown = {name: _figure_markup(*parts) for name, parts in drawn.items()}
    said = [*proxies.agreements(agreement or {}), *(f"Warning: {warning}." for warning in warnings)]
    sections = [_section("Summary", _summary(evaluation) + _list(said))]
    if evaluation is not None:
        sections.append(_section("Accuracy", shown["accuracy"] + _table(evaluation) + _notes(evaluation)))
    sections.append(_section("What this does not protect from", _list(wording.limits(evaluation, masked=masked))))
    if pairs:
        told = f"<p>{html.escape(proxies.sentence(pairs))}</p>"
        sections.append(_section("How well what needs no labels followed the truth", told + shown["proxies"]))
    if synthetic is not None and synthetic.samples:
        sheets = "".join(shown[name] for name in shown if name.startswith("synthetic-"))
        sections.append(_section("What was synthesized", sheets))
    titles = {"samples": "What the domains look like", "layers": "What the mask cuts", "history": "How it was learned"}
    sections += [_section(titles[name], shown[name]) for name in titles if name in shown]
    if config:
        sections.append(_section("Configuration", _configuration(config)))
    path = folder / "report.html"
    atomic_write(path, PAGE.substitute(title=html.escape(title), body="\n".join(sections)))
    return path


def _figures(
    evaluation: Evaluation | None,
    layers: Sequence[tuple[str, int, int]],
    history: Sequence[Mapping[str, Any]],
    samples: Mapping[str, Tensor],
    pairs: Sequence[proxies.Pair],
) -> dict[str, tuple["Figure", str, str]]:
    """Return file name to figure, text for screen readers, and caption."""
    drawn = {}
    if evaluation is not None:
        told = "; ".join(
            f"{score.name} ({score.role}) "
            + (f"{percent(score.before.accuracy)} before, " if score.before else "")
            + f"{percent(score.accuracy)} after"
            for score in evaluation.scores
        )
        drawn["accuracy"] = (
            figures.accuracy_figure(evaluation),
            f"Accuracy bars, in percent: {told}",
            "Accuracy on each domain. All numbers are in the table below.",
        )
    if pairs:
        told = "; ".join(f"{pair.domain} and {proxies.images_of(pair.proxy)}" for pair in pairs)
        caption = "Accuracy on watched domains and the agreement that stands for it where there are no labels."
        drawn["proxies"] = (proxies.proxy_figure(pairs), f"Curves of accuracy and agreement: {told}", caption)
    if layers:
        kept, total = sum(layer[1] for layer in layers), sum(layer[2] for layer in layers)
        told = f"{len(layers)} layers, {percent(kept / total)} percent of {total:,} weights kept"
        drawn["layers"] = (figures.layer_figure(layers), f"Layer bars: {told}", f"Weights cut: {told}.")
    if history:
        told = f"Curves of the run over {len(history)} records"
        drawn["history"] = (figures.history_figure(history), told, "Accuracies, loss and kept weights by step.")
    if samples:
        told = f"Sample images of {', '.join(samples)}"
        drawn["samples"] = (figures.sample_figure(samples), told, "The first images of each domain.")
    return drawn


def _sheets(synthetic: Sheets) -> dict[str, tuple["Figure", str, str]]:
    """Return file name to contact sheet, text for screen readers, and caption, for every part."""
    drawn = {}
    for part, (images, classes) in synthetic.samples.items():
        told = facts_text(synthetic.facts.get(part, {}))
        caption = f"{part}: {WHAT.get(part, 'synthetic images')}" + (f" ({told})" if told else "")
        text = f"{caption}. Below each of {len(images)} of them: what the original model says it is."
        figure = sheet_figure(images, classes, synthetic.names)
        drawn[f"synthetic-{part}"] = (figure, f"Synthetic images {part}", text)
    return drawn


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{body}\n</section>"


def _figure_markup(figure: "Figure", label: str, caption: str) -> str:
    drawing = style.inline_svg(figure, label)
    return f'<figure><div class="wide">{drawing}</div><figcaption>{html.escape(caption)}</figcaption></figure>'


def _summary(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "<p>No labelled domain was at hand, so there are no accuracies: watch one to have them.</p>"
    if not any(score.before for score in evaluation.scores):
        return "<p>There is no model before masking to compare with: the table holds accuracies alone.</p>"
    tiles = [
        (
            "authorized accuracy lost",
            f"{percent(evaluation.relative_source_drop)} %",
            "of what it was; lower is better",
        ),
        ("unauthorized accuracy lost", f"{percent(evaluation.relative_target_drop)} %", "of what it was"),
        ("ST-D", ratio(evaluation.st_d), "ratio of the two; lower is better"),
        ("closure", f"{percent(evaluation.closure)} %", "of the unauthorized accuracy above chance taken away"),
    ]
    if evaluation.refresh_images is not None:
        remaining = f"{percent(evaluation.closure_refreshed)} %"
        tiles.append(("closure after refresh", remaining, "once BatchNorm statistics are re-estimated"))
    cells = [f"<div><dt>{name}</dt><dd><b>{value}</b> {note}</dd></div>" for name, value, note in tiles]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _notes(evaluation: Evaluation) -> str:
    notes = [f"{name}: {sentence}." for name, sentence in wording.footnotes(evaluation)]
    return f"<h3>To be said beside the numbers</h3>\n{_list(notes)}" if notes else ""


def _table(evaluation: Evaluation) -> str:
    columns = [column for column in wording.columns(evaluation) if column.title not in ("domain", "role")]
    groups = [(group, list(members)) for group, members in itertools.groupby(columns, key=lambda column: column.group)]
    top, low = ['<th scope="col" rowspan="2">domain</th>'], []
    for group, members in groups:
        if group:
            top.append(f'<th scope="colgroup" colspan="{len(members)}" class="group">{group}</th>')
            low += [f'<th scope="col">{column.title}</th>' for column in members]
        else:
            top += [f'<th scope="col" rowspan="2">{column.title}</th>' for column in members]
    rows = [
        f'<tr class="{score.role}"><th scope="row">{_breakable(score.name)}<small>{score.role}</small></th>'
        + "".join(f"<td>{html.escape(column.values[index])}</td>" for column in columns)
        + "</tr>"
        for index, score in enumerate(evaluation.scores)
    ]
    caption = f"Percent; {evaluation.classes} classes, chance {percent(evaluation.chance)}. A dash is undefined."
    return (
        '<div class="wide" role="region" aria-label="Accuracy table" tabindex="0"><table>'
        f"<caption>{caption}</caption><thead><tr>{''.join(top)}</tr><tr>{''.join(low)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _configuration(config: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{html.escape(key)}</th><td>{html.escape(value)}</td></tr>'
        for key, value in wording.flat(config)
    ]
    return (
        '<div class="wide" role="region" aria-label="Configuration" tabindex="0"><table class="config">'
        '<thead><tr><th scope="col">key</th><th scope="col">value</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _breakable(name: str) -> str:
    return html.escape(name).replace("_", "_<wbr>")


def _list(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"
