"""Which parameters of a network are masked, and how other modules name them."""

import torch
from torch import nn

from modelfence.masking.unwrap import require_network

_RECURRENT = ("weight_ih_l", "weight_hh_l", "weight_hr_l")
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_WEIGHTED = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def maskable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Select the weights of convolution and linear layers, fused attention projections and recurrent layers.

    A parameter is selected by the type of the layer that owns it, never by its shape: position embeddings, class
    tokens, biases and normalization parameters stay as they are. A parameter that several layers share appears
    once, under the first of its names.

    Args:
        model: Any network; a wrapper (DDP, compile) must be taken off before (see :func:`unwrap`).

    Returns:
        Parameter by name, in the order of ``model.named_parameters()``.

    Example:
        >>> list(maskable(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))))
        ['0.weight', '3.weight']
    """
    require_network(model)
    selected: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or not is_weight(module, local):
                continue
            if not torch.is_floating_point(parameter):
                continue
            seen.add(id(parameter))
            selected[f"{path}.{local}" if path else local] = parameter
    return selected


def aliases(model: nn.Module) -> dict[str, str]:
    """Map every further name of a shared masked parameter to the name it is masked under.

    Example:
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> second.weight = first.weight
        >>> aliases(nn.Sequential(first, second))
        {'1.weight': '0.weight'}
    """
    canonical = {id(parameter): name for name, parameter in maskable(model).items()}
    return {
        name: canonical[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in canonical and canonical[id(parameter)] != name
    }


def places(model: nn.Module) -> dict[str, str]:
    """Map every place that holds a masked parameter to the name it is masked under.

    Unlike with :func:`aliases`, a module that is registered twice counts once: it is one place.

    Example:
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> second.weight = first.weight
        >>> places(nn.Sequential(first, first, second))
        {'0.weight': '0.weight', '2.weight': '0.weight'}
    """
    canonical = {id(parameter): name for name, parameter in maskable(model).items()}
    return {
        f"{path}.{local}" if path else local: canonical[id(parameter)]
        for path, module in model.named_modules()
        for local, parameter in module._parameters.items()
        if id(parameter) in canonical
    }


def is_weight(module: nn.Module, name: str) -> bool:
    """Say whether a layer's parameter of that name is masked, where it is a parameter.

    Example:
        >>> is_weight(nn.Linear(2, 2), "weight"), is_weight(nn.Linear(2, 2), "bias"), is_weight(nn.ReLU(), "weight")
        (True, False, False)
    """
    if isinstance(module, _WEIGHTED):
        return name == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return name in _ATTENTION
    return isinstance(module, nn.RNNBase) and name.startswith(_RECURRENT)
