"""The command, from an empty folder to tables."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.bench.fakes import die, refuse
from tests.cli.conftest import assert_bad_input

from modelfence.bench import jobs, processes
from modelfence.bench.domains import parts_of
from modelfence.bench.processes import run_processes
from modelfence.cli.main import main
from modelfence.data import catalog
from modelfence.errors import ArtifactError

PAIR = ["--pairs", "sklearn_digits>font_digits", "font_digits>sklearn_digits"]
QUICK = ["--budget", "smoke", "--processes", "1"]


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.mark.usefixtures("tiny")
def test_from_an_empty_folder_to_tables_and_again(tmp_path: Path) -> None:
    arguments = ["digits", *PAIR, "--methods", "SL", "SAMap", "--seeds", "0", "1", *QUICK, "--out", tmp_path]
    first = bench(*arguments)
    assert first.exit_code == 0, first.stderr
    assert "| SA-MAP | sklearn_digits | ours |" in first.stdout
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == [
        "digits-sa-smoke-matrix.png",
        "digits-sa-smoke-matrix.svg",
        "digits-sa-smoke.csv",
        "digits-sa-smoke.md",
        "digits-sa-smoke.tex",
    ]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*.json")}
    assert len(files) == 2 + 4
    again = bench(*arguments, "--json")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*.json")} == files
    record = json.loads(again.stdout)
    assert (record["open"], record["failed"]) == (0, [])
    assert record["tables"]["digits-sa-smoke"]["numbers"]
    merged = bench("merge", "--out", tmp_path)
    assert (merged.exit_code, merged.stdout) == (0, first.stdout)


def test_the_smoke_budget_is_enough_for_data_free_learning(data_root: Path, tmp_path: Path) -> None:
    """Of MNIST-M's neighbours the fewest are recognized."""
    parts_of.cache_clear()
    chosen = ["--pairs", "mnist_m>mnist+usps+svhn", "--methods", "DFMap"]
    result = bench("digits", "--setting", "df", *chosen, *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr + result.stdout


@pytest.mark.parametrize("arguments", [["--methods", "--seeds", "0"], ["--seeds", "0", "--methods"]])
def test_an_option_without_a_value_is_wrong_use(tmp_path: Path, arguments: list[str]) -> None:
    result = bench("digits", *arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert "--methods" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny")
def test_shards_make_the_whole(tmp_path: Path) -> None:
    arguments = ["digits", *PAIR, "--methods", "SL", *QUICK, "--out", tmp_path]
    first = json.loads(bench(*arguments, "--shard", "1/2", "--json").stdout)
    second = json.loads(bench(*arguments, "--shard", "2/2", "--json").stdout)
    assert (first["open"], second["open"]) == (1, 0)


@pytest.mark.usefixtures("tiny")
def test_a_failing_cell_gives_exit_code_1_and_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = jobs.Worker.__call__

    def fails(self: jobs.Worker, cell: Any) -> Any:
        if cell.source == "font_digits":
            raise RuntimeError("no luck")
        return real(self, cell)

    monkeypatch.setattr(jobs.Worker, "__call__", fails)
    result = bench("digits", *PAIR, "--methods", "SL", *QUICK, "--out", tmp_path)
    assert result.exit_code == 1
    assert "| SL | font_digits | ours (failed) | failed | failed |" in result.stdout
    assert "RuntimeError: no luck" in (tmp_path / "tables" / "failed.md").read_text()
    monkeypatch.undo()


@pytest.mark.usefixtures("tiny")
def test_a_command_is_judged_by_what_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ([*QUICK, "--pairs", pair, "--out", tmp_path] for pair in PAIR[1:])

    def fails(*_: object) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(jobs.Worker, "__call__", fails)
        assert bench("digits", "--methods", "SL", *here).exit_code == 1
    other = bench("digits", "--methods", "SL", *there, "--json")
    record = json.loads(other.stdout)
    assert (other.exit_code, record["open"], record["failed"]) == (0, 0, [])
    assert "RuntimeError: no luck" in (tmp_path / "tables" / "failed.md").read_text()
    merged = bench("merge", "--out", tmp_path, "--json")
    assert (merged.exit_code, json.loads(merged.stdout)["open"]) == (1, 1)
    assert bench("digits", "--methods", "SL", *here).exit_code == 0
    assert not (tmp_path / "tables" / "failed.md").exists()


@pytest.mark.usefixtures("tiny")
def test_a_target_of_two_masks_is_refused_before_anything_is_kept(tmp_path: Path) -> None:
    arguments = ["digits", "--setting", "df", "--methods", "SL", *QUICK, "--out", tmp_path, "--pairs"]
    assert bench(*arguments, "sklearn_digits>font_digits+photo_digits").exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    assert_bad_input(bench(*arguments, "sklearn_digits>font_digits"), "font_digits is a target of sklearn_digits in 2")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("tiny")
def test_a_merge_says_which_cells_it_can_not_use(tmp_path: Path) -> None:
    arguments = ["digits", *PAIR, "--methods", "SL", *QUICK, "--out", tmp_path]
    assert bench(*arguments).exit_code == 0
    path, *_ = (tmp_path / "cells").rglob("*.json")
    path.write_text("{")
    merged = bench("merge", "--out", tmp_path)
    assert merged.stderr.count(f"{path}: damaged; not used") == 1
    assert "1 cells aren't finished" in merged.stdout


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise ArtifactError("x.json: can't be written (No space left on device)")

    monkeypatch.setattr("modelfence.bench.cells.Cells.save", full)
    result = bench("digits", *PAIR, "--methods", "SL", *QUICK, "--out", tmp_path)
    assert_bad_input(result, "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["visda"], ["visda_t, visda_v", "visda/train/<class>/"]),
        (["ownership", "--domains", "visda_t"], ["domain visda_t can't be found"]),
        (["digits", "--budget", "large"], ["unknown 'large'"]),
        (["digits", "--shard", "5/4"], ["--shard is '5/4'"]),
        (["digits", *PAIR, "--processes", "0"], ["--processes is 0"]),
        (["tables", "--methods", "NTL"], ["bench digits and bench ownership"]),
        (["merge"], ["no tables were asked for"]),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], fragments: list[str]
) -> None:
    monkeypatch.setenv(catalog.DATA_VARIABLE, str(tmp_path))
    assert_bad_input(bench(*arguments, "--out", tmp_path / "out"), *fragments)
    assert not (tmp_path / "out").exists()


def test_help_of_every_table() -> None:
    listed = bench("--help").stdout
    for name in ("tables", "digits", "ownership", "objects", "pacs", "visda", "backbones", "losses", "convergence"):
        assert f"  {name} " in listed
        assert bench(name, "--help").exit_code == 0


def test_processes_that_were_stopped_or_died_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(processes, "_work", die)
    assert run_processes([], tmp_path, 0.0, 2, said.append) == 2
    assert len(said) == 2
    assert "code 7" in said[0]
    monkeypatch.setattr(processes, "_work", refuse)
    with pytest.raises(ArtifactError, match="disk full"):
        run_processes([], tmp_path, 0.0, 1, said.append)


def test_a_terminated_command_holds_no_claim(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modelfence", "bench", "digits", "--pairs", PAIR[1], "--methods", "SL"]
    command += ["--budget", "smoke", "--processes", "1", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        while "training" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        run.communicate()
    assert run.returncode == 130
    assert list(tmp_path.rglob("*.claim-*")) == []
