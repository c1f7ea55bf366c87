"""What rivals are given where there is no source: the images that SF-MAP learns from."""

from pathlib import Path

import pytest
import torch
from tests.methods import toy
from torch import Tensor

from modelfence import ImageSpec, SFMap, protect
from modelfence.bench.pseudo_source import stand_ins
from modelfence.data.domain import IndexedDomain
from modelfence.data.sources import as_domain
from modelfence.methods import sfmap
from modelfence.synthesis.pool import PseudoSource

IMAGE = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.25,))
FEW = SFMap(
    steps=1,
    batch_size=8,
    generated=64,
    translated=64,
    restyled=64,
    generator_steps=4,
    synthesis_batch=16,
    precision="fp32",
)


def pixels(domain: IndexedDomain) -> Tensor:
    return IMAGE.denormalize(torch.cat([batch.images for batch in domain.once(16)]))


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_rivals_get_the_images_of_sf_map_with_the_models_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, target = toy.trained(kind), toy.blobs(80, seed=2, inverted=True)
    used: list[PseudoSource] = []
    real = sfmap.pseudo_source

    def spy(*arguments: object, **rest: object) -> PseudoSource:
        used.append(real(*arguments, **rest))
        return used[-1]

    monkeypatch.setattr(sfmap, "pseudo_source", spy)
    protect(model, unauthorized=target, image=IMAGE, method=FEW)
    given = {"target": as_domain(target, name="target", image=IMAGE, labelled=False)}
    made = stand_ins(model, given, IMAGE, FEW, cache=tmp_path)

    images = pixels(made.authorized)
    assert torch.equal(images, torch.cat(list(used[0].parts.values())))
    with torch.no_grad():
        assert torch.equal(made.authorized.labels, model(IMAGE.normalize(images)).argmax(1))
        unauthorized = made.unauthorized["target"]
        assert torch.equal(unauthorized.labels, model(IMAGE.normalize(pixels(unauthorized))).argmax(1))
    assert torch.equal(pixels(unauthorized), IMAGE.denormalize(target.tensors[0]))
