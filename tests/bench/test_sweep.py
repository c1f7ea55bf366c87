import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fakes import cell, result

from modelfence import SAMap
from modelfence.bench import cells as cells_module
from modelfence.bench import ownership_job
from modelfence.bench import sweep as sweep_module
from modelfence.bench.cells import Cell, Cells
from modelfence.bench.claims import claimed
from modelfence.bench.source_models import Busy
from modelfence.bench.sweep import share, sweep
from modelfence.errors import ArtifactError, InputError, Interrupted
from modelfence.ownership.watermark import Watermark

FIVE = [cell(seed=seed) for seed in range(5)]


class Maker:
    """Makes results, and notes for which cells it was asked."""

    def __init__(self, **wrong: Exception) -> None:
        self.asked: list[int] = []
        self.wrong = {int(seed[1:]): error for seed, error in wrong.items()}

    def __call__(self, wanted: Cell) -> dict[str, Any]:
        self.asked.append(wanted.seed)
        if wanted.seed in self.wrong:
            raise self.wrong[wanted.seed]
        return {"value": wanted.seed, "line": f"value {wanted.seed}"}


@pytest.fixture
def store(tmp_path: Path) -> Cells:
    return Cells(tmp_path / "cells", lines.append)


lines: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    lines.clear()


def test_finished_cells_aren_t_run_again(store: Cells) -> None:
    make = Maker()
    first = sweep(FIVE[:3], store, make)
    second = sweep(FIVE, store, make)
    assert make.asked == [0, 1, 2, 3, 4]
    assert (first.made, second.found, second.made) == (FIVE[:3], FIVE[:3], FIVE[3:])
    assert store.read(FIVE[4])["value"] == 4


def test_a_killed_sweep_goes_on(store: Cells) -> None:
    with pytest.raises(Interrupted, match=r"-2; finished cells are kept"):
        sweep(FIVE, store, Maker(s2=KeyboardInterrupt()))
    assert [store.read(one) is not None for one in FIVE] == [True, True, False, False, False]
    again = Maker()
    sweep(FIVE, store, again)
    assert again.asked == [2, 3, 4]
    assert not list(store.folder.rglob("*.claim-*"))


@pytest.mark.parametrize(
    "damage", [lambda text: text[:40], lambda text: text.replace('"value": 1', '"value": 7'), lambda _: "[]"]
)
def test_a_corrupted_cell_is_recomputed_and_said_so(store: Cells, damage: Any) -> None:
    sweep(FIVE[:3], store, Maker())
    path = store.path(FIVE[1])
    path.write_text(damage(path.read_text()))
    again = Maker()
    sweep(FIVE[:3], store, again)
    assert again.asked == [1]
    assert f"{path}: damaged; not used" in lines
    assert store.read(FIVE[1])["value"] == 1


def test_a_cell_of_other_settings_is_recomputed_and_said_so(store: Cells) -> None:
    sweep(FIVE[:1], store, Maker())
    changed = cell(overrides=(("batch_size", 8),))
    again = Maker()
    sweep([changed], store, again)
    assert again.asked == [0]
    said = "made with other settings (overrides [], now [['batch_size', 8]], configuration.batch_size 32, now 8)"
    assert any(said in line for line in lines)


def test_an_ownership_cell_of_another_mark_is_recomputed_and_said_so(
    store: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = cell(job="ownership"), cell()
    sweep([one, other], store, Maker())
    again = Maker()
    sweep([one, other], store, again)
    assert again.asked == []
    monkeypatch.setattr(ownership_job, "mark_of", lambda _: Watermark("digits", value=80))
    sweep([one, other], store, again)
    assert again.asked == [0]
    assert any("made with other settings (watermark.value 20, now 80)" in line for line in lines)
    assert "watermark" not in store.read(other)["cell"]


@pytest.mark.parametrize(
    ("changed", "asked"),
    [({"source_weight": 3.0, "learning_rate": 1.0}, []), ({"generated": 7}, [0]), ({"seed": 9}, [0])],
)
def test_of_the_images_rivals_are_fed_with_only_what_makes_them_counts(
    store: Cells, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], asked: list[int]
) -> None:
    rival = cell(method="NTL", setting="sf")
    sweep([rival], store, Maker())
    config_of = cells_module.config_of
    monkeypatch.setattr(
        cells_module,
        "config_of",
        lambda name, values: config_of(name, {**values, **(changed if name == "SFMap" else {})}),
    )
    again = Maker()
    sweep([rival], store, again)
    assert again.asked == asked


def test_a_failing_cell_is_noted_and_the_others_go_on(store: Cells) -> None:
    outcome = sweep(FIVE, store, Maker(s1=ValueError("odd\nthing")), announce=lines.append)
    assert (outcome.failed, len(outcome.made)) == ([FIVE[1]], 4)
    assert store.error(FIVE[1]) == "ValueError: odd\nthing"
    assert "ValueError" in json.loads(store.path(FIVE[1]).with_suffix(".failed").read_text())["traceback"]
    assert any(line.startswith("failed: cpu/confine-sa/vgg11-32/SAMap/mnist-usps-1") for line in lines)
    again = Maker()
    assert sweep(FIVE, store, again).made == [FIVE[1]]
    assert store.error(FIVE[1]) is None


