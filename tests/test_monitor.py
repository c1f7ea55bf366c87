"""What is said of a model and images that don't belong together, before a mask is learned."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.methods import toy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from modelfence import ImageSpec, SAMap, protect

NORMALIZED = ImageSpec(1, 8, 8, (0.5,), (0.25,))
QUICK = SAMap(steps=4, batch_size=8, learning_rate=0.01)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = toy.trained()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(dim=1)


def warnings(model: nn.Module, source: object, method: SAMap = QUICK) -> tuple[str, ...]:
    target = toy.blobs(200, seed=2, inverted=True)
    return protect(model, authorized=source, unauthorized=target, image=NORMALIZED, method=method).warnings


def test_a_model_and_images_that_belong_together_are_nothing_to_speak_of() -> None:
    assert warnings(toy.trained(), toy.blobs(1200)) == ()


def test_probabilities_are_warned_of_once() -> None:
    (told,) = warnings(Softmax(), toy.blobs(1200))
    assert told.startswith("the model gives probabilities, not logits")


def test_float_images_that_were_not_normalized_are_warned_of() -> None:
    images, labels = toy.blobs(1200).tensors
    images = (images - images.min()) / (images.max() - images.min())
    (told, *_) = warnings(toy.trained(), TensorDataset(images, labels))
    assert told.startswith("domain 'authorized': its images lie in 0..1, where image= says that the model takes -2")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_model_that_does_not_know_its_own_images_is_warned_of(mode: str) -> None:
    images, labels = toy.blobs(1200).tensors
    model = toy.trained("cnn").train(mode == "train")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (told,) = warnings(model, TensorDataset(images, (labels + 1) % toy.CLASSES))
    assert told.startswith(
        "before anything is learned, the model is right on 0 % of 100 authorized images (chance: 10 %)"
    )
    assert model.training == (mode == "train")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_class_that_the_authorized_domain_has_no_image_of_is_warned_of(tmp_path: Path) -> None:
    for domain, classes in {"ward": "ab", "street": "abc"}.items():
        for name in "abc":
            (tmp_path / domain / name).mkdir(parents=True)
        for name in classes:
            for number in range(20):
                Image.new("L", (8, 8), 5 * number).save(tmp_path / domain / name / f"{number}.png")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    source, target = tmp_path / "ward", tmp_path / "street"
    told = protect(model, authorized=source, unauthorized=target, image=NORMALIZED, method=QUICK).warnings
    assert "the authorized domain has no image of class 'c': what the model knows of that may be lost" in told
    told = protect(model, authorized=target, unauthorized=source, image=NORMALIZED, method=QUICK).warnings
    assert not [text for text in told if "no image" in text]


def test_a_mask_that_cuts_nothing_is_warned_of() -> None:
    (told,) = warnings(toy.trained(), toy.blobs(1200), SAMap(steps=1, batch_size=8))
    assert told == "the mask cuts no weight, so the model is what it was: take more steps"
