"""NTL, a rival: the whole network is retrained to be wrong, and to see other features, on unauthorized images."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from modelfence.losses.classification import clamped_ascent, cross_entropy
from modelfence.losses.discrepancy import gaussian_mmd
from modelfence.methods.config import STRICT, Positive, RetrainConfig
from modelfence.methods.features import layers_that_run, probe_of, require_layers
from modelfence.methods.labelled import Step, image_shape, look_at_labelled
from modelfence.methods.loop import Learned, Session
from modelfence.methods.registry import learner
from modelfence.methods.retraining import Retrained, retrain

_PUBLISHED_DEPTH = 10  # modules of a VGG's features that NTL's code compares after


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NTL(RetrainConfig):
    """Configuration of NTL with labelled unauthorized images (Wang et al., ICLR 2022); see :class:`RetrainConfig`.

    ``CE(f(x_s), y_s) - min(ascent CE(f(x_t), y_t), limit) * min(distance MMD(z_s, z_t), distance_limit)`` with features
    z of one layer, flattened, as the code that the authors published computes it; a bound reached has no gradient. With
    several unauthorized domains the product is their mean, each against all authorized images of the batch.

    Both domains run through the network as one batch. The published code runs one after the other, which is the same
    in its networks, as they have no BatchNorm. In those that have it, domains that are normalized each by itself look
    alike to the discrepancy: so run, NTL did not get started on digits in the steps in which it is done otherwise.

    Attributes:
        distance: The factor beta on the discrepancy of the features.
        distance_limit: The bound on that factor times the discrepancy.
        layer: Name of the module whose output the features are. None takes, of networks with a sequence of layers
            ``features`` such as VGG, the tenth without counting BatchNorm, as published; of others the middle one of
            the convolutions and linear layers.

    Example:
        >>> NTL().scale, NTL(steps=100).learning_rate
        ('elementwise', 0.0001)
    """

    distance: Positive = 0.1
    distance_limit: Positive = 1.0
    layer: Annotated[str, Field(min_length=1)] | None = None


@learner(NTL, needs=("authorized", "unauthorized"), default=False, check=look_at_labelled)
def learn_ntl(model: nn.Module, config: NTL, session: Session) -> Learned:
    """Retrain a network against all unauthorized domains of the session.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Domains with labels, device, where to save.

    Raises:
        InputError: The batch is too small for so many domains, or the layer can't be used.
        NonFiniteError: A loss term or a weight became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    layer = feature_layer(model, image_shape(session), config.layer)

    def loss(student: nn.Module, trained: Retrained, step: Step) -> dict[str, Tensor]:
        with _copies_of(trained.network.get_submodule(layer)) as features:
            logits = student(torch.cat(step.groups))
        sizes = [len(group) for group in step.groups]
        return ntl_terms(torch.split(logits, sizes), torch.split(features[0], sizes), step.labels, config)

    return retrain(model, config, session, loss)


def ntl_terms(
    logits: Sequence[Tensor], features: Sequence[Tensor], labels: Sequence[Tensor], config: NTL
) -> dict[str, Tensor]:
    """Return NTL's loss as two terms, "source" and "target", whose sum is minimized.

    Args:
        logits: (N, K) of authorized images, then of the images of each unauthorized domain.
        features: What the layer returned for them, (N, ...).
        labels: Their classes (N,).
        config: Factors, bounds and the scale of the cross-entropies.
    """
    flat = [feature.flatten(1).float() for feature in features]
    products = []
    for one, feature, truth in zip(logits[1:], flat[1:], labels[1:], strict=True):
        ascent = clamped_ascent(one, truth, weight=config.ascent, limit=config.limit_for(one.shape[1]))
        distance = (config.distance * gaussian_mmd(flat[0], feature)).clamp(max=config.distance_limit)
        products.append(ascent * distance)
    return {"source": cross_entropy(logits[0], labels[0]), "target": -torch.stack(products).mean()}


def feature_layer(model: nn.Module, shape: Sequence[int], wanted: str | None = None) -> str:
    """Choose the layer whose output NTL compares.

    Args:
        model: The network; it isn't changed.
        shape: Of an image: (C, H, W).
        wanted: A module's name to take in place of the default.

    Raises:
        InputError: The module isn't there, isn't run once, or doesn't return a tensor; or there is none to choose.

    Example:
        >>> feature_layer(nn.Sequential(*[nn.Conv2d(1, 1, 1) for _ in range(5)], nn.Flatten()), (1, 2, 2))
        '2'
    """
    probe = probe_of(model)
    if wanted is None:
        wanted = _published_layer(probe)
    if wanted is None:
        run = layers_that_run(probe, (nn.Conv2d, nn.Linear), shape)
        wanted = run[(len(run) - 1) // 2] if run else ""
    require_layers(probe, [wanted], shape, key="layer", once=True)
    return wanted


def _published_layer(network: nn.Module) -> str | None:
    features = getattr(network, "features", None)
    if not isinstance(features, nn.Sequential):
        return None
    counted = [name for name, module in features.named_children() if not isinstance(module, _BatchNorm)]
    return f"features.{counted[_PUBLISHED_DEPTH - 1]}" if len(counted) >= _PUBLISHED_DEPTH else None


@contextlib.contextmanager
def _copies_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a layer returns, as it returned it: a ReLU that follows may work in place."""
    found: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: found.append(output.clone()))
    try:
        yield found
    finally:
        handle.remove()
