"""Every kind of cell run for real, with two steps on small digits."""

from pathlib import Path

import pytest
from tests.bench.fakes import cell as fake

from modelfence.bench.cells import Cell
from modelfence.bench.jobs import Worker
from modelfence.bench.tables.catalog import KINDS, request
from modelfence.errors import ArtifactError
from modelfence.evaluation.result import Evaluation
from modelfence.methods.loop import _Run

PAIR = "sklearn_digits>font_digits"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def cells(table: str, setting: str, *chosen: str) -> list[Cell]:
    what = ["sklearn_digits"] if table == "ownership" else [PAIR]
    asked = request(table, budget="smoke", setting=setting, chosen=chosen, what=what)
    return KINDS[table].cells(asked)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("sa", "SL"),
        ("sa", "SAMap:paper"),
        ("sf", "SFMap"),
        ("sf", "SFMap:paper"),
        *((one, name) for one in ("sa", "sf") for name in ("NTL", "CUTI")),
    ],
)
def test_a_pair(work: Path, setting: str, name: str) -> None:
    (one,) = cells("digits", setting, name)
    record = Worker(work)(one)
    table = Evaluation.from_dict(record["evaluation"])
    assert [score.name for score in table.scores] == ["sklearn_digits", "font_digits"]
    assert [score.images for score in table.scores] == [20, 20]
    assert (table.scores[0].before is None) == (name == "SL")
    if name != "SL":
        assert record["configuration"]["steps"] == 2
    assert "sklearn_digits" in record["line"]
    assert not (work / "state").exists() or not list((work / "state").rglob("*"))


@pytest.mark.usefixtures("tiny")
def test_rivals_get_the_images_of_the_method_without_source(work: Path) -> None:
    """What another method of the same seed has made is found, not made again."""
    (one,) = cells("digits", "sf", "SAMap")
    Worker(work)(one)
    made = {path: path.stat().st_mtime_ns for path in (work / "synthetic").iterdir()}
    assert made
    (other,) = cells("digits", "sf", "SFMap")
    Worker(work)(other)
    assert {path: path.stat().st_mtime_ns for path in (work / "synthetic").iterdir()} == made


@pytest.mark.usefixtures("tiny")
def test_a_damaged_state_fails_once(work: Path) -> None:
    (one,) = cells("digits", "sa", "SAMap")
    state = work / "state" / one.name / "state.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"x")
    with pytest.raises(ArtifactError):
        Worker(work)(one)
    assert Worker(work)(one)["configuration"]["steps"] == 2
    assert not (work / "state" / "smoke").exists()


@pytest.mark.usefixtures("tiny")
def test_a_stopped_cell_goes_on_from_its_state(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = cells("digits", "sa", "SAMap:paper")
    whole = Worker(work)(one)
    steps = []
    real = _Run.measure

    def stop(run: _Run) -> None:
        real(run)
        steps.append(run.step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        Worker(work)(one)
    record = Worker(work)(one)
    assert steps == [1, 2, 2]
    assert record["evaluation"] == whole["evaluation"]


@pytest.mark.usefixtures("tiny")
def test_ownership(work: Path) -> None:
    unmarked, marked = cells("ownership", "sa", "SL", "SAMap")
    for one in (unmarked, marked):
        verdict = Worker(work)(one)["verdict"]
        assert (verdict["images"], len(verdict["p_references"])) == (20, 1)
        assert verdict["watermark"] == {"kind": "digits", "value": 20, "channel": 0}


@pytest.mark.usefixtures("tiny")
def test_features(work: Path) -> None:
    (one,) = cells("tsne", "sf", "SL")
    points = Worker(work)(one)["points"]
    assert {name: len(found["x"]) for name, found in points.items()} == {"sklearn_digits": 20, "font_digits": 20}


@pytest.mark.usefixtures("tiny")
def test_convergence_follows_both_domains(work: Path) -> None:
    (one,) = cells("convergence", "sf", "SFMap")
    history = Worker(work)(one)["history"]
    assert {"watch:sklearn_digits", "watch:font_digits"} <= set(history[-1])


def test_names_of_files_tell_cells_apart() -> None:
    names = [
        fake().name,
        fake(options=(("terms", "source"),)).name,
        fake(method="SAMap:paper").name,
        fake(seed=1).name,
        fake(setting="sf").name,
        fake(job="features").name,
    ]
    assert names[:3] == [
        "cpu/confine-sa/vgg11-32/SAMap/mnist-usps-0",
        "cpu/confine-sa/vgg11-32/SAMap-terms=source/mnist-usps-0",
        "cpu/confine-sa/vgg11-32/SAMap-paper/mnist-usps-0",
    ]
    assert len(set(names)) == len(names)
