"""What a cell runs: learn, measure, and give back JSON values."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from modelfence.bench.cells import Cell, Record
from modelfence.bench.domains import Parts, image_spec, parts_of
from modelfence.bench.machine import machine
from modelfence.bench.methods import SOURCE_MODEL
from modelfence.bench.ownership_job import claim, mark_of
from modelfence.bench.pseudo_source import stand_ins
from modelfence.bench.source_models import SourceModel, source_model
from modelfence.bench.tsne import points_of
from modelfence.data.domain import Domain
from modelfence.errors import InputError
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.table import evaluate
from modelfence.methods.loop import WARNING
from modelfence.methods.sfmap import SFMap
from modelfence.methods.state import load_state
from modelfence.models.autocast import resolve_precision
from modelfence.monitor import Watch
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
        model = self._source_model(cell, 0)
        references = [] if cell.job != "ownership" else self._references(cell)
        start = time.time()
        parts = {name: parts_of(name, cell.size, cell.scale) for name in (cell.source, *cell.targets)}
        watched = _watched(cell, parts)
        learned, earlier = (None, 0.0) if cell.method == SOURCE_MODEL else self._learn(cell, model, parts, watched)
        result = self._measured(cell, model, parts, learned, references)
        if watched is not None:
            result["watched_before"] = Watch.of(model, watched)(model)
        seconds = round(time.time() - start + earlier, 1)
        return {**result, "seconds": seconds, "machine": machine(), "line": f"{result['line']} | {seconds:.0f} s"}

    def _source_model(self, cell: Cell, seed: int) -> nn.Module:
        wanted = SourceModel(cell.network, cell.source, cell.size, cell.classes, seed, cell.scale)
        return source_model(self.work, wanted, announce=self.announce).to(self.device)

    def _references(self, cell: Cell) -> list[nn.Module]:
        count = int(dict(cell.overrides)["references"])
        return [self._source_model(cell, seed) for seed in range(1, 1 + count)]

    def _learn(
        self, cell: Cell, model: nn.Module, parts: dict[str, Parts], watch: dict[str, Domain] | None
    ) -> tuple[Protection, float]:
        """Learn, going on from the state that a killed process left; return with it that one's seconds of learning."""
        config = cell.configurations["configuration"]
        state = self._state(cell)
        given = self._given(cell, model, parts)
        rest: dict[str, Any] = {"cache": self.work / "synthetic", "announce": self._warn(cell), "watch": watch}
        file = state / "state.safetensors"

        def learn(*, resume: bool) -> Protection:
            image = image_spec(cell.size)
            return protect(model, image=image, method=config, output=state, resume=resume, **given, **rest)

        if not file.exists():
            return learn(resume=False), 0.0
        try:
            earlier = float(load_state(file)[1]["spent"])
            return learn(resume=True), earlier
        except InputError as error:
            if isinstance(error.__cause__, OSError):  # a full disk, say: what is saved is good
                raise
            self.announce(f"{cell.name}: its saved state can't be used ({error}); learned anew")
        file.unlink(missing_ok=True)
        return learn(resume=False), 0.0

    def _warn(self, cell: Cell) -> Announce:
        """Pass on warnings alone: many cells run at once."""
        return lambda text: self.announce(f"{cell.name}: {text}") if text.startswith(WARNING) else None

    def finished(self, cell: Cell) -> None:
        """Take away the saved state of a cell whose result is kept now, and folders that are empty then."""
        root, state = self.work / "state", self._state(cell)
        for path in sorted(state.rglob("*"), reverse=True):
            _remove(path)
        for one in (state, *state.parents):
            if one == root or not _remove(one):
                return

    def _state(self, cell: Cell) -> Path:
        return self.work / "state" / cell.name

    def _given(self, cell: Cell, model: nn.Module, parts: dict[str, Parts]) -> dict[str, Any]:
        """Return what the setting gives to the method."""
        source = parts[cell.source].train
        if cell.job == "ownership":
            return {"authorized": source, "ownership": mark_of(cell)}
        targets: dict[str, Domain] = {name: parts[name].train for name in cell.targets}
        if cell.setting == "sa":
            return {"authorized": source, "unauthorized": targets}
        if cell.setting == "df":
            return {}
        if "images" in cell.configurations:
            pool = cast("SFMap", cell.configurations["images"])
            made = stand_ins(
                model,
                targets,
                image_spec(cell.size),
                pool,
                cache=self.work / "synthetic",
                announce=self._warn(cell),
            )
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


def _watched(cell: Cell, parts: dict[str, Parts]) -> dict[str, Domain] | None:
    """Return the domains that are measured along the way: only convergence needs it."""
    followed = "evaluate_every" in dict(cell.options)
    return {name: part.validation for name, part in parts.items()} if followed else None


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


def _remove(path: Path) -> bool:
    """Take away a file, or a folder if it is empty; False where it stays, as other processes may be using it."""
    try:
        path.rmdir() if path.is_dir() else path.unlink()
    except OSError:
        return False
    return True
