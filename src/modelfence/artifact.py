"""The output folder of a run: the checkpoint to ship, the owner's record, and what was measured."""

import csv
import io
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_tensors
from safetensors.torch import save as safetensors_bytes
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError
from modelfence.evaluation.result import Evaluation
from modelfence.files import atomic_write, parse_json, sealed, unsealed, usable_path, versions
from modelfence.masking.mask import Mask
from modelfence.methods.config import LearnConfig
from modelfence.methods.registry import settings_of
from modelfence.methods.samples import Sample, Synthetic
from modelfence.models.load import WEIGHTS_FILE, LoadedModel, save_model
from modelfence.models.weights import apart
from modelfence.report.card import model_card
from modelfence.report.sheets import contact_sheet
from modelfence.results import CARD, HISTORY, MASK, REPORT, SHEETS, SYNTHETIC, replacing

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """Everything that goes into an output folder; :func:`write_artifact` writes it.

    Attributes:
        model: The confined network.
        mask: The mask folded into it; None where the network was retrained instead.
        masks: Where each unauthorized domain got its own: those masks by name.
        history: One row per measurement during learning.
        config: The method's configuration.
        origin: How the original network is built and what it eats, where that is known.
        image: What the network eats, where nothing else of its origin is known; with ``classes`` it is recorded.
        classes: The network's number of classes.
        evaluation: What was measured; None leaves out the table and the model card.
        synthetic: Images that were synthesized for learning; a few of them are kept.
        warnings: Sentences about what may make the result worse than it looks.
        facts: Further JSON values for ``report.json``, such as seconds.
    """

    model: nn.Module
    mask: Mask | None
    masks: Mapping[str, Mask] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    config: LearnConfig
    origin: LoadedModel | None = None
    image: ImageSpec | None = None
    classes: int | None = None
    evaluation: Evaluation | None = None
    synthetic: Synthetic = field(default_factory=Synthetic)
    warnings: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_artifact(folder: Path, artifact: Artifact) -> dict[str, Any]:
    """Write an output folder. ``report.json`` comes last: where it is, the folder is complete.

    Args:
        folder: Where to; made when missing; an earlier result in it stays until this one is complete.
        artifact: What goes into it.

    Returns:
        The content of ``report.json``, without the digest of it that the file has too.

    Raises:
        InputError: A file in the folder that would be replaced isn't ours.
        ArtifactError: The folder can't be written.
    """
    with replacing(folder) as staged:
        return _write(staged, artifact)


def _write(folder: Path, artifact: Artifact) -> dict[str, Any]:
    method = type(artifact.config).__name__
    _write_model(folder, artifact, method)
    if artifact.mask is not None:
        artifact.mask.save(folder / MASK)
    for number, mask in enumerate(artifact.masks.values()):
        mask.save(folder / MASK / str(number))
    atomic_write(folder / HISTORY, history_text(artifact.history))
    if artifact.evaluation is not None:
        names = ", ".join(score.name for score in artifact.evaluation.authorized)
        card = model_card(
            artifact.evaluation,
            {"method": method, **settings_of(artifact.config)},
            title=f"Model for {names}" if names else "A confined model",
            masked=artifact.mask is not None,
        )
        atomic_write(folder / CARD, card)
    _write_synthetic(folder, artifact)
    report = {
        "format": FORMAT,
        "method": method,
        "evaluation": None if artifact.evaluation is None else artifact.evaluation.to_dict(),
        **({} if artifact.mask is None else {"mask": _mask_facts(artifact.mask)}),
        **_synthetic_facts(artifact),
        "warnings": list(artifact.warnings),
        **artifact.facts,
        "machine": machine(),
    }
    atomic_write(folder / REPORT, json.dumps(sealed(report), indent=1, allow_nan=False) + "\n")
    return report


def _mask_facts(mask: Mask) -> dict[str, Any]:
    return {
        "cut_share": mask.cut_share(),
        "base_digest": mask.base_digest,
        "folded_digest": mask.folded_digest,
        "layers": [[name, int(kept.sum()), kept.numel()] for name, kept in mask.kept.items()],
    }


def _synthetic_facts(artifact: Artifact) -> dict[str, Any]:
    made = artifact.synthetic
    if not made.samples:
        return {}
    facts: dict[str, Any] = {"parts": {part: dict(facts) for part, facts in made.facts.items()}}
    names = _class_names(artifact)
    return {"synthetic": {**facts, **({"class_names": names} if names else {})}}


def _class_names(artifact: Artifact) -> list[str] | None:
    return None if artifact.origin is None else artifact.origin.extra.get("class_names") or None


def _write_synthetic(folder: Path, artifact: Artifact) -> None:
    """Write some of the synthetic images, and a contact sheet of each part."""
    samples = artifact.synthetic.samples
    if not samples:
        return
    names = _class_names(artifact)
    tensors = {f"{part}.images": one.images.contiguous() for part, one in samples.items()}
    tensors |= {f"{part}.classes": one.classes.contiguous() for part, one in samples.items()}
    atomic_write(folder / SYNTHETIC, safetensors_bytes(tensors, metadata={"format": "pt"}))
    for part, one in samples.items():
        atomic_write(folder / SHEETS / f"{part}.png", contact_sheet(one.images, one.classes, names))


