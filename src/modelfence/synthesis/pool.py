"""Images that stand in for a source that nobody has any more."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.synthesis.draws import order
from modelfence.synthesis.fitting import Announce
from modelfence.synthesis.generation import generate
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.restyling import beside_copies, restyle
from modelfence.synthesis.translation import translate

NEAR = ("generated", "translated")
"""Parts that look like the source to the classifier; the others only share content with it."""

VERSION = 2
"""Of how images are made: raise it with every change to them, so that those kept from earlier aren't taken for new."""

Keep = Callable[[str, Callable[[], Tensor]], Tensor]

_UNSURE, _FEW, _ALIKE = 0.5, 0.02, 0.02


@dataclass(frozen=True)
class PseudoSource:
    """Synthetic images by the way they were made; see :func:`synthesize`.

    Attributes:
        image: What the classifier eats.
        parts: uint8 (N, C, H, W) on the CPU, by name: "generated" from noise, "translated" from unauthorized images
            into the source's style, "restyled" copies of unauthorized images in random styles.
        logits: What the classifier says of the images: float32 (N, K), by the same names.
        facts: Per part: images, classes present, mean confidence in 0..1, BatchNorm distance, contrast.

    Example:
        >>> from torch import nn
        >>> spec = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
        >>> judge = Judge(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), spec)
        >>> pool = synthesize(judge, generated=20, steps=2, batch_size=8)
        >>> pool.sample(5).shape, sorted(pool.parts)
        (torch.Size([5, 1, 8, 8]), ['generated'])
    """

    image: ImageSpec
    parts: Mapping[str, Tensor]
    logits: Mapping[str, Tensor]
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def near(self) -> Tensor:
        """The images that look like the source to the classifier, uint8 (N, C, H, W)."""
        return self._near(self.parts)

    @property
    def near_logits(self) -> Tensor:
        """What the classifier says of :attr:`near`, float32 (N, K)."""
        return self._near(self.logits)

    def _near(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name] for name in NEAR if name in values])

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Return random images of the near parts, normalized as the classifier takes them.

        Args:
            count: How many, from 1 to all.
            seed: Of the choice.

        Returns:
            float32 (count, C, H, W).

        Raises:
            InputError: There aren't so many.
        """
        near = self.near
        if not 1 <= count <= len(near):
            raise InputError(f"pseudo-source: count is {count}; a number from 1 to {len(near)} is needed")
        chosen = order(torch.Generator().manual_seed(seed), len(near))[:count]
        return self.image.normalize(near[torch.as_tensor(chosen)])

    def warnings(self) -> tuple[str, ...]:
        """Say in plain words where the images look collapsed, and what to do; empty where nothing does."""
        found = []
        for name, facts in self.facts.items():
            if name == "restyled":
                continue
            if facts["classes"] < facts["of_classes"]:
                missing = int(facts["of_classes"] - facts["classes"])
                found.append(
                    f"{name} images: {missing} of {int(facts['of_classes'])} classes are (nearly) missing; "
                    "the mask may lose them: more generator_steps, or a larger synthesis_batch"
                )
            if facts["confidence"] < _UNSURE:
                found.append(
                    f"{name} images: the model is unsure of them (mean confidence {facts['confidence']:.2f}); "
                    "more generator_steps"
                )
            if facts["contrast"] < _ALIKE:
                found.append(f"{name} images: they look alike (contrast {facts['contrast']:.3f}); try another seed")
        return tuple(found)


def synthesize(
    judge: Judge,
    unauthorized: Tensor | None = None,
    *,
    generated: int = 2048,
    translated: int = 2048,
    restyled: int = 3072,
    steps: int = 250,
    batch_size: int = 64,
    seed: int = 0,
    announce: Announce | None = None,
    keep: Keep | None = None,
) -> PseudoSource:
    """Make a pseudo-source from a classifier and, where there are any, unlabelled unauthorized images.

    Args:
        judge: The classifier.
        unauthorized: uint8 (M, C, H, W) without labels, or None.
        generated: Images from noise; 0 makes none.
        translated: Translations, half of them of unauthorized images and half of copies of these in random styles, so
            that not all look alike; none for a network without BatchNorm.
        restyled: Restyled copies of unauthorized images to make; those the classifier disagrees on are dropped.
        steps: To fit each generator.
        batch_size: Images a step.
        seed: Of everything.
        announce: Told how it goes.
        keep: From the name of a part and a function that makes it to the part; may bring back one made earlier.

    Raises:
        InputError: Nothing would be made.
        NonFiniteError: A generator's loss became NaN or infinite.
    """
    fitting: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed, "announce": announce}
    made = keep or _make
    parts: dict[str, Tensor] = {}
    if generated:
        parts["generated"] = made("generated", lambda: generate(judge, generated, **fitting))
    if unauthorized is not None and translated and judge.batch_norm:
        parts["translated"] = made(
            "translated",
            lambda: translate(judge, beside_copies(judge, unauthorized, translated, seed=seed), translated, **fitting),
        )
    if not parts:
        raise InputError(
            "pseudo-source: no images near the source would be made, and restyled copies alone don't keep it; set "
            "generated (or, with BatchNorm, translated) above 0"
        )
    if unauthorized is not None and restyled:
        parts["restyled"] = made("restyled", lambda: restyle(judge, unauthorized, restyled, seed=seed))
    return examined(judge, {name: pixels for name, pixels in parts.items() if len(pixels)})


def _make(_: str, make: Callable[[], Tensor]) -> Tensor:
    return make()


def examined(judge: Judge, parts: Mapping[str, Tensor]) -> PseudoSource:
    """Have a classifier look at synthetic images.

    Args:
        judge: The classifier.
        parts: uint8 images by part.
    """
    answers, facts = {}, {}
    for name, pixels in parts.items():
        logits = answers[name] = judge.logits(pixels)
        share = torch.bincount(logits.argmax(1), minlength=logits.shape[1]) / len(pixels)
        distance = judge.distance(pixels)
        facts[name] = {
            "images": float(len(pixels)),
            "classes": float((share > _FEW / logits.shape[1]).sum()),
            "of_classes": float(logits.shape[1]),
            "confidence": float(logits.softmax(1).amax(1).mean()),
            "contrast": float((pixels[: judge.at_once(1000)].float() / 255).std(dim=0, correction=0).mean()),
            **({} if distance is None else {"distance": distance}),
        }
    return PseudoSource(judge.image, dict(parts), answers, facts)
