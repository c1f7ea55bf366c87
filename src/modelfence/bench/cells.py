"""Cells: one number-giving run each, kept as one file, so that a sweep can be killed, go on, and be shared."""

import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from modelfence.bench.budgets import Scale, budget
from modelfence.bench.methods import SOURCE_MODEL, config_of
from modelfence.errors import ModelfenceError
from modelfence.files import atomic_write, parse_json, sealed, unsealed
from modelfence.methods.config import LearnConfig
from modelfence.methods.registry import METHODS

Record = dict[str, Any]
Job = Literal["confine", "ownership", "features"]
Option = str | int | float | bool
FORMAT = 1

_OF_IMAGES = frozenset(
    {
        "seed",
        "precision",
        "generated",
        "translated",
        "restyled",
        "more_without_batch_norm",
        "generator_steps",
        "synthesis_batch",
        "most_images",
        "pseudo_threshold",
        "pseudo_augmentations",
    }
)
"""Settings of SF-MAP on which the images and labels depend that rivals are fed with; the others it learns by."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one run is told; two equal cells give the same numbers.

    Attributes:
        job: Which function runs it: see :mod:`modelfence.bench.jobs`.
        setting: "sa", "sf" or "df": what the method is given.
        method: Name of its configuration class, with ":recipe" where that isn't the default; "SL" is the source model.
        source: The authorized domain.
        targets: The unauthorized ones; one mask against all.
        network: Of the zoo or of timm.
        size: Height and width of the images in pixels.
        classes: Number of classes.
        seed: Of the method; source models are shared by all seeds.
        budget: Name of the budget.
        scale: How many images, test images and epochs it means.
        overrides: Configuration values that the budget sets.
        options: Configuration values that the table varies; they are part of the file's name.
    """

    job: Job
    setting: str
    method: str
    source: str
    targets: tuple[str, ...]
    network: str
    size: int
    classes: int
    seed: int
    budget: str
    scale: Scale
    overrides: tuple[tuple[str, Option], ...] = ()
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def name(self) -> str:
        """The file's name, below the folder of cells and without ending."""
        method = "-".join([self.method.replace(":", "-"), *(f"{key}={value}" for key, value in self.options)])
        run = "-".join([self.source, "+".join(self.targets), str(self.seed)])
        parts = (self.budget, f"{self.job}-{self.setting}", f"{self.network}-{self.size}", method, run)
        return "/".join(re.sub(r"[^\w.+=-]", "_", part) for part in parts)

    @property
    def configurations(self) -> dict[str, LearnConfig]:
        """The method's configuration; for a rival in the source-free setting also that of the images it is fed with."""
        if self.method == SOURCE_MODEL:
            return {}
        values = {**dict(self.overrides), **dict(self.options), "seed": self.seed}
        found = {"configuration": config_of(self.method, values)}
        if self.setting == "sf" and METHODS[type(found["configuration"])].labels:
            values = {**budget(self.budget).overrides_of("SFMap"), "seed": self.seed}
            found["images"] = config_of("SFMap", values)
        return found

    def to_dict(self) -> Record:
        """Return JSON values."""
        return dict(json.loads(json.dumps(asdict(self))))


class Cells:
    """The folder where cells are kept.

    Args:
        folder: The folder.
        announce: Told in one line when a file was damaged.
    """

    def __init__(self, folder: Path, announce: Callable[[str], None] = lambda _: None) -> None:
        self.folder, self.announce = folder, announce

    def path(self, cell: Cell) -> Path:
        """Return where a cell's result is or will be."""
        return self.folder / f"{cell.name}.json"

    def read(self, cell: Cell) -> Record | None:
        """Return a finished cell's result; None where it isn't finished, is damaged, or was made otherwise."""
        path = self.path(cell)
        found = read_record(path, self.announce)
        if found is None:
            return None
        wanted = _settings(cell)
        made = found.get("cell")
        if made != wanted:
            self.announce(f"{path}: made with other settings ({_differing(made, wanted)}); not used")
            return None
        return found

    def save(self, cell: Cell, result: Record) -> None:
        """Write a finished cell.

        Raises:
            ArtifactError: It can't be written.
        """
        write_record(self.path(cell), {"format": FORMAT, "cell": _settings(cell), **result})
        self._failure(cell).unlink(missing_ok=True)

    def fail(self, cell: Cell, error: BaseException) -> None:
        """Note why a cell failed, beside where its result would be.

        Raises:
            ArtifactError: It can't be written.
        """
        text = "".join(traceback.format_exception(error))
        own = isinstance(error, ModelfenceError)
        record = {"error": str(error) if own else f"{type(error).__name__}: {error}", "traceback": text}
        write_record(self._failure(cell), {**record, "time": time.time()})

    def failed_since(self, cell: Cell, moment: float) -> bool:
        """Say whether a cell failed after a moment (seconds since 1970): then it isn't tried again in that sweep."""
        found = read_record(self._failure(cell))
        return found is not None and found.get("time", 0.0) >= moment

    def error(self, cell: Cell) -> str | None:
        """Return why a cell failed the last time; None where it didn't."""
        found = read_record(self._failure(cell))
        return None if found is None else str(found.get("error", "failed"))

    def _failure(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.failed"


def _settings(cell: Cell) -> Record:
    """Return a cell with its method's defaults and its mark as they are now, which tells it from results of others."""
    values = {name: asdict(one) for name, one in cell.configurations.items()}
    if "images" in values:
        values["images"] = {name: value for name, value in values["images"].items() if name in _OF_IMAGES}
    if cell.job == "ownership":
        from modelfence.bench.ownership_job import mark_of  # which imports this module

        values["watermark"] = mark_of(cell).to_dict()
    return {**cell.to_dict(), **json.loads(json.dumps(values))}


def write_record(path: Path, record: Record) -> None:
    """Write a record with a digest of itself, by which damage is noticed.

    Args:
        path: Its file.
        record: JSON values without NaN.

    Raises:
        ArtifactError: It can't be written.
    """
    atomic_write(path, json.dumps(sealed(record), indent=1, allow_nan=False) + "\n")


def read_record(path: Path, announce: Callable[[str], None] = lambda _: None) -> Record | None:
    """Read a record; None where there is none, or where it is damaged, which is said.

    Args:
        path: Its file. One without a digest is taken as it is.
        announce: Told in one line.
    """
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError
        return unsealed(found)
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        announce(f"{path}: damaged; not used")
        return None


def _differing(made: object, wanted: Record) -> str:
    if not isinstance(made, dict):
        return "it doesn't say which"
    old, new = _flat(made), _flat(wanted)
    keys = [key for key in new if old.get(key) != new[key]]
    return ", ".join(f"{key} {old.get(key)!r:.60}, now {new[key]!r:.60}" for key in keys) or "more of them"


def _flat(settings: Record) -> Record:
    """Return settings whose values that are mappings are settings of their own, with a point in their names."""
    flat: Record = {}
    for key, value in settings.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat
