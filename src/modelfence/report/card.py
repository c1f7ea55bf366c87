"""The model card: README.md with YAML front matter, for a folder or a model hub."""

import json
from collections.abc import Mapping
from typing import Any

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.text import percent, ratio
from modelfence.report import wording


def model_card(evaluation: Evaluation, config: Mapping[str, Any], *, title: str, masked: bool = True) -> str:
    """Write the card of a protected model.

    Args:
        evaluation: What was measured.
        config: The resolved configuration, nested mappings of plain values.
        title: Name of the model.
        masked: Whether a mask confines it; else it was retrained.

    Returns:
        Markdown that starts with a YAML front matter: library, tags, authorized and unauthorized domains,
        metrics and one ``model-index`` result per domain. Accuracies in the front matter are fractions.
    """
    return "\n".join(
        [
            "---",
            *_front_matter(evaluation, title),
            "---",
            "",
            f"# {_plain(title)}",
            "",
            f"An image classifier confined by modelfence to its authorized domains: {_HOW[masked]}.",
            "",
            "## Measured",
            "",
            *_table(evaluation),
            "",
            *_row_values(evaluation),
            *[f"- {_plain(name)}: {sentence}." for name, sentence in wording.footnotes(evaluation)],
            "",
            "## Limits",
            "",
            *[f"- {sentence}" for sentence in wording.limits(evaluation, masked=masked)],
            "",
            "## Configuration",
            "",
            "| key | value |",
            "|---|---|",
            *[f"| {_plain(key)} | {_plain(value)} |" for key, value in wording.flat(config)],
            "",
        ]
    )


_HOW = {
    True: "a binary mask was learned over its weights and folded into them",
    False: "all its weights were retrained",
}


def _front_matter(evaluation: Evaluation, title: str) -> list[str]:
    """Return YAML lines; every value is JSON, which YAML includes, so no text can break out."""
    results = [
        {
            "task": {"type": "image-classification"},
            "dataset": {"name": score.name, "type": score.name},
            "metrics": [
                {"type": "accuracy", "value": round(score.accuracy, 4), "name": f"accuracy ({score.role})"},
                {"type": "balanced_accuracy", "value": round(score.balanced_accuracy, 4)},
            ],
        }
        for score in evaluation.scores
    ]
    entries: dict[str, Any] = {
        "library_name": "modelfence",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "non-transferable-learning", "modelfence"],
        "authorized_domains": [score.name for score in evaluation.authorized],
        "unauthorized_domains": [score.name for score in evaluation.unauthorized],
        "metrics": ["accuracy"],
        "model-index": [{"name": title, "results": results}],
    }
    return [f"{key}: {json.dumps(value)}" for key, value in entries.items()]


def _table(evaluation: Evaluation) -> list[str]:
    columns = wording.columns(evaluation)
    header = [f"{column.group} {column.title}".strip() for column in columns]
    rows = zip(*([_plain(value) for value in column.values] for column in columns), strict=True)
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _row_values(evaluation: Evaluation) -> list[str]:
    lines = [f"Percent; chance is {percent(evaluation.chance)}."]
    if any(score.before for score in evaluation.scores):
        lines[0] += (
            f" ST-D {ratio(evaluation.st_d)}, from a relative drop of {percent(evaluation.relative_source_drop)} % "
            f"on authorized and {percent(evaluation.relative_target_drop)} % on unauthorized domains."
        )
    lines.append(
        "Images of another size than the model's were resized by Pillow, bilinear, to its height and width; with "
        "another filter the accuracies are others."
    )
    return [*lines, ""]


def _plain(text: str) -> str:
    """Escape what Markdown or a table would take for markup, and keep it on one line."""
    for sign in "\\`*_[]<>|#":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
