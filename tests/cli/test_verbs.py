import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file
from tests.cli.conftest import Invoke, image_folder

from modelfence import __version__
from modelfence.artifact import read_report
from modelfence.cli import demo_job
from modelfence.cli.main import Verbs, main
from modelfence.cli.parts import load_parts
from modelfence.cli.tables import DataTable
from modelfence.data import catalog
from modelfence.data.splits import holdout
from modelfence.masking.mask import Mask
from modelfence.models.load import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train_writes_a_model_that_is_better_than_chance(invoke: Invoke) -> None:
    sets = [part for text in ("train.learning_rate=0.003", "train.batch_size=16") for part in ("--set", text)]
    options = ["--network", "small_vgg_bn", "--image-size", 16, "--epochs", 3, "--output", "sl", "--whole", *sets]
    result = invoke("train", "--domain", "sklearn_digits", *options)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in Path("sl").iterdir()) == [
        "model.json",
        "model.safetensors",
        "report.json",
        "run.toml",
    ]
    report = read_report(Path("sl"))
    assert report["test_accuracy"] > 0.4
    assert report["images"] == {"train": 674, "validation": 134, "test": 269}
    assert [row["epoch"] for row in report["history"]] == [1, 2, 3]
    assert f"{100 * report['test_accuracy']:.1f} % right on 269 test images" in result.stdout
    loaded = load_model("sl")
    assert (loaded.image.shape, loaded.extra["class_names"]) == ((3, 16, 16), [str(digit) for digit in range(10)])
    settings = tomllib.loads(Path("sl/run.toml").read_text())
    assert settings["train"]["epochs"] == 3
    assert settings["image"]["height"] == 16
    refused = invoke("report", "sl")
    assert refused.exit_code == 2
    assert "sl: isn't the output of modelfence protect; name such a folder" in refused.stderr
    again = json.loads(invoke("evaluate", "sl", "sklearn_digits", "--json").stdout)
    assert again["scores"][0]["accuracy"] == report["test_accuracy"]


