"""What a cell runs: learn, measure, and give back JSON values."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from modelfence.bench.budgets import budget
from modelfence.bench.cells import Cell, Record
from modelfence.bench.domains import Parts, image_spec, parts_of
from modelfence.bench.machine import machine
from modelfence.bench.methods import SOURCE_MODEL, config_of, known
from modelfence.bench.ownership_job import claim, mark_of
from modelfence.bench.pseudo_source import stand_ins
from modelfence.bench.source_models import SourceModel, source_model
from modelfence.bench.tsne import points_of
from modelfence.data.domain import Domain
from modelfence.errors import ArtifactError, InputError
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.table import evaluate
from modelfence.methods.config import LearnConfig
from modelfence.methods.registry import METHODS
from modelfence.methods.sfmap import SFMap
from modelfence.models.autocast import resolve_precision
from modelfence.protect import Protection, protect

Announce = Callable[[str], None]


class Worker:
    """Runs cells in a work folder: ``sl/`` has the source models, ``synthetic/`` images, ``state/`` unfinished runs.

    Args:
        work: The folder.
        announce: Told in one line what is being done.
    """

    def __init__(self, work: Path, announce: Announce = lambda _: None) -> None:
        self.work, self.announce = work, announce
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def __call__(self, cell: Cell) -> Record:
        """Run a cell.

        Raises:
            Busy: Another process is training its source model.
            InputError: A domain can't be had, or a method can't work with it.
            NonFiniteError: A loss became NaN or infinite.
            Interrupted: It was stopped; the state was saved.
        """
        start = time.time()
        model = self._source_model(cell, 0)
        parts = {name: parts_of(name, cell.size, cell.scale) for name in (cell.source, *cell.targets)}
        references = [] if cell.job != "ownership" else self._references(cell)
        learned = None if cell.method == SOURCE_MODEL else self._learn(cell, model, parts)
        result = self._measured(cell, model, parts, learned, references)
        seconds = round(time.time() - start, 1)
        return {**result, "seconds": seconds, "machine": machine(), "line": f"{result['line']} | {seconds:.0f} s"}

    def _source_model(self, cell: Cell, seed: int) -> nn.Module:
        wanted = SourceModel(cell.network, cell.source, cell.size, cell.classes, seed, cell.scale)
        return source_model(self.work, wanted, announce=self.announce).to(self.device)

    def _references(self, cell: Cell) -> list[nn.Module]:
        count = int(dict(cell.overrides)["references"])
        return [self._source_model(cell, seed) for seed in range(1, 1 + count)]

    def _learn(self, cell: Cell, model: nn.Module, parts: dict[str, Parts]) -> Protection:
        """Learn, going on from the state that a killed process left."""
        config = config_of(cell.method, {**dict(cell.overrides), **dict(cell.options), "seed": cell.seed})
        state = self.work / "state" / cell.name
        given = self._given(cell, model, parts, config)
        followed = "evaluate_every" in dict(cell.options)  # only convergence needs it
        watch = {name: part.validation for name, part in parts.items()} if followed else None
        rest: dict[str, Any] = {"cache": self.work / "synthetic", "announce": self._warn(cell), "watch": watch}
        file = state / "state.safetensors"
        try:
            learned = protect(
                model,
                image=image_spec(cell.size),
                method=config,
                output=state,
                resume=file.exists(),
                **given,
                **rest,
            )
        except (InputError, ArtifactError):
            file.unlink(missing_ok=True)  # of another version, or damaged: the next attempt starts anew
            raise
        _remove(state, self.work / "state")
        return learned

    def _warn(self, cell: Cell) -> Announce:
        """Pass on warnings alone: many cells run at once."""
        return lambda text: self.announce(f"{cell.name}: {text}") if text.startswith("warning") else None

    def _given(self, cell: Cell, model: nn.Module, parts: dict[str, Parts], config: LearnConfig) -> dict[str, Any]:
        """Return what the setting gives to the method."""
        source = parts[cell.source].train
        if cell.job == "ownership":
            return {"authorized": source, "ownership": mark_of(cell)}
        targets: dict[str, Domain] = {name: parts[name].train for name in cell.targets}
        if cell.setting == "sa":
            return {"authorized": source, "unauthorized": targets}
        if cell.setting == "df":
            return {}
        if METHODS[type(config)].labels:
            pool = cast("SFMap", config_of("SFMap", {**_pool(cell), "seed": cell.seed}))
            made = stand_ins(model, targets, image_spec(cell.size), pool, cache=self.work / "synthetic")
            return {"authorized": made.authorized, "unauthorized": made.unauthorized}
        return {"unauthorized": targets}

    def _measured(
        self,
        cell: Cell,
        model: nn.Module,
        parts: dict[str, Parts],
        learned: Protection | None,
        references: list[nn.Module],
    ) -> Record:
        confined = model if learned is None else learned.model
        facts = _facts(learned)
        image = image_spec(cell.size)
        precision = resolve_precision("auto", self.device)
        if cell.job == "ownership":
            return {**facts, **claim(cell, confined, parts[cell.source].test, references)}
        if cell.job == "features":
            tests = {name: part.test for name, part in parts.items()}
            points = points_of(confined, tests, seed=cell.seed)
            return {**facts, "points": points, "line": "points"}
        table = evaluate(
            confined,
            {name: part.test for name, part in parts.items()},
            before=None if learned is None else model,
            image=image,
            refresh_on={name: part.train for name, part in parts.items()},
            precision=precision,
        )
        return {**facts, "evaluation": table.to_dict(), "line": line(table)}


def line(table: Evaluation) -> str:
    """Say in one line how the accuracies changed.

    Args:
        table: Of one cell.
    """
    shown = []
    for score in table.scores:
        before = "" if score.before is None else f"{100 * score.before.accuracy:.1f} => "
        shown.append(f"{score.name} {before}{100 * score.accuracy:.1f}")
    return " | ".join(shown)


def _facts(learned: Protection | None) -> Record:
    if learned is None:
        return {}
    history = [{key: _plain(value) for key, value in row.items()} for row in learned.history]
    return {
        "cut_share": None if learned.mask is None else learned.mask.cut_share(),
        "history": history,
        "configuration": asdict(learned.config),
    }


def _plain(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _pool(cell: Cell) -> dict[str, Any]:
    """Return the budget's values for the images that all methods of the source-free table share."""
    overrides = budget(cell.budget).overrides_of("SFMap")
    fields = known()["SFMap"].__dataclass_fields__  # type: ignore[attr-defined]
    return {key: value for key, value in overrides.items() if key in fields}


def _remove(folder: Path, root: Path) -> None:
    """Take away the state of a run that is finished, and folders that are empty then."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for one in (folder, *folder.parents):
        if one == root or not one.is_dir() or any(one.iterdir()):
            return
        one.rmdir()
