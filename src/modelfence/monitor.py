"""Accuracy on images kept apart, measured while a mask is learned."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from modelfence.data.class_names import without_images
from modelfence.data.domain import IndexedDomain, labels_of
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError
from modelfence.evaluation.metrics import balanced_accuracy
from modelfence.evaluation.runner import device_of, in_float32, untouched
from modelfence.masking.preflight import PROBABILITIES, are_probabilities, classes_of
from modelfence.models.outputs import logits_of

if TYPE_CHECKING:
    from modelfence.data.domain import Domain
    from modelfence.data.image_spec import ImageSpec
    from modelfence.methods.loop import Row

_LIMIT = 500
_BATCH = 250
_FEW = 100
_ABOVE_CHANCE = 0.05
_BELOW = -0.2  # what black becomes where images are normalized


@dataclass(frozen=True)
class HeldOut:
    """The domains given, each cut into a part to learn on and a part to measure on.

    Attributes:
        classes: Number of the model's classes, K.
        source: Held-out part of the authorized domain, or None.
        targets: Held-out parts of the unauthorized domains, by name.
        source_rest: What is left of the authorized domain to learn on.
        target_rest: What is left of the unauthorized domains.
    """

    classes: int
    source: "Domain | None"
    targets: "Mapping[str, Domain]"
    source_rest: "Domain | None"
    target_rest: "Mapping[str, Domain]"

    @classmethod
    def take(
        cls,
        model: nn.Module,
        source: "Domain | None",
        targets: "Mapping[str, Domain]",
        *,
        share: float,
        seed: int,
    ) -> "HeldOut":
        """Keep a share of every domain apart, after a first look at images and labels.

        Raises:
            InputError: The model doesn't take the images, or a domain has no labels or labels beyond K.
        """
        if "authorized" in targets:
            raise InputError("an unauthorized domain is named 'authorized'; give it another name")
        named = {**({"authorized": source} if source is not None else {}), **targets}
        classes = check_images(model, named)
        for name, domain in named.items():
            _check_labels(name, domain, classes)
        if share == 0:
            return cls(classes, source, targets, source, targets)
        parts = {name: _split(name, domain, share, seed) for name, domain in named.items()}
        rest, kept = ({name: pair[side] for name, pair in parts.items()} for side in (0, 1))
        return cls(classes, kept.pop("authorized", None), kept, rest.pop("authorized", None), rest)

    def only(self, name: str) -> "HeldOut":
        """Return the same with one unauthorized domain alone."""
        return replace(self, targets={name: self.targets[name]}, target_rest={name: self.target_rest[name]})

    def __call__(self, student: nn.Module) -> "Row":
        """Measure; "gap" is authorized accuracy less the mean balanced accuracy on the unauthorized domains."""
        row: Row = {}
        lost = []
        if self.source is not None:
            predictions, labels = _predict(student, self.source)
            row["source_accuracy"] = _accuracy(predictions, labels)
        for name, domain in self.targets.items():
            predictions, labels = _predict(student, domain)
            row[f"target_accuracy:{name}"] = _accuracy(predictions, labels)
            lost.append(balanced_accuracy(predictions, labels, self.classes))
        if lost:
            row["gap"] = row.get("source_accuracy", 0.0) - sum(lost) / len(lost)
        return row


@dataclass(frozen=True)
class Watch:
    """Labelled domains that are measured while a mask is learned, and never used for it.

    Attributes:
        domains: By name.
    """

    domains: "Mapping[str, Domain]"

    @classmethod
    def of(cls, model: nn.Module, domains: "Mapping[str, Domain]") -> "Watch":
        """Watch domains after a first look at images and labels.

        Raises:
            InputError: The model doesn't take the images, or a domain has no labels or labels beyond its classes.
        """
        classes = check_images(model, domains)
        for name, domain in domains.items():
            _check_labels(name, domain, classes)
        return cls(domains)

    @torch.no_grad()
    def __call__(self, student: nn.Module) -> "Row":
        """Return the student's accuracy on every domain, "watch:<name>", in 0..1."""
        return {f"watch:{name}": _accuracy(*_predict(student, domain)) for name, domain in self.domains.items()}


