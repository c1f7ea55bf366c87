"""What a network computes on its way to the logits, found without changing it."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from modelfence.errors import InputError, nearest
from modelfence.masking.masked_model import MaskedModel
from modelfence.masking.unwrap import unwrap
from modelfence.models.outputs import logits_of

_MOST = 4  # layers
_LAYERS = (nn.Conv2d, nn.Linear)


class Penultimate(TorchFunctionMode):
    """Inside this context a network's last linear layer is watched: its input is what the classifier decides by.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with Penultimate() as found:
        ...     logits = network(torch.zeros(5, 1, 2, 2))
        >>> found.features(logits).shape
        torch.Size([5, 3])
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, torch.Size] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at calls of ``linear``; every call passes unchanged."""
        result = func(*args, **(kwargs or {}))
        if func is F.linear and result.ndim == 2:
            self._last = (args[0] if args else (kwargs or {})["input"], result.shape)
        return result

    def features(self, logits: Tensor) -> Tensor:
        """Return the features (N, D), differentiable in the images, in float32.

        Args:
            logits: (N, K), what the network returned in this context; where it doesn't end in a linear layer (a
                convolution and a mean over pixels, for one), they themselves are the features.
        """
        if self._last is None or self._last[1] != logits.shape:
            return logits.float()
        return self._last[0].float()


def features_of(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Run a network and return its logits (N, K) and the features before its last linear layer (N, D), in float32.

    Args:
        network: As it shall run; it isn't changed.
        images: (N, C, H, W), as it takes them.
    """
    with Penultimate() as found:
        logits = logits_of(network(images))
    return logits.float(), found.features(logits)


@contextlib.contextmanager
def outputs_of(network: nn.Module, layers: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collect what some modules return while the network runs in this context.

    Args:
        network: It gets hooks, which are gone afterwards.
        layers: Names of modules, as ``named_modules`` gives them.

    Yields:
        Their outputs in the order in which they run; a module that runs twice gives two.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with outputs_of(network, ["0"]) as found:
        ...     _ = network(torch.zeros(4, 2))
        >>> [value.shape for value in found]
        [torch.Size([4, 3])]
    """
    found: list[Tensor] = []
    handles: list[RemovableHandle] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append(output)

    try:
        for layer in layers:
            handles.append(network.get_submodule(layer).register_forward_hook(note))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def layers_to_compare(model: nn.Module, shape: Sequence[int], wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Choose the layers whose outputs two images are compared by (Eq. 3; MAP, CVPR 2024, doesn't name them).

    Of the convolutions and linear layers, in the order in which a blank image runs through them, at most four that are
    evenly spaced, the last one among them. Layers that a network has but doesn't run as modules (the projections within
    PyTorch's attention, for one) don't count.

    Args:
        model: The network; it isn't changed.
        shape: Of an image: (C, H, W).
        wanted: Names to take in place of those.

    Returns:
        Names of modules that return one tensor; none where the network has no such layer.

    Raises:
        InputError: A wanted name isn't a module of the network, isn't run, or doesn't return a tensor.

    Example:
        >>> layers_to_compare(nn.Sequential(*[nn.Conv2d(1, 1, 1) for _ in range(8)], nn.Flatten()), (1, 2, 2))
        ('1', '3', '5', '7')
        >>> layers_to_compare(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2), ["2"])
        Traceback (most recent call last):
        ...
        modelfence.errors.InputError: memory_layers: the model has no module '2'...
    """
    probe = probe_of(model)
    if wanted is None:
        run = layers_that_run(probe, _LAYERS, shape)
        count = min(_MOST, len(run))
        return tuple(run[(index + 1) * len(run) // count - 1] for index in range(count))
    require_layers(probe, wanted, shape, key="memory_layers")
    return tuple(wanted)


def layers_that_run(probe: nn.Module, kinds: tuple[type[nn.Module], ...], shape: Sequence[int]) -> list[str]:
    """Return the names of layers that return one tensor, in the order in which a blank image runs through them.

    Args:
        probe: A network to try that on (see :func:`probe_of`).
        kinds: Which layers count.
        shape: Of an image: (C, H, W).

    Example:
        >>> layers_that_run(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (nn.Linear,), (1, 2, 2))
        ['1']
    """
    names = [name for name, module in probe.named_modules() if isinstance(module, kinds)]
    return [name for name, outputs in _run(probe, names, shape).items() if isinstance(outputs[0], Tensor)]


def require_layers(
    probe: nn.Module, wanted: Sequence[str], shape: Sequence[int], *, key: str, once: bool = False
) -> list[torch.Size]:
    """Refuse names of modules whose output can't be used; return the shapes of those outputs for two images.

    Args:
        probe: A network to try that on (see :func:`probe_of`).
        wanted: Names of modules, as ``named_modules`` gives them.
        shape: Of an image: (C, H, W).
        key: The setting that has the names, for the error.
        once: Also refuse a module that runs more than once.

    Raises:
        InputError: A name isn't a module of the network, isn't run, or doesn't return a tensor.
    """
    modules = dict(probe.named_modules())
    for name in wanted:
        if name not in modules:
            raise InputError(f"{key}: the model has no module {name!r}.{nearest(name, modules)}")
    outputs = _run(probe, wanted, shape)
    shapes = []
    for name in wanted:
        first = outputs.get(name, [None])[0]
        if not isinstance(first, Tensor):
            what = f"returns {type(first).__name__}" if name in outputs else "isn't run"
            raise InputError(f"{key}: module {name!r} {what}; choose one that is run and returns one tensor")
        if once and len(outputs[name]) > 1:
            raise InputError(f"{key}: module {name!r} is run {len(outputs[name])} times; choose one that is run once")
        shapes.append(first.shape)
    return shapes


@torch.no_grad()
def _run(probe: nn.Module, names: Sequence[str], shape: Sequence[int]) -> dict[str, list[object]]:
    """Run blank images through a network and return what modules return, in the order in which they first run."""
    found: dict[str, list[object]] = {}

    def note(name: str, output: object) -> None:
        found.setdefault(name, []).append(output)

    handles = [
        probe.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name in dict.fromkeys(names)
    ]
    try:
        probe(blank(probe, shape))
    finally:
        for handle in handles:
            handle.remove()
    return found


def probe_of(model: nn.Module) -> nn.Module:
    """Return a copy of a network, without wrappers and in eval mode, to try things on."""
    with torch.inference_mode(False):
        return copy.deepcopy(unwrap(model)).eval()


def laid_out(images: Tensor, masked: MaskedModel) -> Tensor:
    """Return images in the dtype that a masked model's base takes and the memory format that it is fastest with."""
    return images.to(masked.input_dtype, memory_format=torch.channels_last)


def blank(network: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return two images of zeros (2, C, H, W) where a network is and in its dtype."""
    first = next(value for value in network.parameters() if value.is_floating_point())
    return torch.zeros(2, *shape, device=first.device, dtype=first.dtype)
