"""Neighbour domains in learned styles: what a mask unlearns where there are no unauthorized images (Algorithm 2)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.data.splits import mixed_seed
from modelfence.losses.discrepancy import class_mmd
from modelfence.losses.information import club, gaussian_nll
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.features import blank, features_of, laid_out, probe_of
from modelfence.methods.trainee import Companions, Trainee
from modelfence.synthesis.diversity import DiversityGenerator, drop_direction_gradients

_ESTIMATOR_RATE, _ESTIMATOR_WIDTH = 1e-3, 128
_DRAWS, _LOOKS = 2, 5  # tell these random numbers from those of others with the same seed
_SMALLEST = 1e-6


class Styled(NamedTuple):
    """Auxiliary images to unlearn.

    Attributes:
        images: (directions * N, C, H, W), normalized: all images in the first direction, then in the next.
        labels: int64 (directions * N,), what the original model takes their originals for.
    """

    images: Tensor
    labels: Tensor


class Estimator(nn.Module):
    """The distribution q(z' | z) of Eq. 5: a Gaussian with diagonal covariance whose moments are learned.

    Args:
        features: Length of z and z'.

    Example:
        >>> mean, log_variance = Estimator(3)(torch.zeros(2, 3))
        >>> mean.shape, log_variance.shape
        (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self._mean, self._log_variance = (
            nn.Sequential(nn.Linear(features, _ESTIMATOR_WIDTH), nn.ReLU(), nn.Linear(_ESTIMATOR_WIDTH, features))
            for _ in range(2)
        )

    def forward(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Turn codes z (N, D) into mean and log variance of z', each (N, D); the latter stays within -1..1."""
        return self._mean(codes), torch.tanh(self._log_variance(codes))


class DiverseStyles:
    """The diversity generator of Algorithm 2 with the estimator of mutual information, a companion of the mask.

    With several processes Eqs. 5 and 6 are those of each process's images, and gradients are averaged. That differs
    from one process with the joint batch, where more images of a class meet.

    Args:
        model: The trained network; it isn't changed.
        image: What the network eats.
        fabric: Device, precision and processes.
        directions: Neighbour domains a step, at least 1.
        learning_rate: Of plain gradient descent on the shifts; without momentum, which would move frozen parts.
        information_weight: Of Eq. 5: the neighbours' features shall tell little of the originals'.
        semantic_weight: Of Eq. 6: class by class they shall be distributed alike.
        seed: Of everything.

    Attributes:
        terms: The terms of the last direction by name, each a scalar without gradient, times its weight:
            "information" (Eq. 5), "semantics" (Eq. 6); and "estimate", what the estimator minimizes.

    Raises:
        InputError: The images are smaller than 8 x 8 pixels.

    Example:
        >>> spec = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        >>> styles = DiverseStyles(network, spec, Fabric(accelerator="cpu", devices=1), directions=2)
        >>> styled = styles.step(MaskedModel(network), torch.zeros(4, 1, 8, 8), 0)
        >>> styled.images.shape, styled.labels.shape
        (torch.Size([8, 1, 8, 8]), torch.Size([8]))
    """

    def __init__(
        self,
        model: nn.Module,
        image: ImageSpec,
        fabric: Fabric,
        *,
        directions: int = 4,
        learning_rate: float = 10.0,
        information_weight: float = 1.0,
        semantic_weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.terms: dict[str, Tensor] = {}
        self._directions, self._seed, self._fabric = directions, seed, fabric
        self._weights = information_weight, semantic_weight
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed_seed(seed, _DRAWS))
            diversity = DiversityGenerator(image, directions)
            estimator = Estimator(_length(model, image))
        self._diversity = Trainee(diversity, lambda some: torch.optim.SGD(some, lr=learning_rate), fabric)
        self._estimator = Trainee(estimator, lambda some: torch.optim.Adam(some, lr=_ESTIMATOR_RATE), fabric)
        self._parts = Companions(diversity=self._diversity, estimator=self._estimator)

    def step(self, masked: MaskedModel, images: Tensor, number: int) -> Styled:
        """Restyle images in all directions, and update shifts and estimator after each.

        In direction d the first d parts of the shifts stay as they are. The result depends on what was learned so far,
        the images and the number alone.

        Args:
            masked: The masked model itself, not a wrapper; only its base is looked at, and stays as it is.
            images: (N, C, H, W), normalized; N at least 2.
            number: Of the step, from 0.

        Returns:
            The restyled images, from before the update of their direction, and their labels.
        """
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, _DRAWS, number, self._fabric.global_rank))
        with torch.no_grad(), self._fabric.autocast():
            logits, features = features_of(masked.base, laid_out(images, masked))
        scale = features.square().mean().sqrt().clamp_min(_SMALLEST)  # one rate fits features of any size
        labels = logits.argmax(dim=1)
        styled = []
        for direction in range(self._directions):
            with self._fabric.autocast():
                copies = self._diversity.network(images, generator)
                seen = features_of(masked.base, laid_out(copies, masked))[1]
            self._learn(direction, features / scale, seen / scale, labels)
            styled.append(copies.detach())
        return Styled(torch.cat(styled), labels.repeat(len(styled)))

    @torch.no_grad()
    def look(self, images: Tensor) -> Tensor:
        """Restyle images as the shifts are now, and change nothing; every look takes the same convolutions.

        Args:
            images: (N, C, H, W), normalized.

        Returns:
            float32, the same shape, normalized.
        """
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, _LOOKS))
        with self._fabric.autocast():
            copies: Tensor = self._diversity.network(images, generator)
        return copies.float()

    def _learn(self, direction: int, codes: Tensor, styled: Tensor, labels: Tensor) -> None:
        """Update the estimator by maximum likelihood, then the shifts by Eqs. 5 and 6."""
        estimator, (information, semantic) = self._estimator.network, self._weights
        mean, log_variance = estimator(codes)
        estimate = gaussian_nll(mean, log_variance, styled.detach())
        self._estimator.descend(estimate)
        mean, log_variance = estimator(codes)
        terms = {
            "information": information * club(mean, log_variance, styled),
            "semantics": semantic * class_mmd(codes, styled, labels),
        }
        self._diversity.descend(
            torch.stack(tuple(terms.values())).sum(),
            adjust=lambda: drop_direction_gradients(self._diversity.network, direction, self._directions),
        )
        self.terms = {name: value.detach() for name, value in ({"estimate": estimate} | terms).items()}

    def state(self) -> dict[str, Tensor]:
        """Return shifts, estimator and its optimizer by name."""
        return self._parts.state()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned."""
        self._parts.load(tensors)


@torch.no_grad()
def _length(model: nn.Module, image: ImageSpec) -> int:
    """Return the number of features that a network's classifier decides by."""
    probe = probe_of(model)
    return features_of(probe, blank(probe, image.shape))[1].shape[1]
