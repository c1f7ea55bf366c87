import json
import shutil
import signal
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests import processes
from tests.cli.conftest import Invoke, assert_bad_input

from modelfence import files
from modelfence.artifact import read_history, read_report
from modelfence.cli import protect_job
from modelfence.cli.main import main
from modelfence.evaluation.result import Evaluation
from modelfence.masking.digest import digest_of
from modelfence.masking.mask import Mask
from modelfence.models.load import load_model

COMPLETE = ["README.md", "history.csv", "mask", "model.json", "model.safetensors", "report.json", "run.toml"]


class Killed(BaseException):
    """Stands for a process that ends without a chance to clean up."""


def test_the_artifact_is_complete_and_loads(finished: Path, source: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == COMPLETE
    base, mask, shipped = load_model(source).model, Mask.load(finished / "mask"), load_model(finished).model
    assert 0 < mask.cut_share() < 1
    assert digest_of(shipped) == digest_of(mask.apply(base)) == mask.folded_digest
    report = json.loads((finished / "report.json").read_text())
    table = Evaluation.from_dict(report["evaluation"])
    assert [(score.name, score.role, score.images) for score in table.scores] == [
        ("sklearn_digits", "authorized", 40),
        ("font_digits", "unauthorized", 40),
    ]
    assert table.scores[0].before is not None
    assert report["mask"]["cut_share"] == mask.cut_share()
    history = read_history(finished)
    assert [row["step"] for row in history] == [2, 4]
    assert "target_accuracy:font_digits" in history[0]
    assert (finished / "README.md").read_text().startswith("---\n")


def test_evaluate_of_the_artifact_gives_the_numbers_of_its_report(invoke: Invoke, finished: Path, source: Path) -> None:
    measure = ["--set", "evaluate.limit=40", "--set", "evaluate.refresh_images=20", "--json"]
    result = invoke("evaluate", finished, "sklearn_digits", "font_digits", "--before", source, *measure)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads((finished / "report.json").read_text())["evaluation"]


def test_the_written_run_file_repeats_the_run(invoke: Invoke, finished: Path) -> None:
    result = invoke("protect", finished / "run.toml", "--output", "again", "--json")
    assert json.loads(result.stdout) == read_report(Path("again"))
    assert Mask.load("again/mask").folded_digest == Mask.load(finished / "mask").folded_digest
    first, second = (tomllib.loads(Path(folder, "run.toml").read_text()) for folder in (finished, "again"))
    assert first.pop("output") == {"folder": str(finished)}
    assert second.pop("output") == {"folder": "again"}
    assert first == second
    assert first["method"]["steps"] == 4
    assert first["method"]["name"] == "SAMap"


@pytest.mark.parametrize("write", [1, 3, 5, 10])
@pytest.mark.parametrize("renamed", [False, True], ids=["before the rename", "after it"])
def test_a_run_killed_at_a_write_goes_on_to_the_same_result(
    invoke: Invoke,
    protect_arguments: list[str],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: int,
    renamed: bool,
) -> None:
    writes = []
    replace = files.os.replace

    def dying(old: str, new: Path) -> None:
        writes.append(Path(new).name)
        if len(writes) == write and not renamed:
            raise Killed
        replace(old, new)
        if len(writes) == write:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dying)
        with pytest.raises(Killed):
            invoke(*protect_arguments, "--output", "out")
    assert len(writes) == write
    result = invoke(*protect_arguments, "--output", "out", "--resume")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in Path("out").iterdir() if path.name[0] != ".") == COMPLETE
    assert Mask.load("out/mask").folded_digest == Mask.load(finished / "mask").folded_digest


