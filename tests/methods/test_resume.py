"""Runs that are killed or interrupted at any moment, in processes of their own, end with the same model."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from tests import processes
from tests.methods import toy

from modelfence import CUTI, SAMap, protect
from modelfence.errors import InputError, Interrupted
from modelfence.masking.digest import digest_of

SETTINGS: dict[str, dict[str, Any]] = {
    "one mask": {"recipe": "paper"},
    "one mask each, with patience": {"masks": "one_each", "patience": 30},
    "no mask": {"isolation": "paper"},
}
STEPS = 16
Outcome = tuple[str, list[dict[str, float]]]


def learn(folder: Path, values: dict[str, Any]) -> Outcome:
    """Learn, or go on learning, and return the digest of the confined network and the history."""

    def progress(row: dict[str, float]) -> None:
        with (folder / "rows").open("a") as file:
            file.write(f"{row['step']}\n")
        time.sleep(0.005)  # so that kills fall between steps too, not only into them

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    result = protect(
        toy.cnn().eval(),  # its weights needn't be any good here
        authorized=toy.blobs(80, seed=1),
        unauthorized={"near": toy.blobs(80, seed=2), "far": toy.blobs(80, seed=3, inverted=True)},
        method=(CUTI if "isolation" in values else SAMap)(
            **{"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "evaluate_every": 1, **values}
        ),
        output=folder,
        resume=True,
        progress=progress,
    )
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in result.history]
    return digest_of(result.model), rows


def learn_until_stopped(folder: Path, values: dict[str, Any]) -> str:
    try:
        learn(folder, values)
    except Interrupted as stopped:
        return str(stopped)
    return "ran to its end"


def rows_of(folder: Path) -> int:
    file = folder / "rows"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: processes.call(learn, folder / name, values, folder=folder) for name, values in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_killed_again_and_again_ends_with_the_same_model(name, tmp_path, uninterrupted):
    values = SETTINGS[name]
    folder = tmp_path / "killed"
    chance = random.Random(name)
    kills = 0
    for _ in range(3):
        before = rows_of(folder)
        process = processes.start(learn, folder, values)
        more = before + chance.randint(1, 4)
        processes.wait_until(lambda more=more: rows_of(folder) >= more, process)
        time.sleep(chance.random() * 0.02)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        processes.finish(process)
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 2
    assert processes.call(learn, folder, values, folder=tmp_path) == uninterrupted[name]
    made = len(uninterrupted[name][1])
    assert made == STEPS * (2 if "masks" in values else 1)
    assert rows_of(folder) <= made + kills  # at most the last row of each killed part was made twice


def test_ctrl_c_saves_and_the_run_goes_on(tmp_path, uninterrupted):
    values = SETTINGS["one mask"]
    folder = tmp_path / "stopped"
    answer = tmp_path / "said"
    process = processes.start(processes._answer, learn_until_stopped, (folder, values), answer)
    processes.wait_until(lambda: rows_of(folder) >= 5, process)
    os.kill(process.pid, signal.SIGINT)
    processes.finish(process)
    text = processes._read(answer)
    assert text.startswith("stopped at step ")
    assert f"the state is saved in {folder}: go on with --resume" in text
    assert processes.call(learn, folder, values, folder=tmp_path) == uninterrupted["one mask"]


def go_on_from_disks_of_their_own(folder: Path, changed: dict[str, Any]) -> str:
    """Learn as one of two processes that don't see each other's files, then go on."""
    os.environ["MASTER_PORT"] = "0"
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    disk = folder / f"disk-{fabric.global_rank}"
    given: dict[str, Any] = {
        "authorized": toy.blobs(80, seed=1),
        "unauthorized": toy.blobs(80, seed=3, inverted=True),
        "method": SAMap(steps=2, batch_size=8),
        "fabric": fabric,
        "output": disk,
    }
    protect(toy.mlp_from(0), **given)
    try:
        protect(toy.mlp_from(0), **given | {"method": replace(given["method"], **changed)}, resume=True)
    except InputError as error:
        return str(error)
    return "went on"


def test_processes_that_find_different_states_are_refused(tmp_path):
    """The first process alone writes; on a disk that the others don't see they would begin anew and wait for it."""
    said = processes.ranks(go_on_from_disks_of_their_own, tmp_path, {}, folder=tmp_path / "gloo")
    assert all(
        "would go on at different steps (0 and 2); give an output folder that all machines see" in text for text in said
    )


def test_a_process_that_cannot_go_on_leaves_no_other_waiting(tmp_path):
    said = processes.ranks(go_on_from_disks_of_their_own, tmp_path, {"steps": 3}, folder=tmp_path / "gloo")
    first, second = sorted(said, key=lambda text: "another process" in text)
    assert "another process can't go on from the state that it has" in second
    assert "configuration" in first
