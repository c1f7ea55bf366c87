import pytest
import torch

from modelfence.errors import InputError
from modelfence.models.autocast import autocast, default_precision, resolve_precision


@pytest.mark.parametrize(("bf16", "amx", "expected"), [(1, 0, "bf16"), (0, 1, "bf16"), (0, 0, "fp32")])
def test_processors_with_bf16_instructions_use_them(monkeypatch, bf16, amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(bf16), raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx), raising=False)
    assert default_precision("cpu") == expected
    assert resolve_precision("auto", "cpu") == expected


def test_a_torch_without_the_question_computes_in_fp32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert default_precision("cpu") == "fp32"


def test_other_devices_compute_in_fp32():
    assert default_precision("meta") == "fp32"


def test_a_precision_given_is_kept():
    assert resolve_precision("bf16", "cpu") == "bf16"
    assert resolve_precision("fp32", "cpu") == "fp32"


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match="precision 'fp16' isn't known; use 'auto', 'bf16' or 'fp32'"):
        autocast("cpu", "fp16")


def test_fp32_turns_an_outer_autocast_off():
    layer, images = torch.nn.Linear(4, 2), torch.ones(1, 4)
    with autocast("cpu", "bf16"):
        assert layer(images).dtype == torch.bfloat16
        with autocast("cpu", "fp32"):
            assert layer(images).dtype == torch.float32
    assert layer.weight.dtype == torch.float32
