"""Whoever gives something else where a network is wanted is told so in one line, at every public entry."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import modelfence as mf
from modelfence.data.domain import IndexedDomain
from modelfence.errors import InputError
from modelfence.evaluation.batch_norm import refreshed
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel
from modelfence.masking.preflight import classes_of, require_maskable
from modelfence.masking.selection import aliases, maskable, places
from modelfence.masking.unwrap import unwrap
from modelfence.models.load import save_model
from modelfence.models.training import accuracy_on, train
from modelfence.models.weights import fill
from modelfence.models.zoo import check_model
from modelfence.ownership.answers import ask
from modelfence.synthesis.judge import Judge

SPEC = mf.ImageSpec(channels=1, height=2, width=2, mean=(0.0,), std=(1 / 255,))
IMAGES, LABELS = torch.zeros(8, 1, 2, 2), torch.arange(8) % 2
DATA = TensorDataset(IMAGES, LABELS)
DOMAIN = IndexedDomain("zeros", IMAGES.byte().__getitem__, 8, spec=SPEC, labels=LABELS)
MARK = mf.Watermark("digits")


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()


NETWORK = network()
MASK = mf.Mask.of(NETWORK, {"1.weight": torch.ones(2, 4, dtype=torch.bool)})

ENTRIES: dict[str, Callable[[Any], object]] = {
    "protect": lambda it: mf.protect(it, authorized=DATA, unauthorized=DATA),
    "protect without data": mf.protect,
    "evaluate": lambda it: mf.evaluate(it, {"zeros": DATA}),
    "evaluate before": lambda it: mf.evaluate(network(), {"zeros": DATA}, before=it),
    "preflight": mf.preflight,
    "preflight with image": lambda it: mf.preflight(it, image=SPEC),
    "require_maskable": require_maskable,
    "classes_of": lambda it: classes_of(it, IMAGES),
    "Mask.of": lambda it: mf.Mask.of(it, {}),
    "Mask.combine": lambda it: mf.Mask.combine([MASK], it),
    "Mask.apply": MASK.apply,
    "Mask.apply_": MASK.apply_,
    "MaskedModel": MaskedModel,
    "verify": lambda it: mf.verify(it, DOMAIN, MARK),
    "verify references": lambda it: mf.verify(network(), DOMAIN, MARK, references=[it]),
    "ask": lambda it: ask(it, DOMAIN, MARK),
    "save_model": lambda it: save_model("nowhere", it, reference=None, classes=2, image=SPEC),
    "check_model": lambda it: check_model(it, "it", classes=2, image=SPEC),
    "fill": lambda it: fill(it, {}, "nothing"),
    "train": lambda it: train(it, DOMAIN, DOMAIN),
    "accuracy_on": lambda it: accuracy_on(it, DOMAIN),
    "refreshed": lambda it: refreshed(it, [IMAGES]),
    "has_batch_norm": has_batch_norm,
    "Judge": lambda it: Judge(it, SPEC),
    "digest_of": digest_of,
    "maskable": maskable,
    "aliases": aliases,
    "places": places,
    "unwrap": unwrap,
}
OTHERS = {
    "a text": "resnet18",
    "a class": nn.Linear,
    "a state dict": network().state_dict(),
    "a path": Path("model.safetensors"),
    "a tensor": torch.zeros(2),
    "a number": 3,
    "nothing": None,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_network_is_refused_in_one_line(entry: str, other: str) -> None:
    if (entry, other) == ("evaluate before", "nothing"):
        return  # the one place where none may be given
    with pytest.raises(InputError, match=r"= is .*; a torch\.nn\.Module is needed") as caught:
        ENTRIES[entry](OTHERS[other])
    assert "\n" not in str(caught.value)
    assert not Path("nowhere").exists()


def test_each_is_refused_for_the_network_alone() -> None:
    for name in ("preflight", "Mask.apply", "Mask.combine", "evaluate", "Judge", "verify references", "ask"):
        ENTRIES[name](NETWORK)
