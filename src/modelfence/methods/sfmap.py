"""SF-MAP: a mask from the model and unlabelled unauthorized images (Eq. 4), hardened against BatchNorm refresh."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.errors import InputError
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.methods.config import STRICT, Positive
from modelfence.methods.labelled import shares
from modelfence.methods.loop import Learned, Session
from modelfence.methods.material import Examples, Material, learn_on, require_given, require_made
from modelfence.methods.paper_recipe import learn_in_turn
from modelfence.methods.registry import learner
from modelfence.methods.samples import of_pool
from modelfence.methods.synthetic import Count, SyntheticConfig, image_of, judge_of, pixels_of, pseudo_source
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pseudo_labels import pseudo_labels

_WITHOUT_BATCH_NORM = {"longer_without_batch_norm": "steps", "more_without_batch_norm": "restyled"}
"""Factors for networks without BatchNorm, by name, and what each multiplies."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFMap(SyntheticConfig):
    """Configuration of source-free MAP; see :class:`SyntheticConfig`, :class:`AlternatingConfig`, :class:`MaskConfig`.

    Eq. 4 of MAP (CVPR 2024): ``KL(f_s || f_t)(x') - min(lambda CE(f_t(x_t), y_psd), beta)`` on synthetic images x' and
    unlabelled unauthorized images x_t. By default x' is made beforehand, from what the network itself tells of its
    source. The recipe "paper" is Algorithm 1: x' comes from a fresh and a memory generator that learn in turn with the
    mask. The paper leaves open how many steps that takes, what the generators are, and Delta, number and kind of the
    augmentations.

    Attributes:
        restyled: Copies in random styles to make of the unauthorized images; those that the model disagrees on are
            dropped; 0 makes none. For a network without BatchNorm they count as images near the source, beside
            generated ones, of which there must be some (``restyled_weight`` has no effect then). (Default recipe.)
        more_without_batch_norm: Factor on ``restyled``, where that is the recipe's own, for a network without
            BatchNorm, where nothing else tells what the source looks like. (Default recipe.)
        longer_without_batch_norm: Factor on ``steps``, where those are the recipe's own, for a network without
            BatchNorm, where a step learns in one mode, not in two. (Default recipe.)
        pseudo_threshold: Delta of Eq. 4: where the model is less sure of an unauthorized image, the mean over augmented
            copies takes the place of its class.
        pseudo_augmentations: How many copies; with 0 every image has its class.

    Example:
        >>> SFMap().steps, SFMap(steps=100).clamp
        (450, 'sample')
        >>> SFMap(recipe="paper").ascent, SFMap(recipe="paper", generators="fresh").generators
        (0.1, 'fresh')
        >>> SFMap(generators="fresh")
        Traceback (most recent call last):
        ...
        pydantic_core._pydantic_core.ValidationError: ...
          Value error, generators has no effect with recipe='default': leave it out, or choose recipe='paper'...
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **SyntheticConfig.RECIPES,
        "paper": {**SyntheticConfig.RECIPES["paper"], "pseudo_threshold": 0.9, "pseudo_augmentations": 4},
    }
    ONLY: ClassVar[Mapping[str, frozenset[str]]] = {
        **SyntheticConfig.ONLY,
        "default": SyntheticConfig.ONLY["default"] | {"restyled", *_WITHOUT_BATCH_NORM},
    }

    restyled: Count = 3072
    more_without_batch_norm: Positive = 4.0
    longer_without_batch_norm: Positive = 2.0
    pseudo_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    pseudo_augmentations: Count = 0

    def for_network(self, model: nn.Module) -> Self:
        """Return these settings with the factors for networks without BatchNorm multiplied in, and set to 1.

        A number of steps or of copies that isn't the recipe's is taken as it is.

        Args:
            model: The network; what comes back is for networks of its kind alone.

        Example:
            >>> found = SFMap().for_network(nn.Linear(2, 2))
            >>> found.steps, found.restyled, found.for_network(nn.Linear(2, 2)) == found
            (900, 12288, True)
            >>> SFMap(steps=10).for_network(nn.Linear(2, 2)).steps
            10
            >>> SFMap().for_network(nn.BatchNorm2d(2)) == SFMap()
            True
        """
        if self.recipe == "paper" or has_batch_norm(model):
            return self
        return self.multiplied(_WITHOUT_BATCH_NORM)


_LOOKED_AT = 1000  # images of a domain, whose BatchNorm distance is taken as one batch

# BatchNorm distance: source images had 0.0012 at most, other digit domains 0.12 and more, in the pairs looked at
_SAME = 0.005
_SAME_OF_FEW = 0.25  # over the number of images, to be added: 64 source images had 0.008 at most, in three networks
_NEARLY = 0.05  # pairs of CIFAR-10, STL-10 and CINIC-10 had 0.008 to 0.015, pairs of digit domains 0.12 and more


def look_at_domains(model: nn.Module, config: SFMap, session: Session) -> None:
    """Refuse unauthorized domains that BatchNorm statistics take for the source; warn of those near it, or without any.

    Args:
        model: The trained network.
        config: The method's settings.
        session: Unauthorized domains.

    Raises:
        InputError: The batch is too small, or a domain for its share of it, too few images near the source would be
            made, what the model eats isn't known, or a domain looks like the model's source.
    """
    half, alone = config.batch_size // 2, config.masks == "one_each"
    sizes = shares(half, 1 if alone else len(session.unauthorized))
    for domain, size in zip(session.unauthorized.values(), sizes * len(session.unauthorized), strict=False):
        require_given(domain, size, config, session)
    image = image_of(session)
    judge = judge_of(model, image, session)
    if config.recipe == "default":
        require_made(config.generated + (config.translated if judge.batch_norm else config.restyled), config, session)
    if not judge.batch_norm:
        session.warn(
            "without BatchNorm the network doesn't tell what its source looks like: the mask may agree with it on "
            "synthetic images and have lost the source all the same; measure it (watch=), or give source images"
        )
        return
    most = min(config.most_images, judge.at_once(_LOOKED_AT))
    warnings = [
        _require_another_domain(name, judge, pixels_of(domain, image, most))
        for name, domain in session.unauthorized.items()
    ]
    for warning in filter(None, warnings):
        session.warn(warning)


@learner(SFMap, needs=("unauthorized",), labels=False, check=look_at_domains)
def learn_source_free(model: nn.Module, config: SFMap, session: Session) -> Learned:
    """Learn one mask against all unauthorized domains of the session, without any label and without the source.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings, as ``for_network`` returns them.
        session: Unauthorized domains, device, where to save.

    Raises:
        InputError: What the model eats isn't known, no images near the source would be made, or a domain has too few
            images for its share of a batch.
        NonFiniteError: A loss term became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    image = image_of(session)
    judge = judge_of(model, image, session)
    pixels = {name: pixels_of(domain, image, config.most_images) for name, domain in session.unauthorized.items()}
    targets = {name: Examples(name, some, assumed_labels(judge, some, config)) for name, some in pixels.items()}
    if config.recipe == "paper":
        return learn_in_turn(model, config, session, judge, targets=targets)
    every = torch.cat(list(pixels.values()))
    pool = pseudo_source(model, config, session, judge, every, restyled=config.restyled)
    near = Examples("pseudo-source", pool.near, pool.near_logits)
    copies = pool.parts.get("restyled")
    far = None if copies is None else Examples("restyled copies", copies, pool.logits["restyled"])
    if not judge.batch_norm:
        near, far = near if far is None else near.joined(far), None
    learned = learn_on(model, config, session, Material(near, targets, far), image)
    return replace(learned, synthetic=of_pool(pool))


