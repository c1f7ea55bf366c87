"""What stands in for a source: how it is made, judged and labelled."""

import pytest
import torch
from tests.synthesis.toy import spec
from torch import Tensor, nn

from modelfence.errors import InputError
from modelfence.synthesis import neighbours as module
from modelfence.synthesis import pseudo_labels as labelling
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pool import PseudoSource, synthesize
from modelfence.synthesis.pseudo_labels import pseudo_labels
from modelfence.synthesis.restyling import recognized, restyle
from modelfence.synthesis.styles import random_style

IMAGE = spec(channels=1, height=16)


def classifier(*, norm: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = nn.BatchNorm2d(6) if norm else nn.Identity()
        model = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), middle, nn.ReLU(), nn.Flatten(), nn.Linear(294, 4))
        model.train()
        for _ in range(20):
            model(torch.randn(16, 1, 16, 16))
    return model.eval()


def pixels(count: int = 40) -> Tensor:
    return torch.randint(0, 256, (count, 1, 16, 16), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def pool(model: nn.Module, unauthorized: Tensor | None = None, **values: int) -> PseudoSource:
    few = {"generated": 30, "translated": 20, "restyled": 50, "steps": 3, "batch_size": 8, **values}
    return synthesize(Judge(model, IMAGE), unauthorized, **few)  # type: ignore[arg-type]


def test_parts_follow_what_is_there():
    assert set(pool(classifier()).parts) == {"generated"}
    with_images = pool(classifier(), pixels())
    assert {"generated", "translated"} <= set(with_images.parts)
    assert len(with_images.near) == 50
    assert "translated" not in pool(classifier(norm=False), pixels()).parts
    with pytest.raises(InputError, match="no images near the source would be made"):
        pool(classifier(), generated=0)


def test_a_pool_repeats_and_leaves_the_model_and_the_global_generator_alone():
    model = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = pool(model, pixels()), pool(model, pixels())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first.parts[name], second.parts[name]) for name in first.parts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(first.parts["generated"], pool(model, pixels(), seed=1).parts["generated"])


def test_samples_are_normalized_images_of_the_near_parts():
    made = pool(classifier(), pixels())
    sample = made.sample(10, seed=4)
    rows = {bytes(image.numpy().tobytes()) for image in made.near}
    assert all(bytes(image.numpy().tobytes()) in rows for image in IMAGE.denormalize(sample))
    with pytest.raises(InputError, match="from 1 to 50"):
        made.sample(51)


def test_a_fit_brings_images_nearer_to_the_source():
    distances = [
        synthesize(Judge(classifier(), IMAGE), generated=200, steps=steps, batch_size=32).facts["generated"]["distance"]
        for steps in (1, 60)
    ]
    assert distances[1] < distances[0]


def test_a_collapsed_pool_says_so():
    made = pool(classifier())
    facts = {"images": 30.0, "classes": 2.0, "of_classes": 4.0, "confidence": 0.3, "contrast": 0.001}
    worse = PseudoSource(IMAGE, made.parts, made.logits, {"generated": facts})
    texts = worse.warnings()
    assert len(texts) == 3
    assert "2 of 4 classes" in texts[0]
    assert "unsure" in texts[1]
    assert "alike" in texts[2]


def test_pseudo_labels_by_hand():
    judge = Judge(classifier(), IMAGE)
    probabilities = judge.logits(pixels()).softmax(1)
    threshold = float(probabilities.amax(1).median())
    labels = pseudo_labels(judge, pixels(), threshold=threshold, augmentations=3, seed=0)
    sure = probabilities.amax(1) >= threshold
    assert torch.equal(labels[sure].argmax(1), probabilities[sure].argmax(1))
    assert (labels[sure].amax(1) == 1).all()
    assert (labels[~sure].amax(1) < 1).all()
    assert torch.allclose(labels.sum(1), torch.ones(40))
    hard = pseudo_labels(judge, pixels(), threshold=0.0, augmentations=3, seed=0)
    assert torch.equal(hard, torch.nn.functional.one_hot(probabilities.argmax(1), 4).float())


