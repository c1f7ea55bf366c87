"""The settings without a source or without any data, from the command line to the report."""

import json
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.cli.conftest import Invoke, assert_bad_input, image_folder

from modelfence import files
from modelfence.artifact import read_history, read_report, read_synthetic
from modelfence.cli import protect_job
from modelfence.cli.main import main
from modelfence.masking.mask import Mask
from modelfence.results import results_in

Protect = Callable[..., Result]
TINY = {
    "data.train_size": 100,
    "evaluate.limit": 40,
    "evaluate.refresh_images": 20,
    "method.steps": 4,
    "method.batch_size": 16,
    "method.evaluate_every": 2,
    "method.learning_rate": 0.004,
    "method.precision": "fp32",
}
MADE = {
    "method.generated": 80,
    "method.translated": 80,
    "method.generator_steps": 2,
    "method.synthesis_batch": 16,
}
RESTYLED = {"method.restyled": 80}
AROUND = {"method.drawings": 64, "method.neighbours": 1024}
WATCHED = ["--watch", "sklearn_digits", "--watch", "font_digits"]


def sets(*tables: dict[str, object]) -> list[str]:
    return [part for table in tables for key, value in table.items() for part in ("--set", f"{key}={value}")]


SOURCE_FREE = ["--unauthorized", "font_digits", *sets(TINY, MADE, RESTYLED)]
DATA_FREE = sets(TINY, MADE, AROUND)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network that knows 16-pixel grey digits."""
    folder = tmp_path_factory.mktemp("trained") / "sl"
    image = {"channels": 1, "height": 16, "width": 16, "mean": [0.5], "std": [0.5]}
    more = sets({f"image.{key}": value for key, value in image.items()}, {"train.learning_rate": 0.003})
    options = ["--network", "small_vgg_bn", "--domain", "sklearn_digits", "--epochs", "2", "--output", str(folder)]
    result = CliRunner().invoke(main, ["train", *options, *more, "--set", "train.batch_size=16"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def protect(invoke: Invoke, trained: Path) -> Protect:
    return lambda *more, model=trained: invoke("protect", "--model", model, "--output", "out", *more)


@pytest.fixture(scope="session")
def source_free(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The output folder of a source-free run whose domains are watched, and what the command said."""
    folder = tmp_path_factory.mktemp("source_free") / "out"
    arguments = ["protect", "--model", str(trained), "--output", str(folder), *SOURCE_FREE, *WATCHED]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return folder, result


def test_what_is_warned_of_before_a_refusal_leaves_an_earlier_result_alone(
    protect: Protect, source_free: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(source_free[0], "out")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    monkeypatch.setattr("modelfence.methods.sfmap._NEARLY", 1e9)
    nothing = sets({"method.generated": 0, "method.translated": 0})
    result = protect(*SOURCE_FREE, *nothing, "--force")
    assert_bad_input(result, "no images near the source would be made")
    assert "nearly like the model's own source" in result.stderr
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_source_free_writes_all_that_is_documented(source_free: tuple[Path, Result]) -> None:
    folder, _ = source_free
    report = read_report(folder)
    assert report["method"] == "SFMap"
    assert [(score["name"], score["role"]) for score in report["evaluation"]["scores"]] == [
        ("sklearn_digits", "authorized"),  # the model says that it was trained on it
        ("font_digits", "unauthorized"),
    ]
    assert (report["authorized"], report["unauthorized"]) == ([], ["font_digits"])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        str(path.relative_to(folder)) for path in results_in(folder)
    }
    assert {path.name for path in (folder / "synthetic").iterdir()} == {"generated.png", "translated.png"} | (
        {"restyled.png"} if "restyled" in report["synthetic"]["parts"] else set()
    )
    last = read_history(folder)[-1]
    assert {"watch:sklearn_digits", "watch:font_digits", "source_agreement", "target_agreement:font_digits"} <= set(
        last
    )
    assert report["agreement"] == {
        key: pytest.approx(last[key]) for key in ("source_agreement", "target_agreement:font_digits")
    }


