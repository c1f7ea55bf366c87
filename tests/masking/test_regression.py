"""Masks written by every released format load forever, whatever today's code writes.

``tests/regression/format-<n>`` holds a mask of that format for :func:`base`, which no random number touches. The bits
are :func:`bits`. Add a folder when the format changes; never change or delete one.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelfence.masking.digest import digest_of
from modelfence.masking.mask import Mask

FOLDERS = sorted((Path(__file__).parents[1] / "regression").glob("format-*"))


class Base(nn.Module):
    """A convolution, BatchNorm, a linear layer used twice; every number is exact in binary."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3)
        self.normalization = nn.BatchNorm2d(3)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.normalization(self.convolution(x)).mean((2, 3))))


@torch.no_grad()
def base() -> nn.Module:
    """Build the network: every parameter and buffer is (0, 1, 2, ...) / 8 - 1, in order, statistics aside."""
    model = Base().eval()
    for value in model.parameters():
        value.copy_(torch.arange(value.numel()).reshape(value.shape) / 8 - 1)
    model.normalization.running_mean.copy_(torch.tensor([0.5, 0.25, 0.0]))
    model.normalization.running_var.copy_(torch.tensor([1.0, 4.0, 0.25]))
    return model


def bits() -> dict[str, Tensor]:
    """Cut every third weight of the convolution and the diagonal of the linear layer."""
    return {
        "convolution.weight": (torch.arange(27) % 3 != 0).reshape(3, 1, 3, 3),
        "first.weight": ~torch.eye(3, dtype=torch.bool),
    }


def test_there_is_one_for_the_format_of_today():
    from modelfence.masking.mask_file import FORMAT

    assert [folder.name for folder in FOLDERS] == [f"format-{number}" for number in range(1, FORMAT + 1)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_mask_of_any_format_loads_and_applies(folder):
    mask, model = Mask.load(folder), base()
    assert mask.kept.keys() == bits().keys()
    assert all(torch.equal(mask.kept[name], kept) for name, kept in bits().items())
    assert mask.aliases == {"second.weight": "first.weight"}
    assert mask.metadata["method"] == "by hand"
    assert mask.base_digest == digest_of(model)
    folded = mask.apply(model)
    assert digest_of(folded) == mask.folded_digest
    assert folded.second.weight.tolist() == [[0, -0.875, -0.75], [-0.625, 0, -0.375], [-0.25, -0.125, 0]]
    assert folded.convolution.weight.flatten()[:6].tolist() == [0, -0.875, -0.75, 0, -0.5, -0.375]


def test_the_digests_never_change():
    """A checkpoint's digest is in masks and reports that users keep; these were written down on the first day."""
    assert digest_of(base()) == "0441bc71f71f35ec45fd951b64e2891d6f45d3e24cbfad3a5162c1cd96df5d04"
    assert Mask.of(base(), bits()).folded_digest == "519663780f920f30ff0f356e8936be1d0a2270f25e5f6f944bd7613024696e20"