def read_synthetic(folder: Path) -> dict[str, Sample]:
    """Read the synthetic images of an output folder, by part; empty where there are none.

    Raises:
        ArtifactError: They are altered.
    """
    path = folder / SYNTHETIC
    if not path.is_file():
        return {}
    try:
        tensors = safetensors_tensors(path.read_bytes())
        parts = [name.removesuffix(".images") for name in tensors if name.endswith(".images")]
        found = {part: Sample(tensors[f"{part}.images"], tensors[f"{part}.classes"]) for part in parts}
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(f"{path}: truncated or altered; run it again") from error
    for one in found.values():
        whole = one.images.dtype == torch.uint8 and one.classes.dtype == torch.int64
        if not whole or one.images.ndim != 4 or one.classes.shape != one.images.shape[:1]:
            raise ArtifactError(f"{path}: truncated or altered; run it again")
    return found


def _write_model(folder: Path, artifact: Artifact, method: str) -> None:
    origin, confined = artifact.origin, {"confined_by": method}
    if origin is None and artifact.image is not None and artifact.classes is not None:
        image, classes = artifact.image, artifact.classes
        save_model(folder, artifact.model, reference=None, classes=classes, image=image, extra=confined)
        return
    if origin is None:
        weights = safetensors_bytes(apart(artifact.model.state_dict()), metadata={"format": "pt"})
        atomic_write(folder / WEIGHTS_FILE, weights)
        return
    save_model(
        folder,
        artifact.model,
        reference=origin.reference,
        args=origin.args,
        classes=origin.classes,
        image=origin.image,
        extra={**confined, **({"class_names": names} if (names := origin.extra.get("class_names")) else {})},
    )


def read_report(folder: Path) -> dict[str, Any]:
    """Read the ``report.json`` of an output folder; one without warnings has none.

    Raises:
        ArtifactError: It is missing or altered, or the folder holds something else.
    """
    path = usable_path(folder / REPORT)
    try:
        report = parse_json(path.read_text(encoding="utf-8"))
        report = unsealed(report) if isinstance(report, dict) else report
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror}); name the folder of a finished run") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: truncated or altered ({error}); run it again") from error
    form = report.get("format") if isinstance(report, dict) else None
    if not isinstance(form, int) or isinstance(form, bool) or form < 1:
        raise ArtifactError(f"{path}: format: must be a whole number (got {form!r:.40}); run it again")
    if form > FORMAT:
        raise ArtifactError(f"{path}: format {form} is newer than this modelfence reads ({FORMAT}); upgrade it")
    if report.get("evaluation") is not None:
        Evaluation.from_dict(report["evaluation"], where=f"{path}: evaluation")
    if "mask" in report and not _are_layers(report["mask"]):
        raise ArtifactError(f"{path}: mask.layers: must be a list of name, kept and total; run it again")
    if "synthetic" in report and not _is_synthetic(report["synthetic"]):
        raise ArtifactError(f"{path}: synthetic: must have parts with numbers; run it again")
    if not _are_texts(report.get("warnings", [])):
        raise ArtifactError(f"{path}: warnings: must be a list of texts; run it again")
    if not _are_numbers(report.get("agreement", {})):
        raise ArtifactError(f"{path}: agreement: must be numbers by name; run it again")
    return {"warnings": [], **report}


def _is_synthetic(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("parts"), dict):
        return False
    return _are_texts(record.get("class_names", [])) and all(map(_are_numbers, record["parts"].values()))


def _are_texts(record: object) -> bool:
    return isinstance(record, list) and all(isinstance(text, str) for text in record)


def _are_numbers(record: object) -> bool:
    return isinstance(record, dict) and all(type(value) is float for value in record.values())


def _are_layers(mask: object) -> bool:
    layers = mask.get("layers") if isinstance(mask, dict) else None
    return isinstance(layers, list) and all(
        isinstance(row, list) and [type(value) for value in row] == [str, int, int] and 0 <= row[1] <= row[2]
        for row in layers
    )


def history_text(history: Sequence[Mapping[str, float]]) -> str:
    r"""Write rows as CSV, one column for each name that occurs; a row without it has an empty field.

    Example:
        >>> print(history_text([{"step": 1, "loss": 0.5}, {"step": 2, "kept": 1.0}]).replace("\r", ""), end="")
        step,loss,kept
        1,0.5,
        2,,1.0
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in history for name in row)))
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def read_history(folder: Path) -> list[dict[str, float]]:
    """Read the ``history.csv`` of an output folder.

    Raises:
        ArtifactError: It is missing or altered.
    """
    path = folder / HISTORY
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        history = [{name: float(value) for name, value in row.items() if value} for row in rows]
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read ({error.strerror}); name the folder of a finished run") from error
    except (ValueError, TypeError, csv.Error) as error:
        raise ArtifactError(f"{path}: truncated or altered ({error}); run it again") from error
    if not all("step" in row for row in history):
        raise ArtifactError(f"{path}: truncated or altered (a row has no step); run it again")
    return history


def machine() -> dict[str, Any]:
    """Say what a run was computed on: device, threads, versions."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions(),
    }


def peak_memory_mib() -> float | None:
    """Return the most memory this process has used so far in MiB: on the GPU if there is one; None if unknown."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
