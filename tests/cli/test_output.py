"""An earlier result stays until the new one is complete, and only files of ours are replaced."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tests.cli.conftest import Invoke, assert_bad_input, image_folder

from modelfence import files
from modelfence.artifact import read_report
from modelfence.cli import protect_job
from modelfence.errors import ArtifactError, InputError
from modelfence.files import output_folder, unsealed
from modelfence.masking.mask import Mask
from modelfence.models.load import load_model
from modelfence.results import finish, refuse_foreign, remove, replacing, results_in

TRAIN = ("train", "--domain", "sklearn_digits", "--network", "small_vgg_bn", "--image-size", 16, "--epochs", 1)
QUICK = ("--set", "data.train_size=64", "--set", "evaluate.limit=20")


class Killed(BaseException):
    """Stands for a process that ends without a chance to clean up."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def again(invoke: Invoke, protect_arguments: list[str], finished: Path) -> Callable[..., Result]:
    """Run protect with another seed over a copy of a finished result."""
    shutil.copytree(finished, "out")
    return lambda *more: invoke(*protect_arguments, "--output", "out", "--set", "method.seed=5", *more)


def seed_of(folder: str) -> int:
    return int(Mask.load(f"{folder}/mask").metadata["configuration"]["seed"])


@pytest.mark.parametrize("moved", range(1, 19))
def test_a_forced_run_killed_at_any_write_loses_neither_result(
    again: Callable[..., Result], finished: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    replace, count = files.os.replace, []

    def dying(old: Path, new: Path) -> None:
        count.append(new)
        if len(count) == moved:
            raise Killed
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dying)
        with pytest.raises(Killed):
            again("--force")
    complete = Path("out/unfinished/report.json").exists() or Path("out/finished").exists()
    if not complete:
        earlier = contents(finished)
        assert {name: content for name, content in contents(Path("out")).items() if name in earlier} == earlier
    result = again("--resume") if moved > 1 else again("--force")  # before the first write there is nothing to resume
    assert result.exit_code == 0, result.stderr
    assert sorted(contents(Path("out"))) == sorted(contents(finished))
    assert seed_of("out") == 5
    assert load_model("out").classes == read_report(Path("out"))["evaluation"]["classes"]


def test_a_forced_run_that_fails_late_leaves_the_earlier_result(
    again: Callable[..., Result], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ArtifactError("out: no space")

    with monkeypatch.context() as patch:
        patch.setattr(protect_job, "_measure", full)
        assert_bad_input(again("--force"), "no space")
    earlier = contents(finished)
    assert {name: content for name, content in contents(Path("out")).items() if name in earlier} == earlier
    assert seed_of("out") == 0
    assert again("--resume").exit_code == 0
    assert seed_of("out") == 5


def test_a_result_from_before_warnings_were_kept_can_be_read(
    invoke: Invoke, protect_arguments: list[str], finished: Path
) -> None:
    shutil.copytree(finished, "out")
    report = unsealed(json.loads(Path("out/report.json").read_text()))
    del report["warnings"]
    Path("out/report.json").write_text(json.dumps(report))
    assert read_report(Path("out"))["warnings"] == []
    for arguments in ([*protect_arguments, "--output", "out", "--resume"], ["report", "out"]):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.stderr


def test_a_number_changed_in_a_report_is_detected(invoke: Invoke, finished: Path) -> None:
    shutil.copytree(finished, "out")
    path = Path("out/report.json")
    content = path.read_text()
    numbers = list(re.finditer(r"\d\.\d+", content))
    places = [place for found in numbers for place in (found.start(), found.end() - 1)]
    changed = [content[:place] + ("3" if content[place] != "3" else "4") + content[place + 1 :] for place in places]
    differing = [text for text in changed if json.loads(text) != json.loads(content)]  # a last digit may be rounded off
    assert len(numbers) > 10
    assert len(differing) > len(numbers)
    for text in differing:
        path.write_text(text)
        with pytest.raises(ArtifactError, match=r"out/report\.json: truncated or altered"):
            read_report(Path("out"))
    result = invoke("report", "out")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_train_over_a_protected_model_leaves_nothing_of_it(invoke: Invoke, finished: Path) -> None:
    shutil.copytree(finished, "out")
    assert invoke("report", "out").exit_code == 0
    Path("out/mine.txt").write_text("kept")
    Path("out/mask/ward").mkdir()
    Path("out/mask/ward/mask.png").write_text("kept too")
    result = invoke(*TRAIN, *QUICK, "--output", "out", "--force")
    assert result.exit_code == 0, result.stderr
    assert sorted(contents(Path("out"))) == [
        "mask/ward/mask.png",
        "mine.txt",
        "model.json",
        "model.safetensors",
        "report.json",
        "run.toml",
    ]
    assert not Path("out/report").exists()
    assert load_model("out").extra["domain"] == "sklearn_digits"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "README.md", "report.json", "model.json", "run.toml", "report/figures/layers.svg"]
)
@pytest.mark.parametrize("verb", ["protect", "train"])
def test_files_of_others_are_never_replaced(invoke: Invoke, protect_arguments: list[str], name: str, verb: str) -> None:
    path = Path("out", name)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    arguments = protect_arguments if verb == "protect" else [*TRAIN, *QUICK]
    result = invoke(*arguments, "--output", "out", "--force")
    assert_bad_input(result, f"{path}: wasn't written by modelfence")
    assert contents(Path("out")) == {name: b"{}"}


