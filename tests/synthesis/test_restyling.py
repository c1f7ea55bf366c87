"""Copies in random styles, beside their originals."""

import torch
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.restyling import beside_copies

SPEC = ImageSpec(channels=3, height=8, width=8, mean=(0.5,) * 3, std=(0.5,) * 3)


def judge():
    return Judge(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval(), SPEC)


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)


def test_every_image_is_followed_by_another_in_its_place():
    originals = images(40)
    both = beside_copies(judge(), originals, 40, seed=1)
    assert both.shape == (80, 3, 8, 8)
    assert both.dtype == torch.uint8
    kept, copies = both[::2], both[1::2]
    assert sorted(map(bytes, kept.flatten(1).numpy())) == sorted(map(bytes, originals.flatten(1).numpy()))
    assert not (kept == copies).flatten(1).all(1).any()


def test_fewer_images_than_wanted_are_taken_again_and_get_other_copies():
    both = beside_copies(judge(), images(3), 6, seed=0)
    kept, copies = both[::2], both[1::2]
    assert torch.equal(kept[:3], kept[3:])
    assert not torch.equal(copies[:3], copies[3:])


def test_more_images_than_wanted_are_chosen_at_random_by_the_seed():
    first, again, other = (beside_copies(judge(), images(50), 5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first[::2], other[::2])


def test_how_many_are_styled_at_once_changes_nothing(monkeypatch):
    whole = beside_copies(judge(), images(20), 20, seed=0)[::2]
    monkeypatch.setattr("modelfence.synthesis.restyling._PART", 7)
    assert torch.equal(whole, beside_copies(judge(), images(20), 20, seed=0)[::2])