def test_synthetic_images_are_kept_with_their_classes(source_free: tuple[Path, Result]) -> None:
    folder, _ = source_free
    found = read_synthetic(folder)
    assert found["generated"].images.shape == (64, 1, 16, 16)
    assert found["generated"].classes.tolist() == sorted(found["generated"].classes.tolist())
    with Image.open(folder / "synthetic/generated.png") as sheet:
        assert sheet.width == 928
    assert read_report(folder)["synthetic"]["parts"]["generated"]["images"] == 80
    assert read_report(folder)["synthetic"]["class_names"] == [str(digit) for digit in range(10)]


def test_progress_and_warnings_reach_the_terminal(source_free: tuple[Path, Result]) -> None:
    folder, result = source_free
    rows = [line for line in result.stderr.splitlines() if line.startswith("  2/4  ")]
    assert "watched sklearn_digits " in rows[0]
    assert "agreement near the source " in rows[0]
    assert "on font_digits " in rows[0]
    assert "  generated images: step 2 of 2 (" in result.stderr
    warned = read_report(folder)["warnings"]
    assert warned  # two steps make no good generator
    for warning in warned:
        assert f"  warning: {warning}" in result.stderr.splitlines()
        assert f"Warning: {warning}." in result.stdout.splitlines()
    assert "It agrees with the original model on " in result.stdout


def test_the_written_run_file_repeats_it(invoke: Invoke, source_free: tuple[Path, Result]) -> None:
    folder, _ = source_free
    settings = tomllib.loads((folder / "run.toml").read_text())
    assert settings["method"]["name"] == "SFMap"
    assert settings["data"]["watch"] == {"sklearn_digits": "sklearn_digits", "font_digits": "font_digits"}
    result = invoke("protect", folder / "run.toml", "--output", "again", "--json")
    assert result.exit_code == 0, result.stderr
    again = json.loads(result.stdout)
    assert again["mask"]["folded_digest"] == read_report(folder)["mask"]["folded_digest"]
    measure = invoke("evaluate", folder / "run.toml", "--json")
    assert [score["role"] for score in json.loads(measure.stdout)["scores"]] == ["authorized", "unauthorized"]


def test_its_report_shows_images_proxies_and_warnings(invoke: Invoke, source_free: tuple[Path, Result]) -> None:
    shutil.copytree(source_free[0], "out")
    result = invoke("report", "out", "--samples")
    assert result.exit_code == 0, result.stderr
    page = Path("out/report/report.html").read_text()
    for text in (
        "What was synthesized",
        "How well what needs no labels followed the truth",
        "The widest difference: at",
    ):
        assert text in page
    assert "(nearly) missing" in page
    names = {path.name for path in Path("out/report/figures").iterdir()}
    assert {"proxies.png", "proxies.svg", "synthetic-generated.png", "synthetic-generated.svg"} <= names
    result = invoke("report", "out")  # again, over its own files
    assert result.exit_code == 0, result.stderr


def test_labels_of_the_unauthorized_domain_are_not_looked_at(protect: Protect) -> None:
    folder = image_folder(Path("scans"), classes=3, each=30)  # three folders, ten classes in the model
    (folder / "class_0" / "30.png").write_bytes((folder / "class_1" / "0.png").read_bytes())
    result = protect("--unauthorized", folder, *sets(TINY, MADE, RESTYLED))
    assert result.exit_code == 0, result.stderr
    assert read_report(Path("out"))["evaluation"] is None
    flat = Path("flat")
    flat.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        shutil.copy(path, flat / f"{number}.png")
    result = protect("--unauthorized", flat, "--force", *sets(TINY, MADE, RESTYLED))
    assert result.exit_code == 0, result.stderr
    assert_bad_input(
        protect("--unauthorized", flat, "--authorized", "sklearn_digits", "--force"), "flat: no class folders"
    )


def test_data_free_without_labels_says_what_can_be_said(protect: Protect, invoke: Invoke) -> None:
    result = protect(*DATA_FREE)
    assert result.exit_code == 0, result.stderr
    assert "No labelled domain was given, so there are no accuracies" in result.stdout
    assert "% of the images in random styles." in result.stdout
    report = read_report(Path("out"))
    assert (report["method"], report["evaluation"]) == ("DFMap", None)
    assert 0 <= report["agreement"]["target_agreement:neighbours"] <= 1
    assert Path("out/synthetic/neighbours.png").exists()
    assert not Path("out/README.md").exists()
    assert invoke("report", "out").exit_code == 0
    page = Path("out/report/report.html").read_text()
    assert "No labelled domain was at hand" in page
    assert "It agrees with the original model on" in page
    assert not Path("out/report/figures/accuracy.png").exists()


