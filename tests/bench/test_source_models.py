from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelfence.bench import source_models
from modelfence.bench.budgets import Scale
from modelfence.bench.claims import claimed
from modelfence.bench.source_models import Busy, SourceModel, source_model

QUICK = SourceModel("small_vgg_bn", "sklearn_digits", 16, scale=Scale(64, 16, 10, epochs=1))


def test_the_folder_of_the_standard_scale_has_the_name_it_always_had(tmp_path: Path) -> None:
    assert SourceModel("vgg11", "mnist", 32).folder(tmp_path) == tmp_path / "sl" / "vgg11-mnist-32-0"
    same = SourceModel("vgg11", "mnist", 32, scale=Scale(test_images=2000))
    assert same.folder(tmp_path).name == "vgg11-mnist-32-0"
    assert QUICK.folder(tmp_path).name == "small_vgg_bn-sklearn_digits-16-0-64x1"
    assert [SourceModel(name, "mnist", 32).epochs for name in ("vgg11", "vgg11_bn", "resnet18")] == [12, 6, 6]


def test_it_is_trained_once_and_again_when_damaged(tmp_path: Path) -> None:
    said: list[str] = []
    first = source_model(tmp_path, QUICK, announce=said.append)
    again = source_model(tmp_path, QUICK, announce=said.append)
    assert len(said) == 2
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    weights = QUICK.folder(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    source_model(tmp_path, QUICK, announce=said.append)
    assert "trained anew" in said[2]
    assert len(said) == 5


def test_what_another_process_trains_isn_t_trained_here(tmp_path: Path) -> None:
    with claimed(QUICK.folder(tmp_path)), pytest.raises(Busy):
        source_model(tmp_path, QUICK)


def test_what_another_process_trains_can_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claimed(QUICK.folder(tmp_path))
    claim.__enter__()
    monkeypatch.setattr(source_models.time, "sleep", lambda _: claim.__exit__(None, None, None))
    assert source_model(tmp_path, QUICK, wait=True) is not None


def test_a_vit_gets_patches_that_leave_something_of_a_small_image(tmp_path: Path) -> None:
    wanted = replace(QUICK, network="vit_tiny_patch16_224", size=32)
    patches = torch.zeros(1, 3, 32, 32)
    made = source_model(tmp_path, wanted)
    again = source_model(tmp_path, wanted)  # of the folder
    assert made.patch_embed(patches).shape[1] == again.patch_embed(patches).shape[1] == 64
