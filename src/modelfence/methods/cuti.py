"""CUTI, a rival: the whole network is retrained to be wrong on unauthorized images and on an isolation domain."""

from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from modelfence.losses.classification import clamped_ascent, cross_entropy
from modelfence.methods.config import STRICT, RetrainConfig
from modelfence.methods.isolation import Gates, Projections, drawn, isolating, isolation_layers
from modelfence.methods.labelled import Step, image_shape, look_at_labelled
from modelfence.methods.loop import Learned, Session
from modelfence.methods.registry import learner
from modelfence.methods.retraining import Retrained, retrain


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CUTI(RetrainConfig):
    """Configuration of target-specified CUTI-domain (Wang et al., CVPR 2023); see :class:`RetrainConfig`.

    ``CE(f(x_s), y_s) - min(ascent CE(f(x_t), y_t), limit)``, where in every second step, from the second on, features
    of the unauthorized images are given the style of authorized ones after each of some layers (see
    :func:`modelfence.methods.isolation.isolated`). Both domains run through the network as one batch, as in the code
    that the authors published. With several unauthorized domains the second term is their mean.

    Attributes:
        isolation: "code": the two matrices that style passes through are drawn anew at every use and never learned, as
            the published code has it; "paper": they are a part of a module that is learned, as it is described, here
            by the same loss. They are thrown away with the isolation domain when the network is trained.
        layers: Names of the modules after which features are changed; each must return maps (N, C, H, W). None takes
            the max-pooling layers, which are the published five places in VGG11; in networks with less than two, up to
            five convolutions.

    Example:
        >>> CUTI().isolation, CUTI(isolation="paper", scale="mean").limit_for(10)
        ('code', 1.0)
    """

    isolation: Literal["code", "paper"] = "code"
    layers: tuple[str, ...] | None = None


@learner(CUTI, needs=("authorized", "unauthorized"), default=False, check=look_at_labelled)
def learn_cuti(model: nn.Module, config: CUTI, session: Session) -> Learned:
    """Retrain a network against all unauthorized domains of the session.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Domains with labels, device, where to save.

    Raises:
        InputError: The batch is too small for so many domains, or a layer can't be used.
        NonFiniteError: A loss term or a weight became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    channels = isolation_layers(model, image_shape(session), config.layers)
    gates = Gates(channels, seed=config.seed) if config.isolation == "paper" else None

    def projections(layer: str, output: Tensor) -> Projections:
        return drawn(channels[layer], output.device) if gates is None else gates.of(layer)

    def loss(student: nn.Module, trained: Retrained, step: Step) -> dict[str, Tensor]:
        images = torch.cat(step.groups)
        if step.number % 2:
            with isolating(trained.network, list(channels), projections):
                logits = student(images)
        else:
            logits = student(images)
        return cuti_terms(torch.split(logits, [len(group) for group in step.groups]), step.labels, config)

    return retrain(model, config, session, loss, beside=gates)


def cuti_terms(logits: tuple[Tensor, ...], labels: list[Tensor], config: CUTI) -> dict[str, Tensor]:
    """Return CUTI's loss as two terms, "source" and "target", whose sum is minimized.

    Args:
        logits: (N, K) of authorized images, then of the images of each unauthorized domain.
        labels: Their classes (N,).
        config: Factor, bound and the scale of the cross-entropies.
    """
    ascents = [
        clamped_ascent(one, truth, weight=config.ascent, limit=config.limit_for(one.shape[1]))
        for one, truth in zip(logits[1:], labels[1:], strict=True)
    ]
    return {"source": cross_entropy(logits[0], labels[0]), "target": -torch.stack(ascents).mean()}