def check_images(model: nn.Module, named: "Mapping[str, Domain]", image: "ImageSpec | None" = None) -> int:
    """Try a model on a few images of every domain, whose labels aren't looked at; return its number of classes.

    Args:
        model: The network.
        named: Domains by name.
        image: What the model eats; where there is no domain, it is tried on black images.

    Raises:
        InputError: The model doesn't take the images, or the domains' images differ in shape.
    """
    classes = 0
    shapes: dict[str, tuple[int, ...]] = {}
    for name, domain in named.items():
        batch = next(iter(domain.once(8)))
        try:
            classes = classes_of(model, batch.images)
        except InputError as error:
            raise InputError(f"domain {name!r}: {error}") from error
        shapes[name] = tuple(batch.images.shape[1:])
    if not named and image is not None:
        try:
            classes = classes_of(model, torch.zeros(2, *image.shape))
        except InputError as error:
            raise InputError(f"image=: {error}") from error
    if classes == 1:
        raise InputError("the model gives 1 logit; a classifier of at least 2 classes can be confined")
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items())
        raise InputError(f"the domains' images differ in shape ({listed}); bring them to one, for instance by image=")
    return classes


@torch.no_grad()
def doubts(
    model: nn.Module, named: "Mapping[str, Domain]", image: "ImageSpec | None", source: "Domain | None"
) -> "Iterator[str]":
    """Say what makes it unlikely that a model and its images belong together.

    Args:
        model: The network as it was given.
        named: All domains, by name; eight images of each are looked at, their labels aren't.
        image: What the model eats, where that is known.
        source: Labelled images that the model should be right on, or None; a hundred are looked at.

    Yields:
        Sentences without a full stop, none where nothing speaks against it. Domains that can be gone through once alone
        are left to learn from.
    """
    network = in_float32(model, device_of(model))
    with untouched(network):
        for name, domain in named.items():
            if not isinstance(domain, IndexedDomain):
                continue
            images = next(iter(domain.once(8, device=device_of(network)))).images
            if image is not None and float(images.min()) >= 0 and float(images.max()) <= 1 and _dark(image) < _BELOW:
                yield (
                    f"domain {name!r}: its images lie in 0..1, where image= says that the model takes "
                    f"{_dark(image):.2g} for black: float images are taken as normalized; give pixels 0..255 as uint8"
                )
            logits = logits_of(network(images))
            if are_probabilities(logits):
                yield f"the model gives {PROBABILITIES}: return what softmax is applied to"
        for lacking in without_images(named.get("authorized")):
            yield f"the authorized domain has no image of class {lacking!r}: what the model knows of that may be lost"
        if not isinstance(source, IndexedDomain):
            return
        predictions, labels = _predict(network, source, limit=_FEW)
        accuracy, chance = _accuracy(predictions, labels), 1 / logits.shape[1]
        if len(labels) == _FEW and accuracy <= chance + _ABOVE_CHANCE:
            yield (
                f"before anything is learned, the model is right on {100 * accuracy:.0f} % of "
                f"{_FEW} authorized images (chance: {100 * chance:.2g} %): check its weights, the order of its classes "
                "and how its images are normalized"
            )


def _dark(image: "ImageSpec") -> float:
    """What black becomes, on the mean over the channels."""
    return sum(-mean / std for mean, std in zip(image.mean, image.std, strict=True)) / len(image.mean)


def _check_labels(name: str, domain: "Domain", classes: int) -> None:
    labels_of(next(iter(domain.once(8))), name)
    if domain.classes is not None and len(domain.classes) != classes:
        raise InputError(
            f"domain {name!r} has {len(domain.classes)} classes, the model gives {classes}; "
            "map the labels to the model's classes, or take another domain"
        )
    if isinstance(domain, StreamDomain):
        domain.expect_classes(classes)
    labels = getattr(domain, "labels", None)
    if labels is not None and int(labels.max()) >= classes:
        raise InputError(f"domain {name!r} has label {int(labels.max())}, the model has classes 0..{classes - 1}")


def _accuracy(predictions: Tensor, labels: Tensor) -> float:
    return float((predictions == labels).float().mean())


@torch.no_grad()
def _predict(student: nn.Module, domain: "Domain", *, limit: int = _LIMIT) -> tuple[Tensor, Tensor]:
    device = next(student.parameters()).device
    predictions, labels = [], []
    for batch in domain.once(_BATCH, limit=limit, device=device):
        predictions.append(logits_of(student(batch.images)).argmax(dim=1))
        labels.append(labels_of(batch, domain.name))
    return torch.cat(predictions), torch.cat(labels)


def _split(name: str, domain: "Domain", share: float, seed: int) -> "tuple[Domain, Domain]":
    split = getattr(domain, "split", None)
    if split is None:
        raise InputError(f"domain {name!r} has no split method to hold images out with; set held_out=0")
    rest, held_out = split(share, seed=seed)
    return rest, held_out
