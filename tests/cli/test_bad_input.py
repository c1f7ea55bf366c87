"""What bad input gets: exit code 2, one line that names it, nothing overwritten."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tests.cli.conftest import IMAGE, Invoke, assert_bad_input, image_folder
from torch import nn

from modelfence import files
from modelfence.data.image_spec import ImageSpec
from modelfence.masking.mask import Mask
from modelfence.models.load import load_model, save_model
from modelfence.models.zoo import create_model

Protect = Callable[..., Result]


@pytest.fixture
def protect(invoke: Invoke, source: Path) -> Protect:
    """Run protect with a model and domains of choice; nothing of it must come to learning."""

    def run(
        *more: object,
        model: object = source,
        authorized: object = "sklearn_digits",
        unauthorized: object = "font_digits",
    ) -> Result:
        chosen = ["--model", model, "--authorized", authorized, "--unauthorized", unauthorized, "--output", "out"]
        result = invoke("protect", *chosen, *more)
        assert not Path("out").exists()
        return result

    return run


def test_an_unknown_domain(protect: Protect) -> None:
    assert_bad_input(protect(unauthorized="font_digit"), "'font_digit'", "Did you mean 'font_digits'")
    assert_bad_input(protect(unauthorized="./nowhere"), "nowhere: no such file or folder")


def test_a_label_set_that_is_not_the_model_s(protect: Protect, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "seven", classes=7)
    assert_bad_input(protect(unauthorized=folder), "domain 'seven'", "7 classes", "10")


def test_the_same_classes_in_another_order(protect: Protect, invoke: Invoke, tmp_path: Path) -> None:
    model = tmp_path / "model"
    names = [f"class_{label}" for label in (1, 0, *range(2, 10))]
    extra = {"class_names": names}
    network = create_model("small_vgg_bn", 10, IMAGE)
    save_model(model, network, reference="small_vgg_bn", classes=10, image=IMAGE, extra=extra)
    folder = image_folder(tmp_path / "ward")
    result = protect(model=model, unauthorized=folder)
    assert_bad_input(result, "domain 'ward': class 0 is 'class_0', for the model it is 'class_1'", "same order")


def test_evaluate_checks_class_names_against_the_model_s(invoke: Invoke, tmp_path: Path) -> None:
    network = create_model("small_vgg_bn", 3, IMAGE)
    extra = {"class_names": ["cat", "dog", "fox"]}
    save_model(tmp_path / "model", network, reference="small_vgg_bn", classes=3, image=IMAGE, extra=extra)
    folder = image_folder(tmp_path / "ward", classes=3)
    for number, name in enumerate(("cat", "fox", "owl")):
        (folder / f"class_{number}").rename(folder / name)
    result = invoke("evaluate", tmp_path / "model", folder)
    assert_bad_input(result, "domain 'ward': class 2 is 'owl', which the model doesn't have")


def test_parts_of_other_classes_are_refused_before_training(invoke: Invoke, tmp_path: Path) -> None:
    image_folder(tmp_path / "ward" / "train", classes=3, each=6)
    image_folder(tmp_path / "ward" / "test", classes=2)
    arguments = ("--network", "small_vgg_bn", "--image-size", 16, "--output", "out")
    result = invoke("train", "--domain", tmp_path / "ward", *arguments)
    assert_bad_input(result, "its parts 'train' and 'test' don't have the same classes (class_2)")
    assert "training" not in result.stderr
    assert not Path("out").exists()


def test_test_labels_beyond_the_classes_are_refused_before_training(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "ward").mkdir()
    pixels = [[[10 * row] * 16] * 16 for row in range(12)]
    for name, labels in (("train", [0, 1] * 6), ("test", [0, 1, 2] * 4)):
        table = {"image": pixels, "label": labels}
        Dataset.from_dict(table).to_parquet(tmp_path / "ward" / f"{name}.parquet")
    arguments = ("--network", "small_vgg_bn", "--image-size", 16, "--output", "out")
    result = invoke("train", "--domain", tmp_path / "ward", *arguments)
    assert_bad_input(result, "label 2 of image 2 is outside 0..1")
    assert "training" not in result.stderr


def test_a_folder_with_a_test_part_alone_is_measured(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    image_folder(tmp_path / "ward" / "test")
    result = invoke("evaluate", source, f"here={tmp_path / 'ward'}", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["scores"][0]["images"] == 20
    assert "not divided" not in result.stderr


def test_a_missing_split_and_an_empty_one(protect: Protect, tmp_path: Path) -> None:
    image_folder(tmp_path / "half" / "train")
    image_folder(tmp_path / "half" / "other")
    assert_bad_input(protect(unauthorized=tmp_path / "half"), "half: has no test split")
    image_folder(tmp_path / "hollow" / "train")
    (tmp_path / "hollow" / "test" / "class_0").mkdir(parents=True)
    assert_bad_input(protect(unauthorized=tmp_path / "hollow"), "hollow/test: no images in its 1 class folders")
    (tmp_path / "bare").mkdir()
    assert_bad_input(protect(unauthorized=tmp_path / "bare"), "bare: no class folders")


def test_an_image_that_can_not_be_decoded(protect: Protect, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "broken")
    (folder / "class_3" / "1.png").write_bytes(b"\x89PNG, cut off")
    assert_bad_input(protect(unauthorized=folder), "broken/class_3/1.png")


def test_a_row_that_can_not_be_decoded(protect: Protect, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = next(image_folder(tmp_path / "good", classes=1).rglob("*.png")).read_bytes()
    rows = [{"bytes": good}, {"bytes": b"no image"}]
    table = pa.table({"image": rows, "label": [0, 1]})
    pq.write_table(table, tmp_path / "two.parquet")
    assert_bad_input(protect(unauthorized=tmp_path / "two.parquet"), "two.parquet", "row 1")


def test_images_of_another_size_or_channel_count_than_the_weights(invoke: Invoke, source: Path) -> None:
    arguments = ["--weights", source / "model.safetensors", "--classes", 10, "--image-size", 16]
    result = invoke("evaluate", "small_vgg_bn", "sklearn_digits", *arguments)
    assert_bad_input(result, "model.safetensors", "'features.0.weight' is (32, 1, 3, 3) in the file, (32, 3, 3, 3)")
    result = invoke("evaluate", source, "sklearn_digits", "--image-size", 16)
    assert_bad_input(result, "image is ImageSpec(channels=1", "not ImageSpec(channels=3")
    small = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
    Path("run.toml").write_text(
        "[model]\nname = 'small_vgg_bn'\nclasses = 10\nweights = 'w.safetensors'\n"
        f"[image]\nchannels = 1\nheight = {small.height}\nwidth = {small.width}\nmean = [0.5]\nstd = [0.5]\n"
    )
    assert_bad_input(invoke("evaluate", "run.toml", "sklearn_digits"), "image is 8x8", "at least 16x16")


def test_weights_that_are_not_finite(protect: Protect, source: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    weights["features.0.weight"][0, 0, 0, 0] = torch.nan
    save_file(weights, tmp_path / "nan.safetensors")
    more = ["--weights", tmp_path / "nan.safetensors", "--classes", 10, "--set", "image.channels=1"]
    more += [
        part for text in ("height=16", "width=16", "mean=[0.5]", "std=[0.5]") for part in ("--set", f"image.{text}")
    ]
    assert_bad_input(
        protect(*more, model="small_vgg_bn"), "nan.safetensors: 1 of 288 values of 'features.0.weight' are NaN"
    )


def test_a_model_whose_answers_are_not_finite(protect: Protect, tmp_path: Path) -> None:
    model = create_model("small_vgg_bn", 10, IMAGE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3e38)
    save_model(tmp_path / "huge", model, reference="small_vgg_bn", classes=10, image=IMAGE)
    assert_bad_input(protect(model=tmp_path / "huge"), "gives logits that are NaN or infinite")


def test_an_altered_checkpoint(protect: Protect, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "altered")
    path = tmp_path / "altered" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert_bad_input(protect(model=tmp_path / "altered"), "model.safetensors: truncated or altered (SHA-256")


def test_an_altered_state(invoke: Invoke, protect_arguments: list[str], finished: Path) -> None:
    shutil.copytree(finished, "out")
    Path("out/unfinished").mkdir()
    shutil.copy("out/run.toml", "out/unfinished")
    Path("out/unfinished/state.safetensors").write_bytes(b"cut off")
    result = invoke(*protect_arguments, "--output", "out", "--resume")
    assert_bad_input(result, "out/unfinished/state.safetensors: truncated or altered", "--force")
    Path("out/unfinished/state.safetensors").unlink()
    Path("out/unfinished/state.safetensors").mkdir()
    result = invoke(*protect_arguments, "--output", "out", "--resume")
    assert_bad_input(result, "out/unfinished/state.safetensors: wasn't written by modelfence")
    assert Path("out/model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.json", '{"format": 1'),
        ("report.json", '{"format": 99}'),
        ("report.json", '{"format": 1, "evaluation": {"scores": 3}, "mask": {}}'),
        ("history.csv", "step,loss\nfirst,0.5\n"),
        ("run.toml", "[method"),
    ],
)
def test_a_report_of_an_altered_artifact(invoke: Invoke, finished: Path, name: str, content: str) -> None:
    shutil.copytree(finished, "out")
    Path("out", name).write_text(content)
    assert_bad_input(invoke("report", "out"))
    assert not Path("out/report").exists()


def test_a_report_of_something_else(invoke: Invoke, source: Path) -> None:
    assert_bad_input(invoke("report", source), "report.json: can't be read", "finished run")


def test_a_mask_for_another_base(finished: Path) -> None:
    other = load_model(finished).model
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"the mask was learned for another network .* digest [0-9a-f]{12}"):
        Mask.load(finished / "mask").apply(other)


def test_an_output_folder_that_is_not_empty(invoke: Invoke, protect_arguments: list[str]) -> None:
    Path("out").mkdir()
    Path("out/README.md").write_text("mine")
    assert_bad_input(invoke(*protect_arguments, "--output", "out"), "out: output folder isn't empty", "--force")
    assert_bad_input(
        invoke(*protect_arguments, "--output", "out", "--resume"), "out/README.md: wasn't written by modelfence"
    )
    Path("else").mkdir()
    Path("else/notes.txt").write_text("mine")
    assert_bad_input(invoke(*protect_arguments, "--output", "else", "--resume"), "else: has no run.toml", "--force")
    assert_bad_input(invoke(*protect_arguments, "--output", "out/README.md"), "is a file, not a folder")
    assert_bad_input(invoke(*protect_arguments, "--output", "out", "--resume", "--force"), "give one of them")
    train = ["train", "--domain", "sklearn_digits", "--network", "small_vgg_bn", "--output", "out"]
    assert_bad_input(invoke(*train), "out: output folder isn't empty")
    assert_bad_input(invoke("demo", "--output", "out"), "out: output folder isn't empty")
    assert [path.name for path in Path("out").iterdir()] == ["README.md"]
    assert Path("out/README.md").read_text() == "mine"


def test_bad_input_with_force_leaves_the_earlier_result(
    invoke: Invoke, protect_arguments: list[str], finished: Path
) -> None:
    shutil.copytree(finished, "out")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    for wrong in (["--unauthorized", "nowhere"], ["--set", "method.batch_size=4096"]):
        assert_bad_input(invoke(*protect_arguments, *wrong, "--output", "out", "--force"))
    assert before == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def test_an_output_folder_that_holds_the_base(invoke: Invoke, protect_arguments: list[str], source: Path) -> None:
    before = {path: path.read_bytes() for path in source.iterdir()}
    result = invoke(*protect_arguments, "--output", source, "--force")
    assert_bad_input(result, f"{source}: the output folder holds the model to be masked")
    assert before == {path: path.read_bytes() for path in source.iterdir()}


def test_no_space_left(invoke: Invoke, protect_arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    result = invoke(*protect_arguments, "--output", "out")
    assert_bad_input(result, "out/unfinished/run.toml: can't be written (No space left on device)")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["protect"], ["output.folder: is missing", "--output"]),
        (["protect", "--output", "out"], ["model: is missing", "--model"]),
        (["protect", "--output", "out", "--method", "SAMap", "--unauthorized", "usps"], ["SAMap needs authorized"]),
        (
            ["protect", "--output", "out", "--authorized", "mnist", "--unauthorized", "usps"],
            ["model: is missing", "--model"],
        ),
        (["protect", "--outptu", "out"], ["protect: No such option", "--outptu", "--output"]),
        (["protct"], ["No such command 'protct'"]),
        (["protect", "run.toml"], ["run.toml: run file can't be read"]),
        (["train"], ["model: is missing", "--network"]),
        (["train", "--network", "vgg11"], ["data.authorized: is missing", "--domain"]),
        (["train", "--network", "vgg11", "--domain", "mnist"], ["output.folder: is missing", "--output"]),
        (["train", "--network", "vgg11", "--epochs", "0"], ["--epochs: train.epochs: must be >= 1 (got 0)"]),
        (["train", "--epochs", "many"], ["train: ", "'--epochs'", "'many' is not a valid integer"]),
        (["train", "--network", "vg11", "--domain", "sklearn_digits", "--output", "out"], ["'vg11'", "'vgg11'"]),
        (["evaluate", "sl"], ["DOMAIN is missing"]),
        (["evaluate", "nowhere/sl", "mnist"], ["'nowhere/sl': no such folder"]),
        (["evaluate", "resnet18", "a=mnist", "a=usps"], ["two domains are called 'a'"]),
        (["evaluate", "resnet18", "a="], ["'a='", "a domain or name=domain is needed"]),
        (["evaluate", "resnet18", "mnist"], ["'resnet18'", "is missing"]),
        (
            ["doctor", "no.such.module:build", "--classes", "10", "--image-size", "32"],
            ["'no.such.module' can't be imported"],
        ),
        (["report", "nowhere"], ["nowhere/report.json: can't be read"]),
    ],
    ids=" ".join,
)
def test_wrong_use(invoke: Invoke, arguments: list[str], fragments: list[str]) -> None:
    assert_bad_input(invoke(*arguments), *fragments)


def test_evaluation_of_another_label_set(invoke: Invoke, source: Path, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "three", classes=3)
    assert_bad_input(invoke("evaluate", source, f"ward={folder}"), "domain 'ward' has 3 classes")


def test_an_authorized_name_that_is_not_among_the_domains(invoke: Invoke, source: Path) -> None:
    result = invoke("evaluate", source, "sklearn_digits", "--authorized", "sklearn_digit")
    assert_bad_input(result, "'sklearn_digit' isn't among the domains given. Did you mean 'sklearn_digits'?")


def test_a_factory_without_trust(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    save_model(folder, model, reference="theirs:build", classes=10, image=IMAGE)
    assert_bad_input(invoke("evaluate", folder, "sklearn_digits"), "factory 'theirs:build', whose code would run")
    assert json.loads((folder / "model.json").read_text())["reference"] == "theirs:build"
