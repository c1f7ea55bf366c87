"""The paper's generators: updated in alternation with the mask, for images near the source (Eqs. 2 and 3)."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Literal, cast

import torch
from lightning_fabric import Fabric
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import functional_call

from modelfence.data.image_spec import ImageSpec
from modelfence.data.splits import mixed_seed
from modelfence.losses.batch_norm import BatchNormDistance
from modelfence.losses.generation import activation, balance, confidence, jensen_shannon
from modelfence.losses.memory import reconstruction, standard_normal
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.config import STRICT, MaskConfig, Positive
from modelfence.methods.features import features_of, laid_out, layers_to_compare, outputs_of
from modelfence.methods.trainee import Companions, Trainee
from modelfence.models.outputs import logits_of
from modelfence.synthesis.decoder import Decoder
from modelfence.synthesis.fresh import FreshGenerator
from modelfence.synthesis.memory import Encoder, Memory, MemoryGenerator

Weight = Annotated[float, Field(ge=0)]

_BETAS = (0.5, 0.999)  # of Adam, as is usual for generators
_FEWEST = 2  # images of a generator: one alone has no batch statistics
_DRAWS, _LOOKS = 1, 4  # tell these random numbers from those of others with the same seed


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlternatingConfig(MaskConfig):
    """Settings of generators that learn in alternation with the mask (MAP, CVPR 2024, Algorithm 1).

    The paper names none of their sizes, rates and weights.

    Attributes:
        generators: Whose images the mask gets: "both", half each; "fresh" alone, then there is no memory; or "memory"
            alone, then the fresh generator still learns and shows its images to the memory, which has nothing else to
            remember.
        latent: Length of a generator's code.
        width: Channels of a generator's first map.
        synthesis_batch: Images a step that the generators learn from, both together; the mask gets as many of them as
            it needs. With half of ``batch_size`` they are just the same (Algorithm 1), but the balance of classes
            means little where they are fewer than a few images a class.
        fresh_learning_rate: Of Adam on the fresh generator.
        memory_learning_rate: Of Adam on the memory generator and its encoder.
        confidence_weight: Of Eq. 2's first term: the original model shall be sure (lambda 1).
        balance_weight: Of its second term: it shall see all classes equally often (lambda 2).
        disagreement: Of its third term, the divergence of the original and the masked model. Positive, as printed: on
            images that both agree on; negative: on those they disagree on, as in the work the paper builds on.
        activation_weight: Of the activation term, which the paper names and Eq. 2 lacks.
        batch_norm_weight: Of the distance from the running BatchNorm statistics, where there are any; not in the paper.
        memory_pull: Weight of the divergence of the memory's codes from N(0, 1), which Eq. 3 lacks and sampling needs.
        memory_layers: Names of the original model's modules whose outputs Eq. 3 compares; each must return a tensor.
            None takes up to four of its convolutions and linear layers (see
            :func:`modelfence.methods.features.layers_to_compare`), () the images alone.

    Example:
        >>> AlternatingConfig().disagreement
        1.0
    """

    generators: Literal["both", "fresh", "memory"] = "both"
    latent: Annotated[int, Field(ge=1)] = 100
    width: Annotated[int, Field(ge=8)] = 64
    synthesis_batch: Annotated[int, Field(ge=2)] = 64
    fresh_learning_rate: Positive = 1e-3
    memory_learning_rate: Positive = 1e-3
    confidence_weight: Weight = 1.0
    balance_weight: Weight = 5.0
    disagreement: float = 1.0
    activation_weight: Weight = 0.0
    batch_norm_weight: Weight = 0.0
    memory_pull: Weight = 1e-5
    memory_layers: tuple[str, ...] | None = None


class Alternating:
    """The generators of Algorithm 1, a companion of the mask.

    Args:
        model: The trained network; it isn't changed.
        config: Sizes, rates and weights.
        image: What the network eats.
        fabric: Device, precision and processes.

    Attributes:
        layers: Names of the network's modules that Eq. 3 compares.
        terms: The terms of the last step by name, each a scalar without gradient, times its weight: of Eq. 2 "unsure",
            "unbalanced", and where they count "disagreement", "activation" and "distance"; of Eq. 3 "forgotten" and
            "pull".

    Raises:
        InputError: ``memory_layers`` names a module that can't be compared.

    Example:
        >>> spec = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        >>> config = AlternatingConfig(batch_size=8, latent=4, width=8)
        >>> alternating = Alternating(network, config, spec, Fabric(accelerator="cpu", devices=1))
        >>> alternating.step(MaskedModel(network), 0).shape
        torch.Size([4, 1, 8, 8])
    """

    def __init__(self, model: nn.Module, config: AlternatingConfig, image: ImageSpec, fabric: Fabric) -> None:
        self.layers: tuple[str, ...] = ()
        self.terms: dict[str, Tensor] = {}
        self._config, self._fabric = config, fabric
        self._match = config.batch_norm_weight > 0 and has_batch_norm(model)
        size = config.latent, config.width
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            fresh = FreshGenerator(image, *size)
            memory = Memory(Encoder(image, *size), MemoryGenerator(image, *size))
        self._fresh = Trainee(fresh, _adam(config.fresh_learning_rate), fabric)
        self._parts = Companions(fresh=self._fresh)
        if config.generators != "fresh":
            self.layers = layers_to_compare(model, image.shape, config.memory_layers)
            self._memory = Trainee(memory, _adam(config.memory_learning_rate), fabric)
            self._parts = Companions(fresh=self._fresh, memory=self._memory)

    def step(self, masked: MaskedModel, number: int) -> Tensor:
        """Generate images for one step of the mask and update the generators.

        The images are those from before the update, as in Algorithm 1. They depend on the generators, the scores and
        the number alone.

        Args:
            masked: The masked model itself, not a wrapper. Its base judges the images and stays as it is; no gradient
                reaches its scores.
            number: Of the step, from 0.

        Returns:
            float32 (batch_size // 2, C, H, W), normalized, without gradient.
        """
        config = self._config
        generator = torch.Generator().manual_seed(mixed_seed(config.seed, _DRAWS, number, self._fabric.global_rank))
        wanted = config.batch_size // 2
        half = max(_FEWEST, -(-max(config.synthesis_batch, wanted) // 2))
        if config.generators == "fresh":
            return self._learn_fresh(masked, 2 * half, generator)[:wanted]
        with torch.no_grad(), self._fabric.autocast():
            remembered = self._memory.network.sample(half if config.generators == "both" else 2 * half, generator)
        fresh = self._learn_fresh(masked, half, generator)
        self._learn_memory(masked, torch.cat([fresh, remembered[:half]]), generator)
        if config.generators == "memory":
            return remembered[:wanted]
        return torch.cat([fresh[: wanted - wanted // 2], remembered[: wanted // 2]])

    @torch.no_grad()
    def look(self, count: int) -> Tensor:
        """Generate images as the generators are now, and change nothing; every look takes the same codes.

        Args:
            count: How many.

        Returns:
            float32 (count, C, H, W), normalized; of the kinds that the mask gets, half each if there are two.
        """
        networks: dict[str, Decoder] = {"fresh": self._fresh.network}
        if self._config.generators != "fresh":
            networks["memory"] = self._memory.network.generator
        if self._config.generators == "memory":
            del networks["fresh"]
        generator = torch.Generator().manual_seed(mixed_seed(self._config.seed, _LOOKS))
        made = []
        for index, network in enumerate(networks.values()):
            share = count // len(networks) + (index < count % len(networks))
            network.eval()
            with self._fabric.autocast():
                made.append(network.sample(share, generator))
            network.train()
        return torch.cat(made)

    def _learn_fresh(self, masked: MaskedModel, count: int, generator: torch.Generator) -> Tensor:
        """Generate fresh images, update their generator by Eq. 2 and return them."""
        config = self._config
        with self._fabric.autocast():
            images = self._fresh.network.sample(count, generator)
            found = BatchNormDistance()
            with found if self._match else nullcontext():
                logits, features = features_of(masked.base, laid_out(images, masked))
            terms = {
                "unsure": config.confidence_weight * confidence(logits),
                "unbalanced": config.balance_weight * balance(logits, self._mean),
            }
            if config.disagreement:
                terms["disagreement"] = config.disagreement * jensen_shannon(logits, _confined(masked, images))
            if config.activation_weight:
                terms["activation"] = config.activation_weight * activation(features)
            if self._match:
                terms["distance"] = config.batch_norm_weight * found.total()
        self._fresh.descend(torch.stack(tuple(terms.values())).sum())
        self.terms = {name: value.detach() for name, value in terms.items()}
        return images.detach()

    def _learn_memory(self, masked: MaskedModel, images: Tensor, generator: torch.Generator) -> None:
        """Update the memory by Eq. 3 on images that it shall remember."""
        with self._fabric.autocast():
            rebuilt = self._memory.network.rebuild(images, generator)
            with torch.no_grad(), outputs_of(masked.base, self.layers) as seen:
                masked.base(laid_out(images, masked))
            with outputs_of(masked.base, self.layers) as seen_again:
                masked.base(laid_out(rebuilt.images, masked))
            terms = {
                "forgotten": reconstruction(images, rebuilt.images, seen, seen_again),
                "pull": self._config.memory_pull * standard_normal(rebuilt.mean, rebuilt.log_variance),
            }
        self._memory.descend(torch.stack(tuple(terms.values())).sum())
        self.terms |= {name: value.detach() for name, value in terms.items()}

    def _mean(self, value: Tensor) -> Tensor:
        return cast("Tensor", self._fabric.all_reduce(value))

    def state(self) -> dict[str, Tensor]:
        """Return generators, encoder and optimizers by name."""
        return self._parts.state()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned."""
        self._parts.load(tensors)


def _adam(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=rate, betas=_BETAS)


def _confined(masked: MaskedModel, images: Tensor) -> Tensor:
    """Return the masked model's logits (N, K), differentiable in the images alone."""
    with torch.no_grad():
        weights = masked.weights()
    return logits_of(functional_call(masked.base, weights, (laid_out(images, masked),), tie_weights=False))