def test_training_twice_gives_the_same_weights(invoke: Invoke) -> None:
    for folder in ("a", "b"):
        torch.rand(1)
        options = ["--network", "small_vgg_bn", "--image-size", 16, "--epochs", 1, "--set", "data.train_size=64"]
        result = invoke("train", "--domain", "sklearn_digits", *options, "--output", folder, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["images"]["train"] == 64
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_train_goes_on_from_given_weights(invoke: Invoke, source: Path) -> None:
    quick = ["--epochs", 1, "--set", "train.learning_rate=1e-9", "--set", "data.train_size=64", "--output", "sl"]
    result = invoke("train", "--network", source, "--domain", "sklearn_digits", *quick)
    assert result.exit_code == 0, result.stderr
    first, last = (load_model(folder).model.state_dict()["features.0.weight"] for folder in (source, "sl"))
    assert torch.allclose(first, last, atol=1e-6)


def test_a_domain_that_is_not_divided_keeps_test_images_apart(invoke: Invoke, source: Path) -> None:
    folder = image_folder(Path("ward"), each=6)
    image = load_model(source).image
    parts = [load_parts("ward", str(folder), DataTable(seed=seed), image, 10) for seed in (0, 1)]
    assert [(len(part.train), len(part.validation), len(part.test)) for part in parts] == [(42, 8, 10)] * 2
    pixels = [
        {image.numpy().tobytes() for batch in domain.once(60) for image in batch.images}
        for domain in (parts[0].train, parts[0].validation, parts[0].test, parts[1].test)
    ]
    assert len(pixels[0] | pixels[1] | pixels[2]) == 60
    assert pixels[2] == pixels[3]
    assert parts[0].test.labels is not None
    assert parts[0].test.labels.tolist() == [row // 6 for row in holdout(60, 1 / 6, 0)[1].tolist()]


def test_a_folder_divided_into_train_and_val_is_measured_on_val(invoke: Invoke, source: Path) -> None:
    image_folder(Path("ward/train"), each=3)
    image_folder(Path("ward/val"), each=2)
    result = invoke("evaluate", source, "here=ward", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(score["name"], score["images"]) for score in json.loads(result.stdout)["scores"]] == [("here", 20)]
    assert "divided" not in result.stderr


def test_a_folder_without_parts_is_measured_whole_and_that_is_said(invoke: Invoke, source: Path) -> None:
    image_folder(Path("ward"), each=2)
    for verb in (("evaluate", source, "here=ward"), ("verify", "--model", source, "--clean", "here=ward")):
        result = invoke(*verb, "--json")
        assert "here: not divided into parts" in result.stderr
        record = json.loads(result.stdout)
        assert record.get("images", record.get("scores", [record])[0].get("images")) == 20


def test_a_run_file_without_an_authorized_domain_is_measured_without_one(invoke: Invoke, source: Path) -> None:
    Path("run.toml").write_text(
        f'[model]\npath = "{source}"\n[data]\nunauthorized = {{other = "font_digits"}}\n'
        '[data.watch]\nother = "font_digits"\n[evaluate]\nlimit = 10\n'
    )
    result = invoke("evaluate", "run.toml", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(score["name"], score["role"]) for score in json.loads(result.stdout)["scores"]] == [
        ("other", "unauthorized")
    ]


def test_doctor_finds_a_sound_model_sound(invoke: Invoke, source: Path) -> None:
    result = invoke("doctor", source)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"{source}: it can be masked"


def test_doctor_looks_at_a_network_without_weights(invoke: Invoke) -> None:
    result = invoke("doctor", "small_vgg_bn", "--classes", 3, "--image-size", 16, "--json")
    assert json.loads(result.stdout) == {"model": "small_vgg_bn", "maskable": True, "findings": []}


def test_doctor_ends_with_1_where_there_is_nothing_to_mask(invoke: Invoke) -> None:
    arguments = ["doctor", "torch.nn:Flatten", "--classes", 768, "--image-size", 16]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout.startswith("error: has no convolution, linear or attention weight")
    findings = json.loads(invoke(*arguments, "--json").stdout)["findings"]
    assert findings[0]["severity"] == "error"


def test_evaluate_prints_the_table(invoke: Invoke, source: Path, finished: Path) -> None:
    domains = ["font_digits", "sklearn_digits", "--authorized", "sklearn_digits", "--set", "evaluate.limit=20"]
    result = invoke("evaluate", finished, *domains, "--before", source / "model.safetensors")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^\* sklearn_digits +20 ", result.stdout, re.MULTILINE)
    assert re.search(r"^  font_digits +20 ", result.stdout, re.MULTILINE)
    assert "ST-D" in result.stdout


@pytest.mark.usefixtures("data_root")
def test_evaluate_on_real_images(invoke: Invoke, source: Path) -> None:
    result = invoke("evaluate", source, "usps", "--set", "evaluate.limit=30", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(score["name"], score["images"]) for score in json.loads(result.stdout)["scores"]] == [("usps", 30)]


def test_a_network_of_one_s_own_from_a_run_file(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own_network.py", "own-network.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.delitem(sys.modules, "own_network", raising=False)
    namespace: dict[str, object] = {}
    exec((EXAMPLES / "own_network.py").read_text(), namespace)  # noqa: S102 (the example is ours)
    build = namespace["build"]
    assert callable(build)
    save_file(build(classes=10, width=32).state_dict(), tmp_path / "own_network.safetensors")
    assert invoke("doctor", "own-network.toml").exit_code == 0
    sets = ["method.steps=2", "method.batch_size=8", "method.learning_rate=0.006", "evaluate.limit=10"]
    result = invoke("protect", "own-network.toml", *[part for text in sets for part in ("--set", text)])
    assert result.exit_code == 0, result.stderr
    weights = ["--weights", "out/own-network", "--set", "evaluate.limit=10", "--json"]
    result = invoke("evaluate", "own-network.toml", *weights)
    assert result.exit_code == 0, result.stderr
    report = json.loads(Path("out/own-network/report.json").read_text())
    after = [score["accuracy"] for score in report["evaluation"]["scores"]]
    assert [score["accuracy"] for score in json.loads(result.stdout)["scores"]] == after
    assert Mask.load("out/own-network/mask").cut_share() == report["mask"]["cut_share"]


def test_report_draws_a_finished_run(invoke: Invoke, finished: Path) -> None:
    shutil.copytree(finished, "out")
    result = invoke("report", "out", "--title", "A <title>")
    assert result.exit_code == 0, result.stderr
    page = Path("out/report/report.html").read_text()
    assert "A &lt;title&gt;" in page
    assert "method.steps" in page
    assert sorted(path.name for path in Path("out/report/figures").glob("*.png")) == [
        "accuracy.png",
        "history.png",
        "layers.png",
    ]
    assert invoke("report", "out", "--samples").exit_code == 0
    assert Path("out/report/figures/samples.png").exists()
    assert Path("out/report/figures/samples.svg").exists()


def test_domains_lists_the_catalog_and_where_it_is_found(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELFENCE_DATA", raising=False)
    listed = json.loads(invoke("domains", "--json").stdout)
    assert [one["name"] for one in listed] == catalog.names()
    found = {one["name"]: one["found"] for one in listed}
    assert (found["sklearn_digits"], found["mnist"]) == ("built in", "hub:ylecun/mnist")
    for split in ("train", "test"):
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / "mnist" / f"{split}.parquet").touch()
    monkeypatch.setenv("MODELFENCE_DATA", str(tmp_path))
    lines = invoke("domains").stdout.splitlines()
    assert next(line for line in lines if line.startswith("mnist ")).split() == [
        "mnist",
        "digits",
        "10",
        "MODELFENCE_DATA",
    ]


@pytest.mark.parametrize("setting", ["source-available", "source-free", "data-free"])
def test_the_demo_does_the_whole_job(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    small = {"data.train_size": 80, "evaluate.limit": 20, "evaluate.refresh_images": 20}
    quick: dict[str, object] = {"method.steps": 2, "method.batch_size": 16}
    if setting != "source-available":
        quick |= {"method.generated": 40, "method.translated": 40, "method.generator_steps": 1}
    quick |= {"source-free": {"method.restyled": 40}, "data-free": {"method.neighbours": 2048}}.get(setting, {})
    monkeypatch.setattr(demo_job, "_SOURCE", {**demo_job._SOURCE, **small, "train.epochs": 4, "data.train_size": 400})
    masks = {**demo_job._MASKS, setting: {**demo_job._MASKS[setting], **small, **quick}}
    monkeypatch.setattr(demo_job, "_MASKS", masks)
    result = invoke("demo", "--setting", setting)
    assert result.exit_code == 0, result.stderr
    folder = Path("out/demo" if setting == "source-available" else f"out/demo-{setting}")
    for path in ("source/model.safetensors", "protected/model.safetensors", "protected/mask/mask.json"):
        assert (folder / path).exists()
    assert (folder / "protected/report/report.html").exists()
    assert (folder / "protected/report/figures/samples.png").exists()
    assert (folder / "protected/synthetic").exists() == (setting != "source-available")
    scores = read_report(folder / "protected")["evaluation"]["scores"]
    assert [score["role"] for score in scores] == ["authorized", "unauthorized", "unauthorized"]
    for score in scores:
        told = f"{100 * score['before']['accuracy']:.1f} % right before the mask, {100 * score['accuracy']:.1f} % after"
        assert f"{score['name']}, a domain" in result.stdout
        assert told in result.stdout
    assert "The mask achieves little here: " in result.stdout  # two steps
    assert ("labels were used to measure it, and for nothing else" in result.stdout) == (setting != "source-available")
    assert "What the files are" in result.stdout
    again = result.stdout.splitlines()[-1].split()
    assert again[:2] == ["modelfence", "evaluate"]
    assert invoke(*again[1:], "--set", "evaluate.limit=5").exit_code == 0


def test_help_needs_no_torch() -> None:
    program = "import sys; import modelfence.cli.main; sys.exit(bool({'torch', 'pydantic'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_python_m_modelfence_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "modelfence", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"modelfence {__version__}\n"


def test_without_a_verb_the_help_is_shown(invoke: Invoke) -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "Usage: modelfence" in result.output


@pytest.mark.parametrize("verb", sorted(main.commands))
def test_every_verb_has_help(invoke: Invoke, verb: str) -> None:
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: modelfence {verb} ")


def test_a_fault_of_the_program_is_not_taken_for_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    @click.group(cls=Verbs)
    def group() -> None: ...

    @group.command()
    def broken() -> None:
        raise ZeroDivisionError("of ours")

    with pytest.raises(SystemExit) as ended:
        group.main(["broken"])
    assert ended.value.code == 70
    assert "ZeroDivisionError: of ours" in capsys.readouterr().err