@pytest.mark.parametrize("verb", ["protect", "train"])
def test_a_folder_that_can_not_be_written_is_named_before_any_work(
    invoke: Invoke, protect_arguments: list[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    Path("out").mkdir()
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path).name != "out")
    result = invoke(*(protect_arguments if verb == "protect" else [*TRAIN, *QUICK]), "--output", "out")
    assert_bad_input(result, "out: can't be written (no permission); name another output folder")
    assert "loading" not in result.stderr
    assert "training" not in result.stderr


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "history.csv").mkdir()
    with pytest.raises(InputError, match=r"history\.csv: wasn't written by modelfence"):
        refuse_foreign(tmp_path)


def test_files_of_others_that_look_like_a_state_stay(tmp_path: Path) -> None:
    names = ["state-dict.safetensors", ".state-of-things.txt", "states.safetensors", "synthetic/mine.safetensors"]
    for name in names:
        files.atomic_write(tmp_path / name, "x")
    ours = ["synthetic/generated-0123456789abcdef.safetensors", ".state-3.safetensors.0a1b2c3d"]
    for name in ours:
        files.atomic_write(tmp_path / name, "x")
    with replacing(tmp_path) as staged:
        files.atomic_write(staged / "report.json", '{"format": 1}')
    assert set(contents(tmp_path)) == {*names, "report.json"}


def test_a_state_of_a_mask_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state-1.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(InputError, match=r"state-1\.safetensors: wasn't written by modelfence"):
        refuse_foreign(tmp_path)


def test_what_somebody_left_in_a_folder_of_ours_blocks_no_result(tmp_path: Path) -> None:
    for number in range(3):
        with replacing(tmp_path) as staged:
            files.atomic_write(staged / "run.toml", "[output]")
            files.atomic_write(staged / "mask" / "mask.json", f'"base_digest" {number}')
            files.atomic_write(staged / "report.json", f'{{"format": {number}}}')
        assert (tmp_path / "report.json").read_text() == f'{{"format": {number}}}'
        assert (tmp_path / "mask" / "mask.json").read_text() == f'"base_digest" {number}'
        for place in ("finished", "unfinished"):
            files.atomic_write(tmp_path / place / ".DS_Store", "x")
    assert set(contents(tmp_path)) == {
        *("report.json", "run.toml", "mask/mask.json", "finished/.DS_Store", "unfinished/.DS_Store")
    }


def test_a_result_that_fails_half_way_leaves_the_earlier_one(tmp_path: Path) -> None:
    def write(text: str) -> None:
        with replacing(tmp_path) as staged:
            files.atomic_write(staged / "run.toml", "[output]")
            files.atomic_write(staged / "mask" / "0" / "mask.json", '"base_digest"')
            if text == "broken":
                raise ArtifactError("no space")
            files.atomic_write(staged / "report.json", f'{{"format": "{text}"}}')

    write("first")
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match="no space"):
        write("broken")
    assert {key: value for key, value in contents(tmp_path).items() if not key.startswith("unfinished")} == before
    write("second")
    assert contents(tmp_path) == {**before, "report.json": b'{"format": "second"}'}
    finish(tmp_path)
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0character"], ids=["long", "NUL"])
def test_a_result_can_not_go_where_there_is_no_path(name: str) -> None:
    with pytest.raises(InputError, match="path"), replacing(Path(name)):
        pass


def test_what_can_not_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ArtifactError, match=r"report\.json: can't be removed"):
        remove([tmp_path / "report.json"])
    assert results_in(tmp_path) == []


@pytest.mark.parametrize("place", ["ward/out", "ward", "ward/train/deep/out"])
def test_an_output_folder_inside_a_domain_is_refused(invoke: Invoke, protect_arguments: list[str], place: str) -> None:
    image_folder(Path("ward"))
    before = contents(Path("ward"))
    for arguments in ([*protect_arguments, "--unauthorized", "ward"], ["train", "--network", "vgg11", "--domain=ward"]):
        result = invoke(*arguments, "--output", place, "--force")
        assert_bad_input(result, f"{place}: the output folder is inside the domain ward")
    assert contents(Path("ward")) == before
    assert not Path("ward/train").exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_folders_made_for_a_run_that_fails_are_taken_away(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(error), output_folder(tmp_path / "there" / "a" / "b"):
        raise error
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(error), output_folder(tmp_path / "there"):
        raise error
    assert (tmp_path / "there").exists()


def test_resume_without_a_run(invoke: Invoke, protect_arguments: list[str]) -> None:
    Path("empty").mkdir()
    for folder in ("empty", "missing"):
        assert_bad_input(invoke("protect", "--output", folder, "--resume"), f"{folder}: there is no run to go on with")
    result = invoke(*protect_arguments, "--output", "empty", "--resume")
    assert result.exit_code == 0
    assert "empty: there is no run to go on with yet; starting it" in result.stderr
    assert not Path("missing").exists()


def test_saved_files_are_those_of_the_documentation(finished: Path) -> None:
    assert [path.name for path in results_in(finished)] == [
        "report.json",
        "model.safetensors",
        "model.json",
        "history.csv",
        "README.md",
        "run.toml",
        "mask.json",
        "mask.safetensors",
    ]
    assert json.loads((finished / "report.json").read_text())["format"] == 1
