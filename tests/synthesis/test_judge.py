"""The frozen classifier: what it says doesn't depend on how many images it looks at together, and memory is bounded."""

import pytest
import torch
from tests.synthesis.test_pool import IMAGE, classifier, pixels
from tests.synthesis.toy import spec
from torch import nn

from modelfence.masking.digest import digest_of
from modelfence.synthesis import judge as module
from modelfence.synthesis.fitting import in_parts
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pool import examined


@pytest.mark.parametrize("norm", [True, False])
def test_what_it_says_does_not_depend_on_the_parts(monkeypatch, norm):
    model = classifier(norm=norm)
    before = digest_of(model)
    judge = Judge(model, IMAGE)
    logits, distances = judge.logits(pixels()), judge.distances(pixels(), 6)
    monkeypatch.setattr(module, "_PIXELS", 7 * 256)
    assert judge.at_once(1000) == 7
    torch.testing.assert_close(judge.logits(pixels()), logits)
    if norm:
        torch.testing.assert_close(judge.distances(pixels(), 6), distances)
        expected = [judge.distance(pixels()[first : first + 6]) for first in range(0, len(pixels()) - 5, 6)]
        assert distances.tolist() == pytest.approx(expected)
        monkeypatch.undo()
        assert judge.distance(pixels()[:7]) != judge.distance(pixels())
        monkeypatch.setattr(module, "_PIXELS", 7 * 256)
        spread = torch.arange(7) * len(pixels()) // 7
        assert judge.distance(pixels()) == pytest.approx(Judge(model, IMAGE).distance(pixels()[spread]))
    else:
        assert distances is None
        assert judge.distance(pixels()) is None
    assert digest_of(model) == before


@pytest.mark.parametrize(("side", "together"), [(8, 1000), (32, 1000), (64, 1000), (224, 81), (2024, 1)])
def test_fewer_large_images_are_looked_at_together(side, together):
    assert Judge(nn.Flatten(), spec(channels=3, height=side)).at_once(1000) == together


def test_images_made_in_parts_are_pixels(monkeypatch):
    judge = Judge(classifier(), IMAGE)
    wanted = pixels()
    images = IMAGE.normalize(wanted)
    monkeypatch.setattr(module, "_PIXELS", 7 * 256)
    asked: list[int] = []

    def make(first: int, last: int) -> torch.Tensor:
        asked.append(last - first)
        return images[first:last]

    made = in_parts(make, 40, judge)
    assert asked == [7] * 5 + [5]
    assert made.dtype == torch.uint8
    assert torch.equal(made, wanted)


def test_a_part_of_one_image_has_facts_too():
    facts = examined(Judge(classifier(), IMAGE), {"restyled": pixels(1)}).facts["restyled"]
    assert facts["contrast"] == 0
    assert all(torch.tensor(value).isfinite() for value in facts.values())
