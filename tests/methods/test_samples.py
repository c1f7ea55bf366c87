"""What is kept to look at: enough to see what is missing, and what is said about it."""

import torch
from tests.methods import toy

import modelfence as mf
from modelfence.data.image_spec import ImageSpec
from modelfence.methods.samples import MOST, Synthetic, of_neighbours, sample, together, warning_of_neighbours

IMAGE = ImageSpec(channels=1, height=8, width=8, mean=(0.25,), std=(0.5,))
TINY = {"steps": 2, "batch_size": 16, "evaluate_every": 2, "precision": "fp32", "seed": 1}


def test_a_sample_shows_the_share_of_every_class():
    pixels = torch.arange(200, dtype=torch.uint8)[:, None, None, None]
    classes = (torch.arange(200) < 50).long()
    chosen = sample(pixels, classes)
    assert len(chosen.images) == len(chosen.classes) == MOST
    assert chosen.classes.tolist() == sorted(chosen.classes.tolist())
    assert chosen.classes.sum().item() == 16
    for image, label in zip(chosen.images.flatten().tolist(), chosen.classes.tolist(), strict=True):
        assert label == (image < 50)
    assert sample(pixels[:3], classes[:3]).images.flatten().tolist() == [0, 1, 2]


def test_classes_that_are_missing_around_the_source_are_told():
    pixels = torch.zeros(300, 1, 2, 2, dtype=torch.uint8)
    found = of_neighbours(pixels, torch.arange(300) % 2, of_classes=3)
    assert found.facts["neighbours"] == {"images": 300.0, "classes": 2.0, "of_classes": 3.0}
    told = warning_of_neighbours(found)
    assert told is not None
    assert told.startswith("neighbours images: 1 of 3 classes are (nearly) missing")
    assert warning_of_neighbours(of_neighbours(pixels, torch.arange(300) % 3, of_classes=3)) is None


def test_of_several_the_first_counts():
    first, second = (of_neighbours(torch.zeros(9, 1, 1, 1), torch.arange(9) % 3, of_classes=k) for k in (3, 4))
    both = together((first, second))
    assert first.facts != second.facts
    assert both.facts == first.facts
    assert together(()) == Synthetic()


def test_protect_hands_out_what_was_synthesized():
    small = {"generated": 80, "generator_steps": 2, "synthesis_batch": 16}
    target = torch.utils.data.TensorDataset(toy.blobs(100, inverted=True).tensors[0])
    for restyled in (0, 100):
        method = mf.SFMap(**TINY, **small, translated=0, restyled=restyled)
        result = mf.protect(toy.trained("cnn"), unauthorized=target, image=IMAGE, method=method)
        assert set(result.synthetic.samples) <= {"generated", "restyled"}
        assert result.synthetic.samples["generated"].images.shape == (MOST, 1, 8, 8)
        assert result.synthetic.facts["generated"]["images"] == 80
    paper = mf.SFMap(recipe="paper", **TINY, synthesis_batch=8, latent=6, width=8)
    result = mf.protect(toy.trained("cnn"), unauthorized=target, image=IMAGE, method=paper)
    assert set(result.synthetic.samples) == {"generated"}
    known = mf.protect(
        toy.trained("cnn"),
        authorized=toy.blobs(100),
        image=IMAGE,
        method=mf.DFMap(recipe="paper", **TINY, directions=2),
    )
    assert set(known.synthetic.samples) == {"neighbours"}
    both = {"authorized": toy.blobs(40), "unauthorized": toy.blobs(40, inverted=True)}
    assert mf.protect(toy.trained(), **both, method=mf.SAMap(steps=2, batch_size=8)).synthetic == Synthetic()
