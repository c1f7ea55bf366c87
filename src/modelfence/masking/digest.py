"""One number for the exact content of a network."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modelfence.masking.unwrap import require_network


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 over a network's parameters and persistent buffers.

    Entries are sorted by name; each contributes its name, dtype, shape and bytes in row-major order. Memory
    format and device don't count, one changed bit does.

    Args:
        model: A network without wrappers (see :func:`unwrap`).

    Returns:
        64 hexadecimal digits.

    Raises:
        InputError: It isn't a network.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = digest_of(layer)
        >>> _ = layer.weight.data.neg_()
        >>> digest_of(layer) == before
        False
    """
    require_network(model)
    return digest_of_tensors({name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)})


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over named tensors, as :func:`digest_of` defines it."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        total.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        total.update(bytes_of(value))
    return total.hexdigest()


def bytes_of(value: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, whatever its dtype, device or strides."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