def test_a_finished_run_is_not_repeated(invoke: Invoke, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    result = invoke("protect", "--output", finished, "--resume")
    assert result.exit_code == 0, result.stderr
    assert "is finished" in result.stderr
    assert "ST-D" in result.stdout
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


def test_resume_refuses_other_settings(invoke: Invoke, protect_arguments: list[str], finished: Path) -> None:
    result = invoke(*protect_arguments, "--output", finished, "--resume", "--set", "data.seed=1")
    assert_bad_input(result, f"{finished}/run.toml", "data.seed (2022, now 1)", "--force")


def test_ctrl_c_saves_the_state(
    invoke: Invoke, protect_arguments: list[str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = protect_job._line

    def pressed(row: dict[str, float]) -> str:
        signal.raise_signal(signal.SIGINT)
        return line(row)

    with monkeypatch.context() as patch:
        patch.setattr(protect_job, "_line", pressed)
        result = invoke(*protect_arguments, "--output", "out")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("modelfence: stopped at step 2")
    assert "--resume" in result.stderr
    assert "saved in out: go on" in result.stderr
    assert [path.name for path in Path("out").iterdir()] == ["unfinished"]
    assert sorted(path.name for path in Path("out/unfinished").iterdir()) == ["run.toml", "state.safetensors"]
    assert invoke("protect", "--output", "out", "--resume").exit_code == 0
    assert Mask.load("out/mask").folded_digest == Mask.load(finished / "mask").folded_digest


def test_force_replaces_an_earlier_result(invoke: Invoke, protect_arguments: list[str], finished: Path) -> None:
    shutil.copytree(finished, "out")
    Path("out/mine.txt").write_text("kept")
    Path("out/state.safetensors").write_text("of a run that was stopped")
    result = invoke(*protect_arguments, "--output", "out", "--force", "--set", "method.seed=5")
    assert result.exit_code == 0, result.stderr
    assert Mask.load("out/mask").folded_digest != Mask.load(finished / "mask").folded_digest
    assert tomllib.loads(Path("out/run.toml").read_text())["method"]["seed"] == 5
    assert sorted(path.name for path in Path("out").iterdir()) == sorted([*COMPLETE, "mine.txt"])


def test_one_mask_each(invoke: Invoke, protect_arguments: list[str]) -> None:
    more = ["--unauthorized", "photo_digits", "--set", "method.masks=one_each"]
    result = invoke(*protect_arguments, *more, "--output", "out")
    assert result.exit_code == 0, result.stderr
    each = [Mask.load(f"out/mask/{number}") for number in (0, 1)]
    assert [mask.metadata["unauthorized"] for mask in each] == ["font_digits", "photo_digits"]
    joint = Mask.load("out/mask")
    for name, kept in joint.kept.items():
        assert torch.equal(kept, each[0].kept[name] & each[1].kept[name])
    assert not list(Path("out").glob("state*"))
    assert "  8/8  " in result.stderr


def _protect_in_this_process(arguments: list[str]) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_two_processes_write_one_result(protect_arguments: list[str], tmp_path: Path) -> None:
    arguments = [*protect_arguments, "--output", str(tmp_path / "out"), "--json"]
    (code, out, err), other = processes.ranks(_protect_in_this_process, arguments, folder=tmp_path / "ranks")
    assert (code, other) == (0, (0, "", "")), err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == COMPLETE
    assert json.loads(out)["mask"]["folded_digest"] == Mask.load(tmp_path / "out" / "mask").folded_digest
    again = processes.ranks(_protect_in_this_process, [*arguments, "--resume"], folder=tmp_path / "again")
    assert [code for code, _, _ in again] == [0, 0]
    assert json.loads(again[0][1]) == json.loads(out)


def test_ranks_above_0_say_nothing(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = invoke("domains")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("given", [["--force"], ["--force", "--set", "method.masks=one_each"]])
def test_the_base_is_never_written_over(
    invoke: Invoke, protect_arguments: list[str], source: Path, given: list[str]
) -> None:
    before = (source / "model.safetensors").read_bytes()
    result = invoke(*protect_arguments, "--output", source, *given)
    assert_bad_input(result, "holds the model to be masked", "name another output folder")
    assert (source / "model.safetensors").read_bytes() == before
