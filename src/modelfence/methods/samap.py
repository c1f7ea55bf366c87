"""SA-MAP: a mask from labelled images of both domains (Eq. 1), by default hardened against BatchNorm refresh."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.losses.classification import cross_entropy, distillation
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.config import STRICT, MaskConfig
from modelfence.methods.labelled import Step, labelled_steps, look_at_labelled
from modelfence.methods.loop import Learned, Session, learn_scores
from modelfence.methods.registry import learner
from modelfence.methods.terms import Part, terms_of, unlearning

_DEFAULT = {
    "steps": 300,
    "batch_size": 32,
    "learning_rate": 2e-4,
    "decay": 0.5,
    "ascent": 1.0,
    "clamp": "sample",
    "source_loss": "distillation",
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SAMap(MaskConfig):
    """Configuration of source-available MAP; see :class:`MaskConfig` for the loop.

    Eq. 1 of MAP (CVPR 2024): ``CE(f(x_s), y_s) - min(lambda CE(f(x_t), y_t), alpha)``. The recipe "paper" is that,
    with the paper's constants, but in two places: the bound is on each image, not on the mean over them, which closed
    more on VGG11 with BatchNorm and without (decision 16), and the learning rate falls to zero over the last half of
    the steps, where the paper names no schedule (decision 12). As printed it is ``SAMap(recipe="paper", clamp="batch",
    decay=0.0)``, and ``scale="elementwise"`` takes the bound to the scale of the rivals' code. The default bounds each
    image too and, for networks with BatchNorm, adds the same two terms with batch statistics, because a refresh of the
    running statistics on a few unlabelled images restores a mask learned without them. For other networks the default
    has the values of the recipe "paper" (decision 17).

    The recipe "ownership" is for a mark on the authorized images (Eq. 7), and what ``protect`` takes where marked
    images are all that is unauthorized. Both domains have the same images, so the mask learns longer, with less weight
    on the unlearning, until an image's own class can't be the most probable one any more. It learns with running
    statistics alone, because nobody can refresh them on marked images without knowing the mark.

    Attributes:
        recipe: "default", "paper", or "ownership". It sets the value of every field that isn't given.
        source_loss: "cross_entropy" (paper), or "distillation" from the original model.
        without_batch_norm: The recipe whose values replace this one's own where the network has no BatchNorm; None: as
            they are.

    Example:
        >>> SAMap(recipe="paper").limit, SAMap(recipe="paper").ascent
        (1.0, 0.1)
        >>> SAMap(recipe="paper", batch_size=16).batch_size
        16
    """

    RECIPES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {**_DEFAULT, "without_batch_norm": "paper"},
        "paper": {"steps": 936, "batch_size": 32, "decay": 0.5, "clamp": "sample", "batch_statistics": False},
        "ownership": {**_DEFAULT, "steps": 750, "ascent": 0.2, "limit": None, "batch_statistics": False},
    }

    recipe: Literal["default", "paper", "ownership"] = "default"  # type: ignore[assignment]  # wider than the base; frozen

    source_loss: Literal["cross_entropy", "distillation"] = "cross_entropy"
    without_batch_norm: Literal["paper"] | None = None

    def for_network(self, model: nn.Module) -> Self:
        """Return these settings, with the values of ``without_batch_norm`` where the network has no BatchNorm.

        They replace what is this recipe's own value. Another value was given, and is taken as it is.

        Args:
            model: The network; what comes back is for networks of its kind alone.

        Example:
            >>> SAMap().for_network(nn.Linear(2, 2)).steps, SAMap().for_network(nn.BatchNorm2d(2)).steps
            (936, 300)
            >>> SAMap(steps=100).for_network(nn.Linear(2, 2)).steps
            100
        """
        if self.without_batch_norm is None or has_batch_norm(model):
            return self
        other = type(self)(recipe=self.without_batch_norm)
        own = [name for name, value in self.RECIPES[self.recipe].items() if getattr(self, name) == value]
        return replace(self, **{name: getattr(other, name) for name in own})


@learner(SAMap, needs=("authorized", "unauthorized"), check=look_at_labelled)
def learn_source_available(model: nn.Module, config: SAMap, session: Session) -> Learned:
    """Learn one mask against all unauthorized domains of the session.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Domains with labels, device, where to save.

    Raises:
        InputError: The batch is too small for so many domains.
        NonFiniteError: A loss term became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    both = config.batch_statistics
    if both is None:
        both = has_batch_norm(model)

    def loss(student: nn.Module, masked: MaskedModel, step: Step) -> dict[str, Tensor]:
        return _terms(student, masked, step, config, session, both=both)

    def batches(start: int) -> Iterator[Step]:
        return labelled_steps(config, session, start)

    return learn_scores(model, config, session, batches=batches, loss=loss)


def _terms(
    student: nn.Module, masked: MaskedModel, step: Step, config: SAMap, session: Session, *, both: bool
) -> dict[str, Tensor]:
    images, labels = step.groups[0], step.labels[0]
    if config.source_loss == "distillation":
        with session.fabric.autocast():
            source = partial(distillation, masked.teacher(images))
    else:
        source = partial(cross_entropy, labels=labels)
    share = 1 / (len(step.groups) - 1)
    targets = [
        Part("target", group, unlearning(truth, config, session, share=share))
        for group, truth in zip(step.groups[1:], step.labels[1:], strict=True)
    ]
    return terms_of(student, [Part("source", images, source), *targets], both=both)