def assumed_labels(judge: Judge, pixels: Tensor, config: SFMap) -> Tensor:
    """Return the class probabilities (N, K) by which unauthorized images are unlearned: the model's own answers.

    Args:
        judge: The original model.
        pixels: uint8 (N, C, H, W).
        config: Threshold and augmentations.
    """
    return pseudo_labels(
        judge,
        pixels,
        threshold=config.pseudo_threshold,
        augmentations=config.pseudo_augmentations,
        seed=config.seed,
    )


def _require_another_domain(name: str, judge: Judge, pixels: Tensor) -> str | None:
    """Refuse unauthorized images that BatchNorm statistics take for the source; return a warning of those near it.

    Args:
        name: Of the domain.
        judge: The model; it has BatchNorm.
        pixels: uint8 (N, C, H, W), looked at as one batch.
    """
    distance = judge.distance(pixels)
    assert distance is not None  # noqa: S101 (for the type checker: with BatchNorm there is one)
    few = _SAME_OF_FEW / len(pixels)
    same, near = _SAME + few, _NEARLY + few
    if distance < same:
        raise InputError(
            f"unauthorized domain {name!r} looks like the model's own source (BatchNorm distance {distance:.4f}, below "
            f"{same:.4f}): the two can't be separated, and the mask would destroy the model; give another domain"
        )
    if distance >= near:
        return None
    return (
        f"unauthorized domain {name!r} is nearly like the model's own source (BatchNorm distance {distance:.4f}, below "
        f"{near:.4f}): without source images the mask may take much of the source with it; measure it (watch=), or "
        "learn with labelled images of both domains (authorized=)"
    )
