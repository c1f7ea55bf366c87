"""Retraining of a whole network, with no mask, in the loop that all methods share: what the rivals of MAP do."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence.data.splits import mixed_seed
from modelfence.errors import InputError
from modelfence.masking.masked_model import switch_off_checkpointing
from modelfence.methods.config import RetrainConfig
from modelfence.methods.labelled import Step, labelled_steps
from modelfence.methods.loop import Learned, Session, learn
from modelfence.methods.subject import Subject, computes_in_bfloat16
from modelfence.models.outputs import logits_of

_DRAWS = 3  # tells these random numbers from those of others with the same seed


class Retrained(nn.Module):
    """A network that is trained whole, and what is trained beside it and thrown away afterwards.

    Args:
        network: In train mode.
        beside: Further layers that the loss uses, if any.
    """

    def __init__(self, network: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.beside = network, beside

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, K) of images (N, C, H, W)."""
        return logits_of(self.network(images))


class NetworkWeights(Subject):
    """All weights of a network: dropout is active, BatchNorm's running statistics are updated.

    What is drawn at random in a step (dropout, and whatever the loss draws from torch's generators) depends on the seed
    and the number of the step alone, so that a resumed run ends as an uninterrupted one.

    Args:
        model: The trained network; it is copied and never changed. The copy is trained in float32.
        config: Its ``start`` and ``seed``.
        fabric: Device, precision and processes.
        beside: Further layers that are trained by the same loss.

    Attributes:
        module: The network, as :class:`Retrained`.

    Raises:
        InputError: There are several processes, the fabric's precision can't be used, or a layer can't be drawn anew.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> subject = NetworkWeights(model, RetrainConfig(), Fabric(accelerator="cpu", devices=1))
        >>> list(subject.parameters())
        ['network.1.weight', 'network.1.bias']
    """

    kind = "weight"

    def __init__(
        self, model: nn.Module, config: RetrainConfig, fabric: Fabric, beside: nn.Module | None = None
    ) -> None:
        computes_in_bfloat16(fabric)
        if fabric.world_size > 1:
            raise InputError(
                f"{type(config).__name__} learns in one process, the fabric has {fabric.world_size}: its discrepancy "
                "and statistics are those of a whole batch; give a Fabric with devices=1"
            )
        self._seed, self._device = config.seed, fabric.device
        with torch.inference_mode(False):
            network = copy.deepcopy(model).float()
        network.requires_grad_(True)
        switch_off_checkpointing(network)
        if config.start == "fresh":
            start_fresh(network, config.seed)
        network.to(memory_format=torch.channels_last)
        self.module: Retrained = Retrained(network, beside).train()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return all weights by name."""
        return dict(self.module.named_parameters())

    def buffers(self) -> Mapping[str, Tensor]:
        """Return running statistics and other buffers by name."""
        return dict(self.module.named_buffers())

    def result(self) -> dict[str, Tensor]:
        """Return the network's parameters and buffers by their own names."""
        state = self.module.network.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}

    def not_finite(self) -> str | None:
        """Name the weight or buffer that broke."""
        for name, value in {**self.parameters(), **self.buffers()}.items():
            if not bool(value.isfinite().all()):
                return repr(name.removeprefix("network."))
        return None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Draw from generators of this step; the user's are as they were afterwards."""
        with seeded(mixed_seed(self._seed, _DRAWS, number), self._device):
            yield

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the network in eval mode."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()


def retrain(
    model: nn.Module,
    config: RetrainConfig,
    session: Session,
    loss: Callable[[nn.Module, Retrained, Step], dict[str, Tensor]],
    *,
    beside: nn.Module | None = None,
) -> Learned:
    """Train all weights of a network on labelled images of both domains.

    Args:
        model: The trained network; it isn't changed.
        config: The method's settings.
        session: Domains with labels, device, where to save.
        loss: Takes the student (call it), the network with what is beside it, and a step; returns named terms.
        beside: Further layers that are trained by the same loss, and aren't part of the result.

    Raises:
        InputError: The batch is too small for so many domains, or the network or the fabric can't be used.
        NonFiniteError: A loss term or a weight became NaN or infinite.
        Interrupted: The run was stopped; its state was saved.
    """
    weights, history = learn(
        NetworkWeights(model, config, session.fabric, beside),
        model,
        config,
        session,
        batches=lambda start: labelled_steps(config, session, start),
        loss=loss,
    )
    return Learned({}, history, weights)


@torch.no_grad()
def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network with other weights: an ordinary module, same class, keys, dtypes and modes.

    Args:
        model: The network; it isn't changed.
        weights: Its parameters and buffers by name.
    """
    with torch.inference_mode(False):
        result = copy.deepcopy(model)
    own = result.state_dict()
    for name, value in weights.items():
        own[name].copy_(value)
    return result


def start_fresh(network: nn.Module, seed: int) -> None:
    """Draw all weights of a network anew, in place.

    Every layer resets itself; convolutions and linear layers then get He's weights, without which deep networks that
    have no normalization don't learn.

    Args:
        network: Any network whose layers have ``reset_parameters``, as PyTorch's have.
        seed: What is drawn depends on it alone.

    Raises:
        InputError: A layer can't; the text names the parameter.
    """
    reset: set[int] = set()
    with seeded(seed, torch.device("cpu")):
        for module in network.modules():
            draw = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(draw):
                draw()
                reset |= {id(value) for value in module.parameters(recurse=False)}
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    for name, value in network.named_parameters():
        if id(value) not in reset:
            raise InputError(
                f"start='fresh': {name!r} belongs to a layer that has no reset_parameters; draw new weights yourself, "
                "and use start='given'"
            )


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the processor and of a device; afterwards they are as they were."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