def test_pseudo_labels_are_made_in_parts_that_stay_small(monkeypatch):
    seen = []

    def whole(images, *arguments, **values):
        seen.append(len(images))
        return images

    monkeypatch.setattr(labelling, "warp", whole)
    monkeypatch.setattr(labelling, "_PART", 16)
    judge = Judge(classifier(), IMAGE)
    labels = pseudo_labels(judge, pixels(), threshold=1.0, augmentations=2, seed=0)
    assert seen == [16, 16, 16, 16, 8, 8]
    assert torch.allclose(labels, judge.logits(pixels()).softmax(1), atol=1e-6)  # copies are the images themselves


def test_what_everything_is_taken_for_is_not_recognized():
    before = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
    after = torch.tensor([0] * 10 + [0] * 8 + [1] * 2 + [0] * 1 + [2] * 9)
    kept = recognized(before, after)
    assert kept[:10].all()  # 10 of 10 against 9 of 20
    assert kept.sum() == 10 + 2 + 9
    worse = torch.tensor([0] * 10 + [0] * 10 + [0] * 5 + [2] * 5)
    assert recognized(before, worse).nonzero().flatten().tolist() == [25, 26, 27, 28, 29]


def test_restyled_copies_are_images_that_keep_their_class():
    judge = Judge(classifier(), IMAGE)
    copies = restyle(judge, pixels(), 120, seed=0)
    assert copies.dtype == torch.uint8
    assert copies.shape[1:] == (1, 16, 16)
    assert len(copies) < 120
    assert torch.equal(copies, restyle(judge, pixels(), 120, seed=0))


@pytest.mark.parametrize("norm", [True, False])
def test_neighbours_are_sorted_by_how_far_their_style_is(monkeypatch, norm):
    judge, near, styled = Judge(classifier(norm=norm), IMAGE), pixels()[:16], []

    def style(images, generator):
        styled.append(random_style(images, generator))
        return styled[-1]

    monkeypatch.setattr(module, "random_style", style)
    monkeypatch.setattr(module, "recognized", lambda before, after: before == after)
    monkeypatch.setattr(module, "_PART", 48)
    found = module.neighbours(judge, pixels(), 330, near=near, quantile=0.5, seed=0)
    assert [len(part) for part in styled] == [48] * 6 + [32]  # whole groups: 320
    inside, outside = [], []
    for group in (torch.cat(styled) * 255).round().to(torch.uint8).split(16):
        distance = judge.distance(group)
        far = distance is None or distance > judge.distance(near)  # one group near the source: its quantiles are it
        (outside if far else inside).append(group)
    known, expected = judge.logits(found.outside).argmax(1), torch.cat(outside)
    assert torch.equal(known, found.labels)
    rows = {image.numpy().tobytes() for image in expected}
    assert 0 < len(found.outside) < len(expected)  # the others weren't recognized
    assert all(image.numpy().tobytes() in rows for image in found.outside)
    assert (len(inside) > 0) is norm
    assert (len(found.inside) > 0) is norm
    rows = {image.numpy().tobytes() for group in inside for image in group}
    assert all(image.numpy().tobytes() in rows for image in found.inside)


def test_few_images_near_the_source_make_a_group():
    judge = Judge(classifier(), IMAGE)
    found = module.neighbours(judge, pixels(), 320, near=pixels()[:5], quantile=0.5, seed=0)
    assert len(found.outside)


def test_the_logits_go_with_the_images():
    made = pool(classifier(), pixels())
    judge = Judge(classifier(), IMAGE)
    assert torch.allclose(made.near_logits, judge.logits(made.near), atol=1e-5)
    assert all(len(made.logits[name]) == len(part) for name, part in made.parts.items())
