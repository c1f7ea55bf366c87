"""CUTI's isolation domain: unauthorized features in the style of authorized ones, within the network."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from modelfence.errors import InputError
from modelfence.methods.features import layers_that_run, probe_of, require_layers
from modelfence.methods.retraining import seeded

_EPSILON = 1e-5
_MOST, _MAPS = 5, 4  # stages; axes of a map (N, C, H, W)

Projections = tuple[Tensor, Tensor]
"""Two matrices (C, C): of the means, and of the standard deviations."""


def style_of(
    maps: Float[Tensor, "images channels height width"],
) -> tuple[Float[Tensor, "images channels"], Float[Tensor, "images channels"]]:
    """Return mean and standard deviation over the pixels of every channel of every image, in float32.

    The variance is the unbiased one, plus 1e-5, as in CUTI's code. A map of one pixel has none, where that code gives
    NaN: 0 is taken.

    Example:
        >>> mean, deviation = style_of(torch.tensor([[[[1.0, 3.0]]]]))
        >>> mean.item(), round(deviation.item(), 3)
        (2.0, 1.414)
    """
    pixels = maps.float().flatten(2)
    variance = pixels.var(dim=2, correction=1 if pixels.shape[2] > 1 else 0)
    return pixels.mean(dim=2), (variance + _EPSILON).sqrt()


def isolated(
    source: Float[Tensor, "images channels height width"],
    target: Float[Tensor, "images channels height width"],
    mean_projection: Float[Tensor, "channels channels"],
    deviation_projection: Float[Tensor, "channels channels"],
) -> Float[Tensor, "images channels height width"]:
    """Return unauthorized features as those of the isolation domain: ``x_t * sigmoid(V sd_s) + sigmoid(W mean_s)``.

    Image i of one domain is paired with image i of the other (CUTI, CVPR 2023).

    Args:
        source: Features of authorized images; gradients flow through their style too.
        target: Features of as many unauthorized images.
        mean_projection: W, of a 1 x 1 convolution without bias.
        deviation_projection: V, likewise.

    Example:
        >>> maps, nothing = torch.ones(1, 1, 2, 2), torch.zeros(1, 1)
        >>> isolated(maps, 3 * maps, nothing, nothing).mean().item()
        2.0
    """
    mean, deviation = style_of(source)
    with torch.autocast(source.device.type, enabled=False):
        shift = torch.sigmoid(mean @ mean_projection.float().T)
        gate = torch.sigmoid(deviation @ deviation_projection.float().T)
        moved = target.float() * gate[:, :, None, None] + shift[:, :, None, None]
    return moved.to(target.dtype)


def drawn(channels: int, device: torch.device) -> Projections:
    """Draw both matrices as a new 1 x 1 convolution of PyTorch's would have them, from its global generator."""
    bound = 1 / math.sqrt(channels)
    mean, deviation = (torch.empty(channels, channels, device=device).uniform_(-bound, bound) for _ in range(2))
    return mean, deviation


class Gates(nn.Module):
    """Matrices of all stages, to be learned.

    Args:
        channels: Channels by stage.
        seed: What is drawn at the start depends on it alone.

    Example:
        >>> [matrix.shape for matrix in Gates({"features.2": 3}, seed=0).of("features.2")]
        [torch.Size([3, 3]), torch.Size([3, 3])]
    """

    def __init__(self, channels: Mapping[str, int], *, seed: int) -> None:
        super().__init__()
        self._places = {layer: 2 * index for index, layer in enumerate(channels)}
        cpu = torch.device("cpu")
        with seeded(seed, cpu):
            pairs = [drawn(count, cpu) for count in channels.values()]
        self.matrices = nn.ParameterList(nn.Parameter(matrix) for pair in pairs for matrix in pair)

    def of(self, layer: str) -> Projections:
        """Return the two matrices of a stage."""
        place = self._places[layer]
        return self.matrices[place], self.matrices[place + 1]


@contextlib.contextmanager
def isolating(
    network: nn.Module, layers: Sequence[str], projections: Callable[[str, Tensor], Projections]
) -> Iterator[None]:
    """Let some layers of a network return the isolation domain for the second half of a batch.

    Args:
        network: It gets hooks, which are gone afterwards. It is run on authorized images followed by as many others.
        layers: Names of modules that return maps.
        projections: Returns the matrices, given a layer's name and its output.
    """

    def replace(layer: str, _: nn.Module, __: object, output: Tensor) -> Tensor:
        source, target = output.chunk(2)
        return torch.cat([source, isolated(source, target, *projections(layer, output))])

    with contextlib.ExitStack() as handles:
        for layer in layers:
            handle = network.get_submodule(layer).register_forward_hook(partial(replace, layer))
            handles.callback(handle.remove)
        yield


def isolation_layers(model: nn.Module, shape: Sequence[int], wanted: Sequence[str] | None = None) -> dict[str, int]:
    """Choose the layers after which the isolation domain is made; return their numbers of channels by name.

    Args:
        model: The network; it isn't changed.
        shape: Of an image: (C, H, W).
        wanted: Names of modules to take in place of the default: the max-pooling layers, which are the five stages of
            CUTI's code in VGG11; in a network with less than two of them, up to five convolutions, evenly spaced.

    Raises:
        InputError: A module isn't there, isn't run once, or doesn't return maps (N, C, H, W); or there is none.

    Example:
        >>> layers = [nn.Conv2d(1, 3, 1), nn.MaxPool2d(2), nn.Conv2d(3, 5, 1), nn.MaxPool2d(2), nn.Flatten()]
        >>> isolation_layers(nn.Sequential(*layers), (1, 4, 4))
        {'1': 3, '3': 5}
    """
    probe = probe_of(model)
    if wanted is None:
        wanted = layers_that_run(probe, (nn.MaxPool2d,), shape)
        if len(wanted) < 2:
            run = layers_that_run(probe, (nn.Conv2d,), shape)
            count = min(_MOST, len(run))
            wanted = [run[(index + 1) * len(run) // count - 1] for index in range(count)]
    if not wanted:
        raise InputError("layers: the model has no convolution; name modules that return maps (N, C, H, W)")
    shapes = require_layers(probe, wanted, shape, key="layers", once=True)
    for name, found in zip(wanted, shapes, strict=True):
        if len(found) != _MAPS:
            raise InputError(f"layers: module {name!r} returns {len(found)} axes; choose one with maps (N, C, H, W)")
    return {name: found[1] for name, found in zip(wanted, shapes, strict=True)}
