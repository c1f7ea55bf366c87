"""What protect() and its result leave in a folder."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.methods import toy
from torch import nn

from modelfence import ImageSpec, Mask, SAMap, protect
from modelfence.errors import InputError
from modelfence.files import parse_json, unsealed
from modelfence.models.load import load_model
from modelfence.protect import Protection

SOURCE, TARGET = toy.blobs(seed=1), toy.blobs(seed=2, inverted=True)
TINY = {"steps": 2, "batch_size": 8, "evaluate_every": 2, "precision": "fp32"}


def test_a_record_of_any_depth_is_read_or_refused_in_one_way() -> None:
    """Python's limit is met by the parser or, a level earlier, by what computes the digest."""
    for depth in range(900, 1100):
        with pytest.raises(ValueError, match=r"nested too deeply|its content isn't what 'digest' was made of"):
            unsealed({"digest": "none", "deep": parse_json("[" * depth + "]" * depth)})


def test_a_state_that_is_replaced_is_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"authorized": SOURCE, "unauthorized": TARGET, "output": tmp_path}
    protect(toy.trained(), **given, method=SAMap(**TINY))
    assert not [one for one in caplog.messages if "state" in one]
    protect(toy.trained(), **given, method=SAMap(**TINY), resume=True)
    assert not [one for one in caplog.messages if "state" in one]
    protect(toy.trained(), **given, method=SAMap(**TINY))
    (told,) = [one for one in caplog.messages if "state" in one]
    assert told == f"{tmp_path}: the state of an earlier run is replaced; resume=True would go on with it"


def test_saving_over_an_earlier_result_leaves_nothing_of_it(tmp_path: Path) -> None:
    kept = {"weight": torch.ones(2, 4, dtype=torch.bool)}
    model = nn.Linear(4, 2)
    mask = Mask.of(model, kept)
    config = SAMap(steps=1)
    Protection(mask.apply(model), mask, {"a": mask, "b": mask}, [], config).save(tmp_path)
    (tmp_path / "README.md").write_text('library_name: "modelfence"')
    assert (tmp_path / "mask" / "1" / "mask.json").exists()
    Protection(mask.apply(model), mask, {}, [], config).save(tmp_path)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["history.csv", "mask/mask.json", "mask/mask.safetensors", "model.safetensors", "report.json"]


@pytest.mark.parametrize("masks", ["joint", "one_each"])
def test_what_python_saved_is_loaded_by_the_factory_alone(tmp_path: Path, masks: Literal["joint", "one_each"]) -> None:
    image = ImageSpec(1, 8, 8, (0.5,), (0.25,))
    method = SAMap(**TINY, masks=masks)
    found = protect(toy.trained("cnn"), authorized=SOURCE, unauthorized=TARGET, image=image, method=method)
    found.save(tmp_path)
    loaded = load_model("tests.methods.toy:cnn", weights=tmp_path)
    assert (loaded.image, loaded.classes, loaded.extra) == (image, toy.CLASSES, {"confined_by": "SAMap"})
    assert found.mask is not None
    assert found.mask.is_in(loaded.model)
    with pytest.raises(InputError, match="was saved without a reference; name what builds it and give weights="):
        load_model(tmp_path)


def test_the_checkpoint_has_every_name_of_a_tied_weight(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), second)
    mask = Mask.of(model, {"0.weight": torch.rand(4, 4) > 0.3})
    confined = mask.apply(model)
    Protection(confined, mask, {}, [], SAMap(steps=1)).save(tmp_path)
    fresh = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh(torch.ones(1, 4)), confined(torch.ones(1, 4)))


def test_states_of_others_stay_where_there_is_a_mask_for_each(tmp_path: Path) -> None:
    method = SAMap(**TINY, masks="one_each")
    (tmp_path / "state-dict.safetensors").write_text("mine")
    protect(toy.trained(), authorized=SOURCE, unauthorized={"a": TARGET}, method=method, output=tmp_path)
    assert (tmp_path / "state-dict.safetensors").read_text() == "mine"
    assert (tmp_path / "state-0.safetensors").is_file()


@pytest.mark.parametrize("masks", ["joint", "one_each"])
@pytest.mark.parametrize("name", ["state.safetensors", "state-0.safetensors", "state-7.safetensors"])
def test_a_checkpoint_of_somebody_else_under_the_name_of_a_state_is_refused(
    tmp_path: Path, masks: str, name: str
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / name)
    kept = (tmp_path / name).read_bytes()
    method = SAMap(**TINY, masks=masks)
    with pytest.raises(InputError, match=f"{name}: wasn't written by modelfence"):
        protect(toy.trained(), authorized=SOURCE, unauthorized={"a": TARGET}, method=method, output=tmp_path)
    assert (tmp_path / name).read_bytes() == kept


def test_masks_for_each_leave_the_state_of_an_earlier_run_of_one_mask(tmp_path: Path) -> None:
    for masks in ("joint", "one_each"):
        method = SAMap(**TINY, masks=masks)
        protect(toy.trained(), authorized=SOURCE, unauthorized={"a": TARGET}, method=method, output=tmp_path)
    assert (tmp_path / "state.safetensors").is_file()
