"""A small network that is trained beside the mask, with its optimizer and what both need to go on."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence.methods.loop import Companion
from modelfence.methods.state import part_of

Network = TypeVar("Network", bound=nn.Module)


class Trainee(Generic[Network]):
    """A network and its optimizer, the same on all processes.

    Args:
        network: It is put into train mode and moved to the fabric's device.
        optimizer: Returns the optimizer of some parameters.
        fabric: Whose processes share a batch; gradients are averaged over them.

    Attributes:
        network: As given.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> trainee = Trainee(layer, lambda some: torch.optim.SGD(some, lr=0.5), Fabric(accelerator="cpu", devices=1))
        >>> _ = layer.weight.data.fill_(1)
        >>> trainee.descend(layer(torch.ones(1, 1)).sum())
        >>> layer.weight.item(), list(trainee.state())
        (0.5, ['network/weight'])
    """

    def __init__(
        self,
        network: Network,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        fabric: Fabric,
    ) -> None:
        self.network = network.to(fabric.device).train()
        self._named = dict(self.network.named_parameters())
        self._optimizer = optimizer(list(self._named.values()))
        self._fabric = fabric

    def descend(self, loss: Tensor, *, adjust: Callable[[], None] | None = None) -> None:
        """Take one optimizer step; no gradient reaches anything but the network.

        Args:
            loss: A scalar that every parameter has a part in; outside of autocast.
            adjust: Changes the gradients (``.grad``) before they are applied.
        """
        parameters = list(self._named.values())
        for parameter, gradient in zip(parameters, self._mean(torch.autograd.grad(loss, parameters)), strict=True):
            parameter.grad = gradient
        if adjust is not None:
            adjust()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _mean(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Average gradients over processes, all in one message."""
        if self._fabric.world_size == 1:
            return gradients
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean = cast("Tensor", self._fabric.all_reduce(flat))
        parts = torch.split(mean, [gradient.numel() for gradient in gradients])
        return tuple(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Return the network's tensors and the optimizer's, by name."""
        tensors = {f"network/{name}": value for name, value in self.network.state_dict().items()}
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer/{key}/{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned."""
        own = part_of(tensors, "network")
        self.network.load_state_dict(own)
        for name, value in part_of(tensors, "optimizer").items():
            key, _, owner = name.partition("/")
            parameter = self._named[owner]
            # the count of steps stays where optimizers want it, on the CPU
            self._optimizer.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device)


class Companions:
    """Several companions of a mask as one.

    Args:
        **parts: Each by a name of its own.
    """

    def __init__(self, **parts: Companion) -> None:
        self._parts = parts

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of all parts, by the name of the part and theirs."""
        return {
            f"{part}/{name}": value
            for part, companion in self._parts.items()
            for name, value in companion.state().items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned."""
        for part, companion in self._parts.items():
            companion.load(part_of(tensors, part))
