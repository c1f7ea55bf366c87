"""What ``modelfence evaluate`` says: which model it measures, and what is wrong with a domain or a model."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import IMAGE, Invoke, assert_bad_input, image_folder

from modelfence.models.load import save_model
from modelfence.models.zoo import create_model

QUICK = ("--set", "evaluate.limit=10", "--json")


@pytest.mark.parametrize(
    ("domain", "fragments"),
    [
        ("mnsit", ["unknown domain 'mnsit'. Did you mean 'mnist'"]),
        ("here=mnsit", ["unknown domain 'mnsit'. Did you mean 'mnist'"]),
        ("img/nonexist", ["img/nonexist: no such file or folder"]),
        ("img/part-*.tar", ["img/part-*.tar: no such files"]),
        ("img/both", ["img/both: test, train can be splits or classes"]),
        ("img/half", ["img/half: has no test split; name it one of test, val"]),
    ],
)
def test_what_is_not_there_is_said_before_a_split_is_looked_for(
    invoke: Invoke, source: Path, domain: str, fragments: list[str]
) -> None:
    image_folder(Path("img/both"), classes=3)
    for number, split in ((0, "train"), (1, "test")):
        Path(f"img/both/class_{number}").rename(f"img/both/{split}")
    image_folder(Path("img/half/train"))
    image_folder(Path("img/half/other"))
    for verb in (("evaluate", source, domain), ("verify", "--model", source, "--clean", domain)):
        assert_bad_input(invoke(*verb), *fragments)


def test_a_report_s_samples_name_the_domain_that_is_gone(invoke: Invoke, finished: Path) -> None:
    shutil.copytree(finished, "out")
    text = Path("out/run.toml").read_text().replace('font_digits = "font_digits"', 'font_digits = "img/gone"')
    Path("out/run.toml").write_text(text)
    assert_bad_input(invoke("report", "out", "--samples"), "img/gone: no such file or folder")


def test_an_unknown_authorized_domain_without_labels_to_read(invoke: Invoke, source: Path) -> None:
    Path("run.toml").write_text(f"[model]\npath = '{source}'\n[data]\nauthorized = 'font_digit'\n")
    assert_bad_input(invoke("evaluate", "run.toml"), "unknown domain 'font_digit'. Did you mean 'font_digits'")


def test_the_model_that_is_measured_is_named(invoke: Invoke, source: Path) -> None:
    weights = source / "model.safetensors"
    more = [part for key, value in vars(IMAGE).items() for part in ("--set", f"image.{key}={_toml(value)}")]
    result = invoke("evaluate", source, "font_digits", *QUICK)
    assert f"measuring {source}" in result.stderr.splitlines()
    arguments = ["small_vgg_bn", "font_digits", "--weights", weights, "--classes", 10, *more]
    result = invoke("evaluate", *arguments, *QUICK)
    assert f"measuring small_vgg_bn with the weights of {weights}" in result.stderr.splitlines()


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def test_a_finished_output_of_the_run_file_is_pointed_at(invoke: Invoke, source: Path, finished: Path) -> None:
    shutil.copytree(source, "out/sl")
    domains = "[data]\nauthorized = 'sklearn_digits'\nunauthorized = 'font_digits'\n"
    Path("run.toml").write_text(f"[model]\npath = 'out/sl'\n{domains}[output]\nfolder = 'out'\n")
    hint = "  the finished output of run.toml is another model; measure it with: modelfence evaluate out DOMAIN..."
    unfinished = invoke("evaluate", "run.toml", *QUICK)
    assert unfinished.exit_code == 0, unfinished.stderr
    assert hint not in unfinished.stderr.splitlines()
    shutil.copytree(finished, "out", dirs_exist_ok=True)
    result = invoke("evaluate", "run.toml", *QUICK)
    assert "measuring out/sl" in result.stderr.splitlines()
    assert hint in result.stderr.splitlines()
    for same in ("out", f".{os.sep}out{os.sep}"):
        result = invoke("evaluate", "run.toml", "--set", f"model.path={same}", *QUICK)
        assert result.exit_code == 0, result.stderr
        assert "finished output" not in result.stderr


def test_a_finished_output_of_a_factory_is_measured_as_its_weights(
    invoke: Invoke, source: Path, finished: Path
) -> None:
    shutil.copytree(finished, "out")
    Path("mf_factory.py").write_text(
        "from modelfence.data.image_spec import ImageSpec\nfrom modelfence.models.zoo import create_model\n"
        "def build():\n    return create_model('small_vgg_bn', 10, ImageSpec(1, 16, 16, (0.5,), (0.5,)))\n"
    )
    Path("run.toml").write_text(
        f"[model]\nfactory = 'mf_factory:build'\nweights = '{source}'\n"
        "[data]\nauthorized = 'sklearn_digits'\n[output]\nfolder = 'out'\n"
    )
    result = invoke("evaluate", "run.toml", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "measure it with: modelfence evaluate run.toml --weights out" in result.stderr
    result = invoke("evaluate", "run.toml", "--weights", "out", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "finished output" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evaluate", "small_vgg_bn", "mnist"], "--classes (or model.classes) is missing"),
        (
            ["evaluate", "small_vgg_bn", "mnist", "--classes", 10],
            "--image-size (or a table [image], or --set image.channels=1 and so on) is missing",
        ),
        (["doctor", "torch.nn:Flatten", "--classes", 10], "--image-size (or a table [image]) is missing"),
        (
            ["evaluate", "small_vgg_bn", "mnist", "--classes", 10, "--image-size", 16],
            "without trained weights; give --weights (or model.weights)",
        ),
        (["evaluate", "SOURCE", "font_digits", "--classes", 9], "leave --classes (or model.classes) out"),
        (
            ["evaluate", "SOURCE", "font_digits", "--before", "small_vgg_bn"],
            "without trained weights; give a saved folder or its weights file instead",
        ),
        (["evaluate", "FACTORY", "mnist"], "give that as the model and --weights '"),
        (["doctor", "mynet.MyNet"], "a class or function of your own is written 'mynet:MyNet'"),
        (["evaluate", "my.net.build", "mnist"], "a class or function of your own is written 'my.net:build'"),
        (
            ["train", "--network", "mynet.MyNet", "--domain", "sklearn_digits", "--image-size", 16, "--output", "out"],
            "a class or function of your own is written 'mynet:MyNet'",
        ),
        (
            [
                *["train", "--network", "torch.nn:Flatten", "--domain", "sklearn_digits", "--image-size", 16],
                *["--output", "out"],
            ],
            "set model.classes to its number",
        ),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_errors_name_options_and_keys(
    invoke: Invoke, source: Path, tmp_path: Path, arguments: list[object], expected: str
) -> None:
    network = create_model("small_vgg_bn", 10, IMAGE)
    save_model(tmp_path / "theirs", network, reference="theirs:build", classes=10, image=IMAGE)
    places = {"SOURCE": source, "FACTORY": tmp_path / "theirs"}
    assert_bad_input(invoke(*[places.get(str(one), one) for one in arguments]), expected)
