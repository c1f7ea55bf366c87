"""What the settings without a source share: their configuration, and the images that stand in for what is missing."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.data.domain import Domain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError, InputError
from modelfence.files import sha256
from modelfence.masking.digest import digest_of, digest_of_tensors
from modelfence.methods.config import STRICT, MaskConfig, Positive
from modelfence.methods.loop import Session
from modelfence.methods.state import load_state, save_state
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pool import PseudoSource, synthesize

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SyntheticConfig(MaskConfig):
    """Settings of the images that stand in for a missing source.

    Attributes:
        generated: Images generated from noise; 0 makes none.
        translated: Images translated into the source's style (networks with BatchNorm only); 0 makes none.
        restyled: Copies in random styles to make of the unauthorized images; those that the model disagrees on are
            dropped; 0 makes none.
        generator_steps: Steps to fit each generator.
        synthesis_batch: Images a step of those fits.
        source_weight: Weight of the agreement with the original model on images near the source.
        restyled_weight: The same on restyled copies.
        tolerance: Unlearning slows down in proportion as the student's disagreement with the original model on kept
            images (mean KL, in nats) nears this, and pauses above it; None never does.
        terms: "both"; or one alone, for ablation: "source" keeps, "target" unlearns.
        pseudo_threshold: Delta of Eq. 4: a less sure prediction is replaced by the mean over augmented copies.
        pseudo_augmentations: How many copies.
        most_images: Images of a domain given that are taken into memory, at most.
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {
            "steps": 400,
            "batch_size": 32,
            "learning_rate": 2e-4,
            "decay": 0.5,
            "ascent": 1.0,
            "limit": 1.5,
            "clamp": "sample",
            "tolerance": 0.2,
        },
    }

    recipe: Literal["default"] = "default"
    generated: Count = 2048
    translated: Count = 2048
    restyled: Count = 3072
    generator_steps: Annotated[int, Field(ge=1)] = 100
    synthesis_batch: Annotated[int, Field(ge=2)] = 64
    source_weight: Positive = 1.0
    restyled_weight: Positive = 1.0
    tolerance: Positive | None = None
    terms: Literal["both", "source", "target"] = "both"
    pseudo_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    pseudo_augmentations: Count = 0
    most_images: Annotated[int, Field(ge=64)] = 5000


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
    """

    def __init__(
        self, folder: Path | None, facts: Mapping[str, object], announce: Callable[[str], None] | None
    ) -> None:
        self.folder, self.facts, self.announce = folder, facts, announce

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
    model: nn.Module, config: SyntheticConfig, session: Session, image: ImageSpec, unauthorized: Tensor | None
) -> PseudoSource:
    """Make the pseudo-source of a run, or find the one made earlier; the images are the same on every process.

    Args:
        model: The trained network.
        config: How many images, and how they are made.
        session: Where to keep them.
        image: What the model eats.
        unauthorized: uint8 (N, C, H, W), images of all unauthorized domains, or None.

    Raises:
        InputError: No images would be made.
        ArtifactError: They can't be kept.
        NonFiniteError: A generator's loss became NaN or infinite.
    """
    folder = session.cache
    if folder is None and session.state_file is not None:
        folder = session.state_file.parent / "synthetic"
    made = {
        "model": digest_of(model),
        "image": image,
        "seed": config.seed,
        "steps": config.generator_steps,
        "batch": config.synthesis_batch,
        "precision": str(session.fabric._precision.precision),
    }
    store = Store(folder if session.fabric.is_global_zero else None, made, session.announce)
    counts = {name: getattr(config, name) for name in ("generated", "translated", "restyled")}
    seen = {} if unauthorized is None else {"unauthorized": digest_of_tensors({"pixels": unauthorized})}
    pool = synthesize(
        model,
        image,
        unauthorized,
        **counts,
        steps=config.generator_steps,
        batch_size=config.synthesis_batch,
        seed=config.seed,
        autocast=session.fabric.autocast,
        device=session.fabric.device,
        announce=session.announce,
        keep=lambda part, make: store.keep(part, make, count=counts[part], **({} if part == "generated" else seen)),
    )
    if session.announce is not None:
        for warning in pool.warnings():
            session.announce(f"warning: {warning}")
    return pool