def test_source_only_is_measured_on_its_domain(protect: Protect) -> None:
    result = protect("--authorized", "sklearn_digits", "--watch", "font_digits", *sets(TINY, AROUND), "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["method"] == "DFMap"
    assert [(score["name"], score["role"]) for score in report["evaluation"]["scores"]] == [
        ("sklearn_digits", "authorized"),
        ("font_digits", "unauthorized"),
    ]
    assert list(report["synthetic"]["parts"]) == ["neighbours"]


def test_what_is_measured_only_gets_its_role_from_the_table(protect: Protect) -> None:
    roles = {"evaluate.authorized": "photo_digits", "evaluate.unauthorized": "font_digits"}
    result = protect(*DATA_FREE, "--watch", "sklearn_digits", *sets(roles), "--json")
    assert result.exit_code == 0, result.stderr
    scores = json.loads(result.stdout)["evaluation"]["scores"]
    assert [(score["name"], score["role"]) for score in scores] == [
        ("photo_digits", "authorized"),
        ("font_digits", "unauthorized"),
        ("sklearn_digits", "unauthorized"),
    ]


def test_watched_domains_without_a_role_are_warned_of(protect: Protect, invoke: Invoke, source: Path) -> None:
    watched = ["--watch", "sklearn_digits", "--watch", "font_digits"]
    result = protect(*SOURCE_FREE, *watched, model=source)  # it doesn't say what it was trained on
    assert result.exit_code == 0, result.stderr
    warning = "'sklearn_digits' is only watched and counts as unauthorized in the table, its sums and the model card"
    (kept,) = [text for text in read_report(Path("out"))["warnings"] if text.startswith(warning)]
    assert f"  warning: {kept}" in result.stderr.splitlines()
    assert f"Warning: {kept}." in result.stdout.splitlines()
    measure = ["evaluate", "out/run.toml", "--json", "--set", "evaluate.limit=20"]
    assert f"  warning: {kept}" in invoke(*measure).stderr.splitlines()
    for said in (["--authorized", "sklearn_digits"], ["--set", "evaluate.authorized=sklearn_digits"]):
        result = invoke(*measure, *said)
        assert result.exit_code == 0, result.stderr
        assert "only watched" not in result.stderr


def test_a_bare_name_means_the_domain_of_the_file(protect: Protect, source: Path) -> None:
    for name in ("sklearn_digits", "usps"):
        image_folder(Path("img") / name, each=12)
    Path("flat").mkdir()
    for number, path in enumerate(sorted(Path("img/usps").rglob("*.png"))):
        shutil.copy(path, Path("flat") / f"{number}.png")
    Path("run.toml").write_text(
        "[data]\nunauthorized = 'flat'\nwatch = {sklearn_digits = 'img/sklearn_digits', usps = 'img/usps'}\n"
        "[evaluate]\nauthorized = 'sklearn_digits'\n"
    )
    result = protect("run.toml", *sets(TINY, MADE, RESTYLED), "--json", model=source)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    found = [(score["name"], score["role"], score["images"]) for score in report["evaluation"]["scores"]]
    assert found == [("sklearn_digits", "authorized", 20), ("usps", "unauthorized", 20)]
    assert not [text for text in report["warnings"] if "only watched" in text]


def test_a_run_file_without_labels_can_be_evaluated(invoke: Invoke, trained: Path) -> None:
    image_folder(Path("scans"), each=3)
    Path("run.toml").write_text(
        f"[model]\npath = '{trained}'\n[data]\nunauthorized = 'scans/class_0'\nwatch = 'sklearn_digits'\n"
    )
    result = invoke("evaluate", "run.toml", "--json", "--set", "evaluate.limit=20")
    assert result.exit_code == 0, result.stderr
    assert [score["name"] for score in json.loads(result.stdout)["scores"]] == ["sklearn_digits"]


def test_synthetic_images_are_found_in_the_cache(protect: Protect) -> None:
    assert protect(*SOURCE_FREE, "--cache", "cache").exit_code == 0
    assert {path.name.split("-")[0] for path in Path("cache").iterdir()} == {"generated", "translated", "restyled"}
    again = protect(*SOURCE_FREE, "--cache", "cache", "--force", "--set", "method.steps=2")
    assert again.exit_code == 0, again.stderr
    assert "generated images: 80 found in cache" in again.stderr


def test_a_run_stopped_while_it_learns_goes_on_to_the_same_mask(
    protect: Protect, source_free: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = protect_job._line

    def pressed(row: dict[str, float]) -> str:
        signal.raise_signal(signal.SIGINT)
        return line(row)

    with monkeypatch.context() as patch:
        patch.setattr(protect_job, "_line", pressed)
        assert protect(*SOURCE_FREE, *WATCHED).exit_code == 130
    assert sorted(path.name for path in Path("out/unfinished").iterdir()) == [
        "run.toml",
        "state.safetensors",
        "synthetic",
    ]
    result = protect("--resume", *SOURCE_FREE, *WATCHED)
    assert result.exit_code == 0, result.stderr
    assert Mask.load("out/mask").folded_digest == Mask.load(source_free[0] / "mask").folded_digest
    assert not Path("out/unfinished").exists()


@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_run_killed_while_it_synthesizes_goes_on(
    protect: Protect, source_free: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    class Killed(BaseException):
        pass

    replace, count = files.os.replace, []

    def dying(old: Path, new: Path) -> None:
        count.append(new)
        if len(count) == write:
            raise Killed
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", dying)
        with pytest.raises(Killed):
            protect(*SOURCE_FREE, *WATCHED)
    result = protect("--resume", *SOURCE_FREE, *WATCHED)
    assert result.exit_code == 0, result.stderr
    assert Mask.load("out/mask").folded_digest == Mask.load(source_free[0] / "mask").folded_digest


@pytest.mark.parametrize(
    ("table", "rows", "learned"),
    [
        ("watermark", [("sklearn_digits", "authorized"), ("watermark", "unauthorized")], "watermark"),
        ("key", [("sklearn_digits+key", "authorized"), ("sklearn_digits", "unauthorized")], "no_key"),
    ],
)
def test_a_mark_makes_rows_of_the_table(
    protect: Protect, invoke: Invoke, trained: Path, table: str, rows: list[tuple[str, str]], learned: str
) -> None:
    Path("run.toml").write_text(
        f'[data]\nauthorized = "sklearn_digits"\n[{table}]\nkind = "digits"\nvalue = 80\n[output]\nfolder = "out"\n'
    )
    result = protect("run.toml", *sets(TINY), "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["method"] == "SAMap"
    assert tomllib.loads(Path("out/run.toml").read_text())["method"]["recipe"] == "ownership"
    assert report[table] == {"kind": "digits", "value": 80, "channel": 0}
    assert [(score["name"], score["role"]) for score in report["evaluation"]["scores"]] == rows
    assert f"target_accuracy:{learned}" in read_history(Path("out"))[0]
    assert tomllib.loads(Path("out/run.toml").read_text())[table] == report[table]
    assert protect("--resume").exit_code == 0
    assert protect("--resume", "--set", f"{table}.value=81").exit_code == 2
    shown = {f"{table}.kind": "digits", f"{table}.value": 80, **{key: TINY[key] for key in TINY if "evaluate" in key}}
    again = invoke("evaluate", "out", "sklearn_digits", "--before", trained, "--json", *sets(shown))
    assert json.loads(again.stdout) == report["evaluation"]


def test_a_retrained_model_has_no_mask(protect: Protect, invoke: Invoke) -> None:
    domains = ["--authorized", "sklearn_digits", "--unauthorized", "font_digits"]
    small = {key: value for key, value in TINY.items() if key != "method.learning_rate"}
    result = protect(*domains, "--method", "CUTI", *sets(small))
    assert result.exit_code == 0, result.stderr
    assert "never ship it" not in result.stdout
    assert "retraining the model against font_digits ..." in result.stderr
    assert not Path("out/mask").exists()
    assert invoke("report", "out").exit_code == 0
    assert "Retraining is no lock" in Path("out/report/report.html").read_text()


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        (["--method", "SFMap", "--authorized", "sklearn_digits"], ["SFMap needs unauthorized="]),
        (
            ["--method", "SFMap", "--authorized", "sklearn_digits", "--unauthorized", "font_digits"],
            ["SFMap works without authorized=", "watch="],
        ),
        (["--method", "DFMap", "--unauthorized", "font_digits"], ["DFMap works without unauthorized="]),
        (["--method", "SAMap"], ["SAMap needs authorized="]),
        (["--method", "DFMab"], ["--method: method.name: unknown method 'DFMab'. Did you mean 'DFMap'"]),
        (["--set", "method.neighbors=100"], ["--set: method.neighbors: unknown key. Did you mean 'neighbours'"]),
        (
            ["--set", "method.recipe=paper", "--set", "method.generated=7"],
            ["generated has no effect with recipe='paper'"],
        ),
        (["--watch", "three"], ["domain 'three' has 3 classes", "the model 10"]),
        (["--watch", "font_digit"], ["'font_digit'", "Did you mean 'font_digits'"]),
        (
            ["--unauthorized", "font_digits", "--set", "evaluate.authorized=font_digits"],
            ["data.unauthorized: 'font_digits' can't be authorized and unauthorized"],
        ),
        (
            ["--unauthorized", "font_digits", "--watch", "font_digits=photo_digits"],
            ["data.watch: 'font_digits' is photo_digits here and font_digits elsewhere"],
        ),
        (
            ["--authorized", "sklearn_digits", "--watch", "watermark=font_digits", "--set", "watermark.kind=digits"],
            ["watermark: a domain is named 'watermark'"],
        ),
        (
            ["--authorized", "sklearn_digits", "--watch", "no_key=font_digits", "--set", "key.kind=digits"],
            ["key: a domain is named 'no_key'"],
        ),
        (["--set", "key.kind=digits"], ["key: the authorized images get the mark; give data.authorized"]),
        (["--watch", "bare.parquet"], ["domain 'bare' has no labels"]),
        (["--set", "evaluate.unauthorized=bare.parquet"], ["domain 'bare' has no labels"]),
        (["--set", "watermark.kind=digits"], ["watermark: the authorized images get the mark; give data.authorized"]),
        (["--set", "watermark.kind=digit"], ["watermark: unknown kind 'digit'. Did you mean 'digits'"]),
        (["--set", "watermark.pattern=mark.png"], ["watermark: kind 'digits' has its own pattern"]),
        (["--set", "method.masks=one_each"], ['masks="one_each"', "unauthorized="]),
        (["--unauthorized", "empty"], ["empty: no images"]),
        (["--unauthorized", "scans", "--cache", "scans/cache"], ["is inside the domain scans"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_bad_input_before_any_work(protect: Protect, given: list[str], fragments: list[str]) -> None:
    image_folder(Path("three"), classes=3)
    image_folder(Path("scans"))
    Path("empty").mkdir()
    rows = [{"bytes": next(Path("scans").rglob("*.png")).read_bytes()}] * 20
    pq.write_table(pa.table({"image": rows}), "bare.parquet")
    assert_bad_input(protect(*given), *fragments)
    assert not Path("out").exists()


def test_data_free_needs_to_know_what_the_model_eats(protect: Protect, trained: Path) -> None:
    result = protect("--weights", trained / "model.safetensors", "--classes", 10, model="small_vgg_bn")
    assert_bad_input(result, "image", "is missing")


def test_altered_synthetic_images_are_named(invoke: Invoke, source_free: tuple[Path, Result]) -> None:
    shutil.copytree(source_free[0], "out")
    path = Path("out/synthetic.safetensors")
    tensors = load_file(path)
    save_file({**tensors, "generated.classes": torch.zeros(3, dtype=torch.int64)}, path)
    assert_bad_input(invoke("report", "out"), "synthetic.safetensors: truncated or altered")
    path.write_bytes(b"cut off")
    assert_bad_input(invoke("report", "out"), "synthetic.safetensors: truncated or altered")
