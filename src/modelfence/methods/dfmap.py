"""DF-MAP: a mask from the model alone, or from the model and its source, against domains that are synthesized."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.methods.alternating import Weight
from modelfence.methods.config import STRICT, Positive
from modelfence.methods.diverse import DiverseStyles
from modelfence.methods.loop import Learned, Session
from modelfence.methods.material import Examples, Material, learn_on, require_given, require_made
from modelfence.methods.paper_recipe import STYLED, learn_in_turn
from modelfence.methods.registry import learner
from modelfence.methods.samples import Synthetic, of_neighbours, of_pool, together, warning_of_neighbours
from modelfence.methods.synthetic import SyntheticConfig, image_of, judge_of, pixels_of, pseudo_source
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.neighbours import neighbours
from modelfence.synthesis.strokes import draw

_FEWEST = 64
_WITHOUT_BATCH_NORM = {"heavier_without_batch_norm": "source_weight"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DFMap(SyntheticConfig):
    """Configuration of data-free MAP; see :class:`SyntheticConfig`, :class:`AlternatingConfig`, :class:`MaskConfig`.

    In place of unauthorized images the mask unlearns auxiliary ones (MAP, CVPR 2024, section 3.4): by default copies of
    the pseudo-source and of drawings in random styles. Without BatchNorm and without source images nothing tells what
    the source looks like: there drawings are kept, as images near the source are. The recipe "paper" is Algorithm 2
    after Algorithm 1 in every step: the generated images are restyled by a generator that learns in turn with the mask.

    With ``authorized=`` the real source images take the place of the pseudo-source; their labels aren't looked at. Then
    ``generated``, ``translated``, ``generator_steps`` and ``synthesis_batch`` have no effect, and with the recipe
    "paper" none of the settings that :class:`AlternatingConfig` adds; without, ``most_images`` has none.

    Attributes:
        drawings: Drawn images (strokes, shapes, textures) whose content is translated, or styled, or which are kept; at
            least 64. (Default recipe.)
        neighbours: Styled copies to make, rounded down to groups of 16 that share a style; those that the model
            disagrees on are dropped. (Default recipe.)
        heavier_without_batch_norm: Factor on ``source_weight``, where that is the recipe's own, for a network without
            BatchNorm. (Default recipe.)
        outside: Share of the groups of images near the source that a style must be farther from it than, for its copies
            to be unlearned, not kept (networks with BatchNorm only). (Default recipe.)
        directions: Neighbour domains a step, each with a part of the diversity generator frozen: n_dir, which the paper
            doesn't name. The mask unlearns half of ``batch_size`` images of each. (Recipe "paper", as are the next.)
        diversity_learning_rate: Of plain gradient descent on the diversity generator's shifts; without momentum, which
            would move frozen parts.
        information_weight: Of Eq. 5: the neighbours' features shall tell little of the originals'.
        semantic_weight: Of Eq. 6: class by class they shall be distributed alike.

    Example:
        >>> DFMap().steps, DFMap(neighbours=100).neighbours
        (450, 100)
        >>> DFMap(recipe="paper").directions
        4
    """

    ONLY: ClassVar[Mapping[str, frozenset[str]]] = {
        "default": SyntheticConfig.ONLY["default"] | {"drawings", "neighbours", "outside", *_WITHOUT_BATCH_NORM},
        "paper": SyntheticConfig.ONLY["paper"]
        | {"directions", "diversity_learning_rate", "information_weight", "semantic_weight"},
    }

    drawings: Annotated[int, Field(ge=_FEWEST)] = 2048
    neighbours: Annotated[int, Field(ge=_FEWEST)] = 12288
    heavier_without_batch_norm: Positive = 2.0
    outside: Annotated[float, Field(ge=0, le=1)] = 0.95
    directions: Annotated[int, Field(ge=1)] = 4
    diversity_learning_rate: Positive = 10.0
    information_weight: Weight = 1.0
    semantic_weight: Weight = 1.0

    def for_network(self, model: nn.Module) -> Self:
        """Return these settings with the factor for networks without BatchNorm multiplied in, and set to 1.

        A weight that isn't the recipe's is taken as it is.

        Args:
            model: The network; what comes back is for networks of its kind alone.

        Example:
            >>> DFMap().for_network(nn.Linear(2, 2)).source_weight, DFMap().for_network(nn.BatchNorm2d(2)).source_weight
            (16.0, 8.0)
        """
        if self.recipe == "paper" or has_batch_norm(model):
            return self
        return self.multiplied(_WITHOUT_BATCH_NORM)


def look_at_source(model: nn.Module, config: DFMap, session: Session) -> None:
    """Refuse source images, or settings by which they would be made, that can't fill half a batch.

    Args:
        model: The trained network.
        config: The method's settings.
        session: The authorized domain, if any, and the processes that share a batch.

    Raises:
        InputError: There are too few.
    """
    if session.authorized is not None:
        require_given(session.authorized, config.batch_size // 2, config, session)
    elif config.recipe == "default":
        beside = config.translated if has_batch_norm(model) else config.drawings
        require_made(config.generated + beside, config, session)


@learner(DFMap, needs=(), takes=("authorized",), labels=False, check=look_at_source)
def learn_data_free(model: nn.Module, config: DFMap, session: Session) -> Learned:
    """Learn one mask against all domains but the source, from the model and, if there are any, source images.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: The authorized domain, if any; device, where to save.

    Raises:
        InputError: What the model eats isn't known, or the model agrees with itself on next to no auxiliary image.
        NonFiniteError: A loss term became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    image = image_of(session)
    judge = judge_of(model, image, session)
    source = None if session.authorized is None else pixels_of(session.authorized, image, config.most_images)
    given = None if source is None else Examples("source", source, judge.logits(source))
    if config.recipe == "paper":
        styles = DiverseStyles(
            model,
            image,
            session.fabric,
            directions=config.directions,
            learning_rate=config.diversity_learning_rate,
            information_weight=config.information_weight,
            semantic_weight=config.semantic_weight,
            seed=config.seed,
        )
        return learn_in_turn(model, config, session, judge, source=given, styles=styles)
    drawn = _drawings(image, config)
    made = Synthetic()
    kept = None
    if given is None:
        pool = pseudo_source(model, config, session, judge, drawn)
        given, made = Examples("pseudo-source", pool.near, pool.near_logits), of_pool(pool)
        if not judge.batch_norm:
            session.warn(
                "without BatchNorm the network doesn't tell what its source looks like: a data-free mask takes little "
                "of other domains, and may take as much of the source; measure it (watch=), or give source images"
            )
            kept = Examples("drawings", drawn, judge.logits(drawn))
    material = _material(judge, given, given.pixels if kept is not None else torch.cat([given.pixels, drawn]), config)
    if kept is not None:
        material = replace(material, near=material.near.joined(kept))
    styled = material.targets[STYLED]
    around = of_neighbours(styled.pixels, styled.answers.argmax(1), styled.answers.shape[1])
    if warning := warning_of_neighbours(around):
        session.warn(warning)
    learned = learn_on(model, config, session, material, image)
    return replace(learned, synthetic=together((made, around)))


def _material(judge: Judge, near: Examples, content: Tensor, config: DFMap) -> Material:
    """Return the images near the source, and styled copies of others, uint8 (N, C, H, W), sorted."""
    around = neighbours(
        judge,
        content,
        config.neighbours,
        near=near.pixels,
        quantile=config.outside,
        seed=config.seed,
    )
    if len(around.outside) < _FEWEST:
        raise InputError(
            f"only {len(around.outside)} of {config.neighbours} auxiliary images are far from the source and "
            f"recognized; at least {_FEWEST} are needed: raise neighbours, or lower outside"
        )
    labels = torch.nn.functional.one_hot(around.labels, near.answers.shape[1]).float()
    return Material(
        near,
        {STYLED: Examples("auxiliary images", around.outside, labels)},
        Examples("images inside", around.inside, judge.logits(around.inside)) if len(around.inside) else None,
    )


def _drawings(image: ImageSpec, config: DFMap) -> Tensor:
    """Return drawn images, uint8 (N, C, H, W)."""
    images = draw(config.drawings, image, torch.Generator().manual_seed(config.seed), kind="mixed")
    return (images * 255).round().to(torch.uint8)
