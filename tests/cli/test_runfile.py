import dataclasses
import tomllib
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from modelfence import DFMap, SAMap, SFMap
from modelfence.cli.measured import Measured, measured_by, role_warning
from modelfence.cli.runfile import Run, difference, read_run, write_toml
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.models.training import TrainConfig
from modelfence.ownership.watermark import Watermark

EXAMPLES = sorted(Path(__file__).parents[2].joinpath("examples").glob("*.toml"))
RUN = """
[model]
name = "vgg11"
weights = "w.safetensors"
classes = 10
args = { dropout = 0.1 }
[image]
channels = 1
height = 32
width = 32
mean = [0.5]
std = [0.25]
[data]
authorized = "mnist"
unauthorized = { clinic = "scans/clinic b", usps = "usps" }
train_size = "whole"
[method]
recipe = "paper"
steps = 7
[output]
folder = "out"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_file_becomes_checked_settings(run_file: Path) -> None:
    run = read_run(run_file)
    assert run.model is not None
    assert run.model.reference == "vgg11"
    assert run.model.args == {"dropout": 0.1}
    assert run.image == ImageSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.25,))
    assert run.method == SAMap(recipe="paper", steps=7)
    assert run.data is not None
    assert run.data.authorized == {"mnist": "mnist"}
    assert run.data.unauthorized == {"clinic": "scans/clinic b", "usps": "usps"}
    assert (run.data.train_size, run.data.validation_size) == ("whole", 1000)
    assert run.train == TrainConfig()


def test_set_goes_before_options_before_the_file(run_file: Path) -> None:
    options = {"output.folder": ("--output", "b"), "data.seed": ("--x", 1), "data.authorized": ("--authorized", None)}
    run = read_run(run_file, options=options, sets=["data.seed=2", "method.steps = 9", "model.args.dropout=0.5"])
    assert run.output is not None
    assert run.data is not None
    assert run.model is not None
    assert (run.output.folder, run.data.seed, run.data.authorized) == ("b", 2, {"mnist": "mnist"})
    assert run.method == SAMap(recipe="paper", steps=9)
    assert run.model.args == {"dropout": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("usps", {"usps": "usps"}), ('["usps", "a/b.parquet"]', {"usps": "usps", "b": "a/b.parquet"})],
)
def test_set_takes_toml_or_else_text(run_file: Path, text: str, expected: dict[str, str]) -> None:
    run = read_run(run_file, sets=[f"data.unauthorized={text}"])
    assert run.data is not None
    assert run.data.unauthorized == expected


def test_set_can_not_smuggle_in_another_key(run_file: Path) -> None:
    run = read_run(run_file, sets=['output.folder="a"\nb = 1'])
    assert run.output is not None
    assert run.output.folder == '"a"\nb = 1'


def test_written_settings_read_back_the_same(run_file: Path, tmp_path: Path) -> None:
    run = read_run(run_file)
    again = tmp_path / "again.toml"
    again.write_text(write_toml(run.tables(*(field.name for field in dataclasses.fields(Run)))))
    assert read_run(again) == run
    assert tomllib.loads(again.read_text())["method"]["learning_rate"] == SAMap(recipe="paper").learning_rate


@pytest.mark.parametrize("kind", [SFMap, DFMap])
@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_only_settings_that_have_an_effect_are_written_out(tmp_path: Path, kind: type, recipe: str) -> None:
    method = kind(recipe=recipe, steps=7)
    written = Run(method=method).tables("method")
    other = "paper" if recipe == "default" else "default"
    assert written["method"].keys().isdisjoint(kind.ONLY[other])
    assert kind.ONLY[recipe] - written["method"].keys() <= {"memory_layers"}  # None can't be written
    path = tmp_path / "run.toml"
    path.write_text(write_toml(written))
    assert read_run(path).method == method
    assert read_run(path, sets=[f"method.recipe={other}"]).method == kind(recipe=other, steps=7)


@pytest.mark.parametrize(("old", "new"), [("default", "paper"), ("paper", "default")])
def test_another_recipe_takes_the_place_of_the_file_s(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(write_toml(Run(method=SAMap(recipe=old, seed=7, decay=0.25)).tables("method")))
    given = SAMap(recipe=old).steps
    recipe = f"method.recipe={new}"
    assert read_run(path, sets=[recipe]).method == SAMap(recipe=new, seed=7, decay=0.25)
    assert read_run(path, sets=[f"method.steps={given}", recipe]).method == SAMap(
        recipe=new, seed=7, decay=0.25, steps=given
    )
    same = SAMap(recipe=old, seed=7, decay=0.25)
    assert read_run(path).method == read_run(path, sets=[f"method.recipe={old}"]).method == same


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    run = read_run(path)
    assert run.model is not None
    assert run.output is not None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("method.steps=0", "--set: method.steps: must be >= 1 (got 0)"),
        ("method.seed=9007199254740993", "--set: method.seed: must be <= 9007199254740992 (got 9007199254740993)"),
        ("method.steps=2.5", "--set: method.steps: must be a whole number (got 2.5)"),
        ("method.learning_rate=0", "--set: method.learning_rate: must be > 0 (got 0)"),
        ("method.learning_rate=fast", "--set: method.learning_rate: must be a number (got 'fast')"),
        ("method.recipe=papr", "--set: method.recipe: must be 'default', 'paper' or 'ownership' (got 'papr')"),
        ("method.recipe=[1]", "--set: method.recipe: "),
        ("method.stepz=1", "--set: method.stepz: unknown key. Did you mean 'steps'? Known: "),
        ("method.name=SAMop", "--set: method.name: unknown method 'SAMop'. Did you mean 'SAMap'"),
        ("metod.steps=1", "--set: metod: unknown table. Did you mean 'method', 'model'? Known: model, image, "),
        ("method.threshold=1.0", "run.toml: method: score_init (0.01) must be above threshold (1.0)"),
        ("data.train_size=0", '--set: data.train_size: must be a whole number >= 1, or "whole" (got 0)'),
        ("data.unauthorized=3", "--set: data.unauthorized: must be a domain, a list of domains, or a table"),
        ("data.authorized=['a', 'b']", "--set: data.authorized: must be one domain (got a, b)"),
        ("data.unauthorized=mnist", "run.toml: data: 'mnist' can't be authorized and unauthorized"),
        ("data.unauthorized=['a/x', 'b/x']", "--set: data.unauthorized: two domains have the same name"),
        ("model.path=sl", "run.toml: model: needs one of path, name and factory (got path and name)"),
        ("model.classes=1", "--set: model.classes: must be >= 2 (got 1)"),
        ("model.args=1", "--set: model.args: must be a table (got 1)"),
        ("image.mean=[0.5, 0.5]", "image: mean has 2 values for 1 channels"),
        ("image.height=big", "--set: image.height: must be a whole number (got 'big')"),
        ("evaluate.precision=fp8", "--set: evaluate.precision: must be 'fp32' or 'bf16' (got 'fp8')"),
        ("output.folder.name=1", "--set: output.folder.name: 'folder' is a value, not a table"),
        ("output=out", "--set 'output=out': table.key=value is needed"),
        ("method.steps", "--set 'method.steps': table.key=value is needed"),
    ],
)
def test_a_wrong_value_is_named(run_file: Path, monkeypatch: pytest.MonkeyPatch, change: str, expected: str) -> None:
    monkeypatch.chdir(run_file.parent)
    with pytest.raises(InputError) as caught:
        read_run("run.toml", sets=[change])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[method]\nsteps = 0", "run.toml: method.steps: must be >= 1 (got 0)"),
        ("method = 3", "run.toml: method: is 3; a table [method] is needed"),
        ("[image]\nchannels = 1", "run.toml: image.height: is missing"),
        ("[output]\nfolder = ", "run.toml: isn't TOML: "),
        ("[model]\nfactory = 'nothing'", "run.toml: model: factory must be package.module:function (got 'nothing')"),
        ("[model]\npath = 'a'\nweights = 'b'", "run.toml: model: path is a folder with its own weights"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_run("run.toml")
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("", DFMap(steps=7)),
        ("authorized = 'mnist'", DFMap(steps=7)),
        ("unauthorized = 'usps'", SFMap(steps=7)),
        ("authorized = 'mnist'\nunauthorized = 'usps'", SAMap(steps=7)),
        ("authorized = 'mnist'\n[watermark]", SAMap(steps=7, recipe="ownership")),
        ("authorized = 'mnist'\nunauthorized = 'usps'\n[watermark]", SAMap(steps=7)),
    ],
)
def test_the_domains_choose_the_method_whose_settings_are_meant(tmp_path: Path, given: str, chosen: object) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[method]\nsteps = 7\n[data]\n{given}")
    method = read_run(path).method
    assert type(method) is type(chosen)
    assert method == chosen


@pytest.mark.parametrize("said", ["name = 'SAMap'", "recipe = 'default'"])
def test_a_watermark_leaves_a_method_or_recipe_that_was_chosen(tmp_path: Path, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[method]\n{said}\n[data]\nauthorized = 'mnist'\n[watermark]")
    assert read_run(path).method == SAMap()


@pytest.mark.parametrize(
    ("filed", "recipe", "left"),
    [
        ("steps = 300", "ownership", SAMap(recipe="ownership", steps=300)),
        ("steps = 750\nascent = 0.2\nseed = 3", "default", SAMap(seed=3)),
    ],
)
def test_another_recipe_over_the_one_that_a_watermark_implies(
    tmp_path: Path, filed: str, recipe: str, left: SAMap
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[method]\n{filed}\n[data]\nauthorized = 'mnist'\n[watermark]")
    assert read_run(path, sets=[f"method.recipe={recipe}"]).method == left


def test_steps_set_over_a_resolved_file_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    first = read_run(None, sets=["method.name=SAMap", "method.seed=3"])
    path.write_text(write_toml(first.tables("method")))
    assert read_run(path).method == SAMap(seed=3)
    method = read_run(path, sets=["method.steps=100"]).method
    assert method is not None
    assert method.for_network(nn.Linear(2, 2)).steps == 100


def test_another_recipe_of_a_method_that_the_domains_choose(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[method]\nrecipe = 'paper'\nsteps = 936\n[data]\nunauthorized = 'usps'")
    assert read_run(path, sets=["method.recipe=default"]).method == SFMap()


def test_a_watermark_reads_back_the_same(tmp_path: Path) -> None:
    pattern = tmp_path / "mark.png"
    Image.new("L", (4, 4), 255).save(pattern)
    table = {"kind": "custom", "value": 9, "channel": 0, "pattern": str(pattern)}
    run = read_run(None, options={"watermark": ("x", table)})
    assert run.watermark == Watermark("custom", value=9, pattern=pattern)
    assert run.tables("watermark") == {"watermark": table}


@pytest.mark.parametrize(
    ("name", "method", "measured"),
    [
        ("source-free.toml", SFMap, Measured({"mnist": "mnist", "usps": "usps"}, ("mnist",))),
        ("data-free.toml", DFMap, Measured({"mnist": "mnist", "usps": "usps", "svhn": "svhn"}, ("mnist",))),
        ("protect-mnist.toml", SAMap, Measured({"mnist": "mnist", "usps": "usps", "svhn": "svhn"}, ("mnist",))),
    ],
)
def test_examples_of_the_settings(name: str, method: type, measured: Measured) -> None:
    run = read_run(EXAMPLES[0].parent / name)
    assert type(run.method) is method
    assert measured_by(run) == measured


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["evaluate.authorized=usps"], "data.unauthorized: 'usps' can't be authorized and unauthorized"),
        (["data.watch={source = 'mnist'}"], "data.watch: 'source' can't be authorized and unauthorized"),
        (["data.watch={usps = 'elsewhere'}"], "data.watch: 'usps' is elsewhere here and usps elsewhere"),
    ],
)
def test_a_domain_has_one_name_and_one_role(sets: list[str], expected: str) -> None:
    given = ["data.authorized=mnist", "data.unauthorized=usps"]
    with pytest.raises(InputError) as caught:
        measured_by(read_run(None, sets=[*given, *sets]))
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("named", ["mnist", ["mnist"], {"mnist": "mnist"}])
def test_a_bare_name_to_evaluate_is_the_domain_that_the_file_has_under_it(named: object) -> None:
    data = {"unauthorized": "img/usps_flat", "watch": {"mnist": "img/mnist", "usps": "img/usps"}}
    run = read_run(None, options={"data": ("x", data), "evaluate.authorized": ("x", named)})
    assert measured_by(run, labels_of=()) == Measured({"mnist": "img/mnist", "usps": "img/usps"}, ("mnist",))
    data = {"authorized": {"here": "img/mnist"}, "unauthorized": {"there": "img/usps"}}
    run = read_run(None, options={"data": ("x", data), "evaluate.unauthorized": ("x", "there")})
    assert measured_by(run) == Measured({"here": "img/mnist", "there": "img/usps"}, ("here",))
    other = {"mnist": "elsewhere"}
    run = read_run(
        None, options={"data": ("x", {"watch": other}), "evaluate.authorized": ("x", {"mnist": "img/mnist"})}
    )
    with pytest.raises(InputError, match="'mnist' is elsewhere here and img/mnist elsewhere"):
        measured_by(run)


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        (
            ["data.unauthorized=usps", "data.watch=['mnist', 'usps']"],
            "'mnist' is only watched and counts as unauthorized",
        ),
        (["data.watch=['mnist', 'usps']"], "'mnist', 'usps' are only watched and count as unauthorized"),
        (["data.watch=['mnist', 'usps']", "evaluate.unauthorized=['mnist', 'usps']"], None),
        (["data.watch=['mnist', 'usps']", "evaluate.authorized=mnist"], None),
        (["data.authorized=svhn", "data.watch=['mnist', 'usps']"], None),
        (["data.unauthorized=usps", "data.watch={other = 'usps'}"], None),
        (["data.unauthorized=usps"], None),
    ],
)
def test_watched_domains_that_count_as_unauthorized_for_want_of_a_word(sets: list[str], warned: str | None) -> None:
    run = read_run(None, sets=sets)
    warning = role_warning(run, measured_by(run, labels_of=()))
    assert warning is None if warned is None else warning is not None and warning.startswith(warned)
    assert role_warning(run, Measured({"usps": "usps", "mnist": "mnist"}, ("mnist",))) is None


def test_a_saved_model_s_own_domain_counts_as_authorized_where_nothing_else_does() -> None:
    found = Measured({"usps": "usps", "mnist": "mnist"})
    assert found.with_origin({"domain": "mnist"}) == Measured({"mnist": "mnist", "usps": "usps"}, ("mnist",))
    assert found.with_origin({"domain": "svhn"}) == found.with_origin({}) == found
    known = Measured({"usps": "usps", "mnist": "mnist"}, ("usps",))
    assert known.with_origin({"domain": "mnist"}) == known


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml: run file can't be read \(No such file"):
        read_run("nowhere.toml")


def test_the_first_difference_is_named() -> None:
    assert difference({"a": {"b": 1}}, {"a": {"b": 1}}) == ""
    assert difference({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == "a.c (none, now 2)"
