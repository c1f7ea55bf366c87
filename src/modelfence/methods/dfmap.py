"""DF-MAP: a mask from the model alone, or from the model and its source, against domains that are synthesized."""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.methods.config import STRICT
from modelfence.methods.loop import Learned, Session
from modelfence.methods.material import Examples, Material, learn_on
from modelfence.methods.registry import learner
from modelfence.methods.synthetic import SyntheticConfig, image_of, judge_of, pixels_of, pseudo_source
from modelfence.synthesis.neighbours import neighbours
from modelfence.synthesis.strokes import draw

_FEWEST = 64


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DFMap(SyntheticConfig):
    """Configuration of data-free MAP; see :class:`SyntheticConfig` and :class:`MaskConfig`.

    In place of unauthorized images the mask unlearns auxiliary ones (MAP, CVPR 2024, section 3.4): here copies of the
    pseudo-source and of drawings in random styles. With ``authorized=`` the real source images take the place of the
    pseudo-source; their labels aren't looked at.

    Attributes:
        drawings: Drawn images (strokes, shapes, textures) whose content is translated, or styled; at least 64.
        neighbours: Styled copies to make; those that the model disagrees on are dropped.
        restyled: Isn't used: the styled copies take that place.
        outside: Share of the images near the source that a copy must be farther from it than, to be unlearned.

    Example:
        >>> DFMap().steps, DFMap(neighbours=100).neighbours
        (400, 100)
    """

    drawings: Annotated[int, Field(ge=_FEWEST)] = 2048
    neighbours: Annotated[int, Field(ge=_FEWEST)] = 12288
    outside: Annotated[float, Field(ge=0, le=1)] = 0.95


@learner(DFMap, needs=(), takes=("authorized",), labels=False)
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
    drawn = _drawings(image, config)
    if session.authorized is None:
        pool = pseudo_source(model, replace(config, restyled=0), session, image, drawn)
        near, answers = pool.near, pool.near_logits
    else:
        near = pixels_of(session.authorized, image, config.most_images)
        answers = judge.logits(near)
    around = neighbours(
        judge,
        torch.cat([near, drawn]),
        config.neighbours,
        near=near,
        quantile=config.outside,
        seed=config.seed,
    )
    if len(around.outside) < _FEWEST:
        raise InputError(
            f"only {len(around.outside)} of {config.neighbours} auxiliary images are far from the source and "
            f"recognized; at least {_FEWEST} are needed: raise neighbours, or lower outside"
        )
    labels = torch.nn.functional.one_hot(around.labels, answers.shape[1]).float()
    material = Material(
        Examples("pseudo-source", near, answers),
        {"neighbours": Examples("auxiliary images", around.outside, labels)},
        Examples("images inside", around.inside, judge.logits(around.inside)) if len(around.inside) else None,
    )
    return learn_on(model, config, session, material, image)


def _drawings(image: ImageSpec, config: DFMap) -> Tensor:
    """Return drawn images, uint8 (N, C, H, W)."""
    images = draw(config.drawings, image, torch.Generator().manual_seed(config.seed), kind="mixed")
    return (images * 255).round().to(torch.uint8)
