"""SF-MAP: a mask from the model and unlabelled unauthorized images (Eq. 4), hardened against BatchNorm refresh."""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.errors import InputError
from modelfence.methods.config import STRICT
from modelfence.methods.loop import Learned, Session
from modelfence.methods.material import Examples, Material, learn_on
from modelfence.methods.registry import learner
from modelfence.methods.synthetic import SyntheticConfig, image_of, judge_of, pixels_of, pseudo_source
from modelfence.synthesis.judge import Judge
from modelfence.synthesis.pseudo_labels import pseudo_labels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFMap(SyntheticConfig):
    """Configuration of source-free MAP; see :class:`SyntheticConfig` and :class:`MaskConfig`.

    Eq. 4 of MAP (CVPR 2024): ``KL(f_s || f_t)(x') - min(lambda CE(f_t(x_t), y_psd), beta)`` on synthetic images x' and
    unlabelled unauthorized images x_t. By default x' is made beforehand, from what the network itself tells of its
    source.

    Example:
        >>> SFMap().steps, SFMap(steps=100).clamp
        (400, 'sample')
    """


# BatchNorm distance: source images had 0.0012 at most, other digit domains 0.13 and more, in the four pairs looked at
_SAME = 0.005


@learner(SFMap, needs=("unauthorized",), labels=False)
def learn_source_free(model: nn.Module, config: SFMap, session: Session) -> Learned:
    """Learn one mask against all unauthorized domains of the session, without any label and without the source.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Unauthorized domains, device, where to save.

    Raises:
        InputError: The batch is too small, what the model eats isn't known, or the domains look like its source.
        NonFiniteError: A loss term became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    image = image_of(session)
    judge = judge_of(model, image, session)
    pixels = {name: pixels_of(domain, image, config.most_images) for name, domain in session.unauthorized.items()}
    for name, some in pixels.items():
        _require_another_domain(name, judge.distance(some))
    pool = pseudo_source(model, config, session, image, torch.cat(list(pixels.values())))
    targets = {name: Examples(name, some, _labels(judge, some, config)) for name, some in pixels.items()}
    near = Examples("pseudo-source", pool.near, pool.near_logits)
    copies = pool.parts.get("restyled")
    far = None if copies is None else Examples("restyled copies", copies, pool.logits["restyled"])
    return learn_on(model, config, session, Material(near, targets, far), image)


def _labels(judge: Judge, pixels: Tensor, config: SFMap) -> Tensor:
    return pseudo_labels(
        judge,
        pixels,
        threshold=config.pseudo_threshold,
        augmentations=config.pseudo_augmentations,
        seed=config.seed,
    )


def _require_another_domain(name: str, distance: float | None) -> None:
    """Refuse unauthorized images that the network's BatchNorm statistics take for its own source."""
    if distance is not None and distance < _SAME:
        raise InputError(
            f"unauthorized domain {name!r} looks like the model's own source (BatchNorm distance {distance:.4f}, below "
            f"{_SAME}): the two can't be separated, and the mask would destroy the model; give another domain"
        )
