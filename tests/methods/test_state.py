"""The state of a run on disk: what is damaged, foreign, or can't be written."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods import toy
from torch.utils.data import TensorDataset

from modelfence import ImageSpec, SAMap, protect
from modelfence.errors import ArtifactError, InputError
from modelfence.methods.state import load_state, save_state, state_file
from modelfence.protect import Protection

TENSORS = {
    "score/0": torch.arange(6.0).reshape(2, 3).T,
    "best/weight": torch.tensor([True, False]),
    "adam/0/step": torch.tensor(3.0),
}
FACTS = {"step": 3, "history": [{"loss": 0.5}], "best": [-float("inf"), 0]}


def test_tensors_and_facts_come_back(tmp_path):
    file = tmp_path / "state.safetensors"
    save_state(file, TENSORS, FACTS)
    tensors, facts = load_state(file)
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


def test_every_truncation_and_every_turned_byte_is_refused(tmp_path):
    """Spaces that pad the header aside, which carry nothing."""
    file = tmp_path / "state.safetensors"
    save_state(file, TENSORS, FACTS)
    content = file.read_bytes()
    undetected = []
    with file.open("r+b", buffering=0) as handle:
        for position in range(len(content)):
            for wrong in (
                content[:position],
                content[:position] + bytes([content[position] ^ 255]) + content[position + 1 :],
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :],
            ):
                handle.seek(0)
                handle.write(wrong)
                handle.truncate()
                try:
                    load_state(file)
                except ArtifactError as error:
                    assert str(file) in str(error)
                    assert "\n" not in str(error)
                else:
                    undetected.append(position)
    assert {content[position] for position in undetected} <= {ord(" ")}


def test_a_number_changed_in_the_facts_is_refused(tmp_path):
    """The facts decide at which step a run goes on."""
    file = tmp_path / "state.safetensors"
    save_state(file, TENSORS, FACTS)
    content = file.read_bytes()
    assert content.count(rb"\"step\": 3") == 1
    file.write_bytes(content.replace(rb"\"step\": 3", rb"\"step\": 2"))
    with pytest.raises(ArtifactError, match="altered .* start again with --force"):
        load_state(file)


@pytest.mark.parametrize("facts", ["[" * 100_000, "{", "[]", "3", "null"])
def test_facts_that_are_none_are_refused_in_one_line(tmp_path, facts, monkeypatch):
    file = tmp_path / "state.safetensors"
    monkeypatch.setattr("modelfence.methods.state.json.dumps", lambda _: facts)
    save_state(file, TENSORS, FACTS)
    with pytest.raises(ArtifactError, match="state.safetensors: truncated or altered") as caught:
        load_state(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_a_text_that_can_be_no_path(name):
    for use in (load_state, state_file, lambda path: save_state(Path(path), TENSORS, FACTS)):
        with pytest.raises(InputError, match="path") as caught:
            use(name)
        assert "\n" not in str(caught.value)


# Through protect


IMAGE = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.25,))


def go(
    folder: Path,
    *,
    kind: str = "mlp",
    resume: bool = True,
    source: int = 1,
    image: ImageSpec = IMAGE,
    labels: int = 0,
    **values: Any,
) -> Protection:
    settings = {"steps": 6, "batch_size": 16, "evaluate_every": 3, "learning_rate": 2e-3, "precision": "fp32"} | values
    return protect(
        toy.trained(kind),
        authorized=relabelled(toy.blobs(80, seed=source), labels),
        image=image,
        unauthorized=toy.blobs(80, seed=2, inverted=True),
        method=SAMap(**settings),
        output=folder,
        resume=resume,
    )


def relabelled(domain: TensorDataset, shift: int) -> TensorDataset:
    images, labels = domain.tensors
    return TensorDataset(images, (labels + shift) % 10)


def one_bit() -> torch.nn.Module:
    model = toy.trained("mlp")
    model[3].bias.data[0] += 1e-3
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "configuration"),
        ({"steps": 7}, "configuration"),
        ({"recipe": "paper"}, "configuration"),
        ({"kind": "cnn"}, "model"),
        ({"source": 9}, "domains"),
        ({"image": replace(IMAGE, std=(0.5,))}, "image"),
        ({"labels": 1}, "domains"),
    ],
)
def test_another_configuration_model_or_domain_is_not_resumed(tmp_path, change, named):
    go(tmp_path)
    file = tmp_path / "state.safetensors"
    before = file.read_bytes()
    with pytest.raises(InputError, match=f"the saved run has another {named}; use the same, or start again"):
        go(tmp_path, **change)
    assert file.read_bytes() == before


def test_a_model_that_differs_in_one_number_is_not_resumed(tmp_path):
    go(tmp_path)
    data = toy.blobs(80)
    method = SAMap(steps=6, batch_size=16, evaluate_every=3, learning_rate=2e-3, precision="fp32")
    with pytest.raises(InputError, match="another model"):
        protect(one_bit(), authorized=data, unauthorized=data, method=method, output=tmp_path, resume=True)


@pytest.mark.parametrize("damage", [lambda c: c[:100], lambda c: c[:-1], lambda c: c[:-1] + b"\x7f", lambda c: b""])
def test_a_damaged_state_is_refused_and_kept(tmp_path, damage):
    go(tmp_path)
    file = tmp_path / "state.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ArtifactError, match="state.safetensors: .*altered .* start again with --force"):
        go(tmp_path)
    assert file.exists()


def test_a_finished_run_resumes_to_the_same_mask_without_a_step(tmp_path):
    first = go(tmp_path)
    assert first.mask.cut_share() > 0
    file = tmp_path / "state.safetensors"
    before = file.read_bytes()
    again = go(tmp_path)
    assert again.mask.folded_digest == first.mask.folded_digest
    assert again.history == first.history
    assert file.read_bytes() == before


def test_without_resume_the_run_starts_anew(tmp_path):
    first = go(tmp_path)
    second = go(tmp_path, resume=False, seed=3)
    assert second.mask.folded_digest != first.mask.folded_digest
    assert go(tmp_path, seed=3).mask.folded_digest == second.mask.folded_digest


def test_resuming_where_nothing_was_saved_starts(tmp_path):
    assert go(tmp_path / "new").history[-1]["step"] == 6


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_no_space_left_is_one_line_and_the_previous_state_survives(tmp_path, monkeypatch, call):
    """The disk fills up between the first and the second time that the state is saved."""
    file = tmp_path / "state.safetensors"
    real: Callable[..., None] = getattr(os, call)
    calls: list[int] = []

    def second_time_full(*arguments: Any) -> None:
        calls.append(1)
        return real(*arguments) if len(calls) == 1 else full_disk()

    with monkeypatch.context() as patched:
        patched.setattr(os, call, second_time_full)
        with pytest.raises(ArtifactError, match="No space left on device.*previous file is unchanged") as caught:
            go(tmp_path, resume=False)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
    assert load_state(file)[1]["step"] == 3
    whole = go(tmp_path / "whole", resume=False)
    assert go(tmp_path).mask.folded_digest == whole.mask.folded_digest


def test_a_mask_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch):
    folder = go(tmp_path / "run").mask.save(tmp_path / "mask")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = go(tmp_path / "other", seed=5).mask
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ArtifactError, match="No space left"):
        other.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["state.safetensors", "state-1.safetensors"])
def test_a_folder_where_a_state_would_be_is_refused_before_any_step(tmp_path, monkeypatch, name):
    monkeypatch.setattr("modelfence.methods.loop.learn", lambda *_, **__: pytest.fail("it learned"))
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: is a folder.*; move it away"):
        go(tmp_path)


def test_an_output_that_can_not_be_is_refused_before_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr("modelfence.methods.loop.learn", lambda *_, **__: pytest.fail("it learned"))
    file = tmp_path / "file"
    file.touch()
    for folder, text in ((file, "is a file"), (file / "below", "is a file"), ("a\0b", "path"), ("a" * 5000, "path")):
        with pytest.raises(InputError, match=text) as caught:
            go(folder)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ArtifactError, match="no permission"):
        go(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("cache", ["a\0b", "a" * 5000])
def test_a_cache_that_can_not_be_is_refused(cache):
    with pytest.raises(InputError, match="path"):
        protect(toy.trained(), authorized=toy.blobs(80), unauthorized=toy.blobs(80), cache=cache)
