"""What the settings without a source share: their configuration, and the images that stand in for what is missing."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.data.domain import Domain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError, InputError
from modelfence.files import sha256
from modelfence.masking.digest import digest_of, digest_of_tensors
from modelfence.methods.alternating import AlternatingConfig, Weight
from modelfence.methods.config import STRICT, MaskConfig, Positive
from modelfence.methods.loop import Session
from modelfence.methods.state import load_state, save_state
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pool import VERSION, PseudoSource, synthesize

Count = Annotated[int, Field(ge=0)]

_POOL = frozenset({"generated", "translated", "generator_steps", "restyled_weight"})
"""Fields that the default recipe alone uses."""

_TURNS = frozenset(one.name for one in fields(AlternatingConfig)) - {one.name for one in fields(MaskConfig)}
"""Fields that the paper's recipe uses; ``synthesis_batch`` is the only one that the default uses too."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyntheticConfig(AlternatingConfig):
    """Settings of the images that stand in for a missing source.

    By the default recipe they are made once, before the mask is learned. By the recipe "paper" two generators make them
    anew in every step and learn in turn with the mask: their settings are those of :class:`AlternatingConfig`.
    A field that the chosen recipe doesn't use is refused where its value isn't the default.

    Attributes:
        generated: Images generated from noise; 0 makes none. (Default recipe; no effect where real source images are
            given.)
        translated: Images translated into the source's style, unauthorized ones and copies of them in random styles
            (networks with BatchNorm only); 0 makes none. (Default recipe; no effect where real source images are
            given.)
        generator_steps: Steps to fit each generator. (Default recipe; no effect where real source images are given.)
        synthesis_batch: Images a step of those fits; with the recipe "paper", images a step that the generators learn
            from, both together. (No effect where real source images are given.)
        source_weight: Weight of the agreement with the original model on images near the source.
        restyled_weight: The same on copies in random styles, in proportion to their number where there are fewer of
            them than of images near the source. (Default recipe.)
        tolerance: Unlearning slows down in proportion as the student's disagreement with the original model on kept
            images (mean KL, in nats) nears this, and pauses above it; None never does.
        dependence_weight: Weight of how much the answers to unauthorized images depend on the image
            (:func:`modelfence.losses.classification.dependence`): unlearning answers of which many were wrong can
            raise the accuracy, answers that are all the same can't be better than chance.
        terms: "both"; or one alone, for ablation: "source" keeps, "target" unlearns.
        most_images: Images of a domain given that are taken into memory, at most.
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {
            "steps": 450,
            "batch_size": 64,
            "learning_rate": 2e-4,
            "decay": 0.5,
            "ascent": 1.0,
            "limit": None,
            "clamp": "sample",
            "source_weight": 8.0,
            "restyled_weight": 2.0,
            "dependence_weight": 1.0,
        },
        "paper": {
            "steps": 936,
            "batch_size": 32,
            "synthesis_batch": 32,
            "scale": "elementwise",
            "batch_statistics": False,
        },
    }
    ONLY: ClassVar[Mapping[str, frozenset[str]]] = {"default": _POOL, "paper": _TURNS - {"synthesis_batch"}}
    """Fields by the only recipe that uses them."""

    generated: Count = 2048
    translated: Count = 2048
    generator_steps: Annotated[int, Field(ge=1)] = 250
    source_weight: Positive = 1.0
    restyled_weight: Positive = 1.0
    tolerance: Positive | None = None
    dependence_weight: Weight = 0.0
    terms: Literal["both", "source", "target"] = "both"
    most_images: Annotated[int, Field(ge=64)] = 5000

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for recipe, names in self.ONLY.items():
            for name in sorted(names if recipe != self.recipe else ()):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(
                        f"{name} has no effect with recipe={self.recipe!r}: leave it out, or choose recipe={recipe!r}"
                    )
        return self


def pixels_of(domain: Domain, image: ImageSpec, most: int) -> Tensor:
    """Take images of a domain into memory, and nothing but images: labels are never looked at.

    Args:
        domain: The domain.
        image: What the model eats.
        most: Images to take at most, spread evenly over the domain.

    Returns:
        uint8 (N, C, H, W), on the CPU.
    """
    return torch.cat([image.denormalize(batch.images) for batch in domain.once(250, limit=most)])


class Store:
    """Keeps synthetic images in a folder, by everything that they depend on, so that no run makes them twice.

    Args:
        folder: Where; None keeps nothing.
        facts: What all parts depend on.
        announce: Told when images are found.
        writes: Whether parts are kept; of several processes the first does that, and all take what is there.
    """

    def __init__(
        self,
        folder: Path | None,
        facts: Mapping[str, object],
        announce: Callable[[str], None] | None,
        *,
        writes: bool = True,
    ) -> None:
        self.folder, self.facts, self.announce, self.writes = folder, facts, announce, writes

    def keep(self, part: str, make: Callable[[], Tensor], **facts: object) -> Tensor:
        """Return a part made earlier, or make it and keep it.

        Args:
            part: Its name.
            make: Makes it.
            **facts: What it depends on beside the facts of all.

        Raises:
            ArtifactError: It can't be written.
        """
        if self.folder is None:
            return make()
        known = {"part": part, **self.facts, **facts}
        path = self.folder / f"{part}-{sha256(repr(sorted(known.items())).encode())[:16]}.safetensors"
        if path.exists():
            try:
                found = load_state(path)[0]["images"]
            except ArtifactError:
                pass  # damaged: made anew
            else:
                if self.announce is not None:
                    self.announce(f"{part} images: {len(found)} found in {path.parent}")
                return found
        made = make()
        if self.writes:
            save_state(path, {"images": made}, {key: str(value) for key, value in known.items()})
        return made


def image_of(session: Session) -> ImageSpec:
    """Return what the model eats.

    Raises:
        InputError: It isn't known, and synthesis needs it.
    """
    domains = [*session.unauthorized.values(), session.authorized]
    for spec in (session.image, *(getattr(domain, "spec", None) for domain in domains)):
        if isinstance(spec, ImageSpec):
            return spec
    raise InputError(
        "image= is missing: images are synthesized, so size, channels and normalization of the model's input "
        "are needed; pass image=ImageSpec(...)"
    )


def judge_of(model: nn.Module, image: ImageSpec, session: Session) -> Judge:
    """Return the frozen classifier that synthetic images are judged by."""
    return Judge(model, image, autocast=session.fabric.autocast, device=session.fabric.device)


def pseudo_source(
    model: nn.Module,
    config: SyntheticConfig,
    session: Session,
    judge: Judge,
    unauthorized: Tensor | None,
    *,
    restyled: int = 0,
) -> PseudoSource:
    """Make the pseudo-source of a run, or find the one made earlier; the images are the same on every process.

    Args:
        model: The trained network.
        config: How many images, and how they are made.
        session: Where to keep them.
        judge: The same network, as :func:`judge_of` returns it.
        unauthorized: uint8 (N, C, H, W), images of all unauthorized domains, or None.
        restyled: Copies of the unauthorized images in random styles to make beside; 0 makes none.

    Raises:
        InputError: No images would be made.
        ArtifactError: They can't be kept.
        NonFiniteError: A generator's loss became NaN or infinite.
    """
    folder = session.cache
    if folder is None and session.state_file is not None:
        folder = session.state_file.parent / "synthetic"
    made = {
        "version": VERSION,
        "model": digest_of(model),
        "image": judge.image,
        "seed": config.seed,
        "steps": config.generator_steps,
        "batch": config.synthesis_batch,
        "precision": str(session.fabric._precision.precision),
    }
    store = Store(folder, made, session.announce, writes=session.fabric.is_global_zero)
    counts = {"generated": config.generated, "translated": config.translated, "restyled": restyled}
    seen = {} if unauthorized is None else {"unauthorized": digest_of_tensors({"pixels": unauthorized})}
    pool = synthesize(
        judge,
        unauthorized,
        **counts,
        steps=config.generator_steps,
        batch_size=config.synthesis_batch,
        seed=config.seed,
        announce=session.announce,
        keep=lambda part, make: store.keep(part, make, count=counts[part], **({} if part == "generated" else seen)),
    )
    for warning in pool.warnings():
        session.warn(warning)
    return pool
