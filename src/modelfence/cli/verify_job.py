"""What ``modelfence verify`` does: writes queries, or tests a model or its answers."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelfence.cli.console import Console
from modelfence.cli.parts import load_test, note_undivided
from modelfence.cli.reference import image_option, load, load_before, named_domains, run_of
from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.models.load import LoadedModel
from modelfence.ownership.answers import Answers, ask
from modelfence.ownership.predictions import QUERIES, export_queries, read_predictions
from modelfence.ownership.verification import Verdict, judge
from modelfence.ownership.watermark import TOLERANCES, Watermark


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The options of the verb, under their own names; ``said`` has the names of those that were given."""

    model: str | None
    weights: str | None
    classes: int | None
    image_size: int | None
    clean: str | None
    watermark: str
    value: int | None
    channel: int
    pattern: str | None
    mark_size: int | None
    images: int
    reference: tuple[str, ...]
    match_labels: bool
    alpha: float
    tolerance: float | None
    export: str | None
    predictions: str | None
    labels: str | None
    force: bool
    said: Set[str]


def run_verify(claim: Claim, console: Console) -> int:
    """Write queries, or test a claim.

    Args:
        claim: What was asked for.
        console: Where the result goes.

    Returns:
        The exit code: 0 if queries were written or the claim holds, 1 if it doesn't hold.

    Raises:
        InputError: Options are missing or don't fit together, or something they name can't be used.
        NonFiniteError: The suspect gives no finite output at all.
    """
    _check(claim)
    if claim.export:
        mark = _mark(claim)
        key = _export(claim, mark, claim.export, console)
        asked = key.parent / QUERIES
        said = (
            f" --tolerance {mark.tolerance:g}" if mark.tolerance < max(TOLERANCES) else ""
        )  # an answer doesn't tell the mark
        text = (
            f"{asked}  hand this out: the answer is queries.csv with a class for each path\n{key}  keep this\n"
            f"then: modelfence verify --predictions ANSWERS.csv --labels {key}{said}"
        )
        console.result(text, {"queries": str(asked), "key": str(key), "tolerance": mark.tolerance})
        return 0
    verdict = _of_file(claim) if claim.predictions else _of_model(claim, console)
    console.result(verdict.sentence(), verdict.to_dict())
    return int(not verdict.holds)


def _check(claim: Claim) -> None:
    """Refuse options that are missing, or that would be passed over."""
    if claim.export and claim.predictions:
        raise InputError("verify: --export and --predictions are two steps; give one")
    if claim.predictions:
        _require_unused(claim, _OF_MODELS, "--predictions", "which has the answers already")
        return
    if claim.export:
        _require_unused(claim, _OF_TESTS, "--export", "which tests nothing")
    if claim.labels:
        raise InputError("verify: --labels goes with --predictions alone; a domain has its own labels")
    if claim.clean is None:
        raise InputError("verify: --clean is missing; name the authorized domain, such as mnist")
    if claim.model is None and not (claim.export and claim.image_size):
        needed = "--model or --image-size, which say how large images are" if claim.export else "--model SUSPECT"
        raise InputError(f"verify: {needed}: is missing")
    for flag, number in (("--images", claim.images), ("--mark-size", claim.mark_size)):
        if number is not None and number < 1:
            raise InputError(f"verify: {flag} is {number}; at least 1 is needed")


_OF_MODELS = (
    *("model", "weights", "classes", "image_size", "clean", "images", "reference"),
    *("watermark", "value", "channel", "pattern", "mark_size", "force"),
)
"""Options that say what is asked, and with which mark."""
_OF_TESTS = ("reference", "match_labels", "alpha", "tolerance")
"""Options that say how a claim is tested."""


def _require_unused(claim: Claim, names: Sequence[str], flag: str, reason: str) -> None:
    """Refuse options that were given and would be passed over.

    Args:
        claim: All options.
        names: Which ones.
        flag: Because of what.
        reason: Why they have no place there.
    """
    for name in names:
        if name in claim.said:
            raise InputError(f"verify: --{name.replace('_', '-')} doesn't go with {flag}, {reason}")


def _of_file(claim: Claim) -> Verdict:
    return _judged(claim, read_predictions(claim.predictions or "", claim.labels), (), None)


def _of_model(claim: Claim, console: Console) -> Verdict:
    mark = _mark(claim)
    suspect = _suspect(claim)
    others = [load_before(text, suspect) for text in claim.reference]
    domain = _domain(claim, suspect.image, console)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own, *rest = (
        ask(one.model.to(device), domain, mark, image=one.image, images=claim.images) for one in (suspect, *others)
    )
    return _judged(claim, own, rest, mark)


def _judged(claim: Claim, own: Answers, references: Sequence[Answers], mark: Watermark | None) -> Verdict:
    return judge(
        own,
        references=references,
        alpha=claim.alpha,
        tolerance=claim.tolerance,
        match_labels=claim.match_labels,
        watermark=mark,
    )


def _export(claim: Claim, mark: Watermark, folder: str, console: Console) -> Path:
    table = image_option(claim.image_size)
    spec = _suspect(claim).image if claim.model or table is None else ImageSpec(**table)
    return export_queries(_domain(claim, spec, console), mark, folder, images=claim.images, force=claim.force)


def _mark(claim: Claim) -> Watermark:
    return Watermark(claim.watermark, value=claim.value, channel=claim.channel, pattern=claim.pattern)


def _suspect(claim: Claim) -> LoadedModel:
    text = claim.model or ""
    run = run_of(text, weights=claim.weights, classes=claim.classes, image_size=claim.image_size)
    return load(run.model, run.image, text)


def _domain(claim: Claim, spec: ImageSpec, console: Console) -> IndexedDomain:
    """Load the clean test images at the size that they are marked at."""
    size = claim.mark_size
    spec = spec if size is None else replace(spec, height=size, width=size)
    domains = named_domains([claim.clean or ""]) or {}
    note_undivided(domains, console)
    ((name, text),) = domains.items()
    return load_test(name, text, spec)