def test_a_result_that_is_not_finite_fails_its_cell_alone(store: Cells) -> None:
    maker = Maker()

    def make(wanted: Cell) -> dict[str, Any]:
        return {**maker(wanted), "value": math.nan if wanted.seed == 1 else 1.0}

    outcome = sweep(FIVE, store, make)
    assert (outcome.failed, len(outcome.made)) == ([FIVE[1]], 4)
    assert "not JSON compliant" in (store.error(FIVE[1]) or "")


def test_a_cell_that_failed_in_another_process_of_the_sweep_isn_t_tried_again(store: Cells) -> None:
    began = time.time()
    sweep(FIVE[:2], store, Maker(s1=InputError("no")), began=began)
    again = Maker()
    assert sweep(FIVE[:2], store, again, began=began).failed == [FIVE[1]]
    assert again.asked == []


def test_no_space_for_a_result_stops_the_sweep(store: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(FIVE[:1], store, Maker())

    def full(path: Path, _: object) -> None:
        raise ArtifactError(f"{path}: can't be written (No space left on device)")

    monkeypatch.setattr(cells_module, "atomic_write", full)
    make = Maker()
    with pytest.raises(ArtifactError, match="No space left"):
        sweep(FIVE, store, make)
    assert make.asked == [1]
    monkeypatch.undo()
    assert store.read(FIVE[0])["value"] == 0
    assert not list(store.folder.rglob("*.claim-*"))
    assert len(sweep(FIVE, store, Maker()).made) == 4


def test_no_space_while_a_cell_runs_stops_the_sweep(store: Cells) -> None:
    try:
        raise ArtifactError("state: can't be written") from OSError(errno.ENOSPC, "No space left on device")
    except ArtifactError as error:
        full = error
    with pytest.raises(ArtifactError, match=r"state: can't be written; free some space"):
        sweep(FIVE, store, Maker(s2=full))
    assert store.error(FIVE[2]) is None


def test_a_cell_claimed_elsewhere_is_left_to_it(store: Cells) -> None:
    make = Maker()
    with claimed(store.path(FIVE[1])) as mine:
        assert mine
        outcome = sweep(FIVE[:3], store, make)
    assert (outcome.elsewhere, make.asked) == ([FIVE[1]], [0, 2])


def test_what_another_process_makes_for_all_is_waited_for(store: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "PAUSE", 0)
    times = iter([True, True, True, False])
    asked = []

    def make(wanted: Cell) -> dict[str, Any]:
        asked.append(wanted.seed)
        if wanted.seed == 0 and next(times):
            raise Busy
        return {}

    assert sweep(FIVE[:2], store, make).made == [FIVE[1], FIVE[0]]
    assert asked == [0, 1, 0, 0, 0]


def test_shards_partition_the_cells() -> None:
    parts = [share(FIVE, f"{index}/3") for index in (1, 2, 3)]
    assert sorted((one for part in parts for one in part), key=lambda one: one.seed) == FIVE
    assert [len(part) for part in parts] == [2, 2, 1]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "", "1/0"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shard"):
        share(FIVE, text)


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.bench.fakes import cell, result
from modelfence.bench.cells import Cells
from modelfence.bench.sweep import sweep
folder = Path(sys.argv[1])
def make(wanted):
    with (folder / "log").open("a") as log:
        log.write(f"{{wanted.seed}}\\n")
    print(wanted.seed, flush=True)
    time.sleep(float(sys.argv[2]))
    return {{}}
sweep([cell(seed=seed) for seed in range(6)], Cells(folder / "cells"), make)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    code = CHILD.format(root=str(Path(__file__).parents[2]))
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_two_processes_share_a_sweep_without_running_a_cell_twice(tmp_path: Path) -> None:
    both = [start(tmp_path, 0.05), start(tmp_path, 0.05)]
    assert [one.wait() for one in both] == [0, 0]
    for one in both:
        one.stdout.close()
    assert sorted((tmp_path / "log").read_text().split()) == list("012345")


def test_a_sweep_that_was_killed_outright_goes_on(tmp_path: Path) -> None:
    first = start(tmp_path, 60)
    assert first.stdout.readline().strip() == "0"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    make = Maker()
    outcome = sweep([cell(seed=seed) for seed in range(6)], Cells(tmp_path / "cells"), make)
    assert (len(outcome.made), make.asked) == (6, [0, 1, 2, 3, 4, 5])
    assert not list(tmp_path.rglob("*.claim-*"))


def test_a_finished_cell_is_told_once_its_result_is_kept(tmp_path: Path) -> None:
    store = Cells(tmp_path)
    told: list[tuple[int, bool]] = []

    def make(one: Cell) -> dict[str, object]:
        if one.seed:
            raise InputError("no")
        return result()

    sweep(FIVE[:2], store, make, finished=lambda one: told.append((one.seed, store.read(one) is not None)))
    assert told == [(0, True)]


def test_a_result_of_other_defaults_is_not_taken_for_a_cell_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    store, one = Cells(tmp_path, said.append), cell()
    store.save(one, result())
    assert store.read(one) is not None
    monkeypatch.setitem(SAMap.RECIPES["default"], "steps", 7)
    assert store.read(one) is None
    assert "configuration.steps 300, now 7" in said[-1]
