"""Every kind of cell run for real, with two steps on small digits."""

import dataclasses
import errno
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.bench.fakes import cell as fake
from tests.methods import toy

from modelfence import SAMap
from modelfence.bench import jobs, tsne
from modelfence.bench.cells import Cell
from modelfence.bench.jobs import Worker
from modelfence.bench.ownership_job import mark_of
from modelfence.bench.tables.catalog import KINDS, request
from modelfence.data.catalog import names
from modelfence.data.sources import as_domain
from modelfence.data.splits import MOST_SEED
from modelfence.errors import ArtifactError, InputError
from modelfence.evaluation.result import Evaluation
from modelfence.methods.loop import _Run
from modelfence.methods.state import load_state, save_state

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
    worker = Worker(work)
    record = worker(one)
    worker.finished(one)
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
@pytest.mark.parametrize("why", ["damaged", "other settings"])
def test_a_state_that_can_t_be_used_is_said_and_replaced(work: Path, why: str) -> None:
    (one,) = cells("digits", "sa", "SAMap")
    state = work / "state" / one.name / "state.safetensors"
    if why == "damaged":
        state.parent.mkdir(parents=True)
        state.write_bytes(b"x")
    else:
        Worker(work)(dataclasses.replace(one, overrides=(*one.overrides, ("ascent", 0.7))))
        assert state.exists()
    said: list[str] = []
    worker = Worker(work, said.append)
    assert worker(one)["configuration"]["ascent"] == SAMap().ascent
    assert [text for text in said if "its saved state can't be used" in text]
    worker.finished(one)
    assert not state.parent.exists()


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_leaves_the_state(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = cells("digits", "sa", "SAMap")
    Worker(work)(one)
    state = work / "state" / one.name / "state.safetensors"

    def full(*_: object, **__: object) -> NoReturn:
        raise ArtifactError("full") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jobs, "protect", full)
    with pytest.raises(ArtifactError, match="full"):
        Worker(work)(one)
    assert state.exists()


def test_a_state_in_use_by_another_process_is_left(work: Path) -> None:
    (one,) = cells("digits", "sa", "SAMap")
    other = work / "state" / f"{one.name}-other" / "state.safetensors"
    other.parent.mkdir(parents=True)
    other.touch()
    Worker(work).finished(one)
    assert other.exists()


@pytest.mark.usefixtures("tiny")
def test_a_stopped_cell_goes_on_from_its_state(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = cells("digits", "sa", "SAMap:paper")
    worker = Worker(work)
    whole = worker(one)
    worker.finished(one)
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
    state = work / "state" / one.name / "state.safetensors"
    tensors, facts = load_state(state)
    save_state(state, tensors, {**facts, "spent": 5000.0})
    record = Worker(work)(one)
    assert steps == [1, 2, 2]
    assert record["evaluation"] == whole["evaluation"]
    assert record["history"][-1]["seconds"] >= 5000
    assert 5000 < record["seconds"] < 2 * 5000  # counted once


@pytest.mark.usefixtures("tiny")
def test_the_training_of_source_models_is_no_part_of_a_cell(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = cells("digits", "sa", "SL")
    real, hours = jobs.source_model, [0.0]

    def slow(*arguments: object, **rest: object) -> object:
        hours[0] += 3600
        return real(*arguments, **rest)

    monkeypatch.setattr(jobs, "source_model", slow)
    clock = time.time
    monkeypatch.setattr(jobs.time, "time", lambda: clock() + hours[0])
    assert Worker(work)(one)["seconds"] < 3600


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


def test_a_network_that_answers_one_thing_alone_is_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding by the spread of such features would end the process."""
    domains = {name: as_domain(toy.blobs(30, seed=seed), name=name) for seed, name in enumerate("ab")}
    monkeypatch.setattr(tsne, "features_of", lambda _, images: (None, torch.full((len(images), 4), 0.3)))
    points = tsne.points_of(toy.trained(), domains, seed=0)
    assert all(len(set(found["x"])) == 30 for found in points.values())
    monkeypatch.setattr(tsne, "features_of", lambda _, images: (None, torch.full((len(images), 4), torch.nan)))
    with pytest.raises(InputError, match="aren't finite"):
        tsne.points_of(toy.trained(), domains, seed=0)


def test_every_seed_that_can_be_asked_for_embeds(monkeypatch: pytest.MonkeyPatch) -> None:
    domains = {"a": as_domain(toy.blobs(30), name="a")}
    monkeypatch.setattr(tsne, "features_of", lambda _, images: (None, images.flatten(1)[:, :4]))
    assert len(tsne.points_of(toy.trained(), domains, seed=MOST_SEED)["a"]["x"]) == 30


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


def test_every_domain_of_the_catalog_has_a_mark_of_its_kind():
    """NTL marks digits, small photographs and VisDA; a photograph's mark on digits would be 80, not 20, strong."""
    kinds = {name: mark_of(fake(name)).kind for name in names()}
    assert {name for name, kind in kinds.items() if kind == "visda"} == {"visda_t", "visda_v"}
    assert {"mnist", "usps", "svhn", "mnist_m", "syn_digits", "sklearn_digits"} <= {
        name for name, kind in kinds.items() if kind == "digits"
    }
    assert {"cifar10", "stl10", "cinic10", "cinic10_imagenet", "pacs_photo", "office_home_art"} <= {
        name for name, kind in kinds.items() if kind == "objects"
    }
