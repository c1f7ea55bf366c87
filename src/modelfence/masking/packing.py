"""Eight mask bits in a byte."""

import numpy as np
import torch
from torch import Tensor

from modelfence.errors import ArtifactError


def pack_bits(kept: Tensor) -> Tensor:
    """Pack booleans into bytes, first element in the lowest bit, in row-major order of the logical shape.

    Args:
        kept: Boolean tensor of any shape and strides, n elements.

    Returns:
        uint8 tensor of shape (ceil(n / 8),); the unused bits of the last byte are zero.

    Example:
        >>> pack_bits(torch.tensor([True, False, True])).tolist()
        [5]
    """
    flat = kept.detach().cpu().contiguous().reshape(-1).numpy()
    return torch.from_numpy(np.packbits(flat, bitorder="little"))


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unpack what :func:`pack_bits` packed.

    Args:
        packed: uint8 tensor of shape (ceil(n / 8),).
        shape: Logical shape with n elements.

    Returns:
        Boolean tensor of that shape, contiguous.

    Raises:
        ArtifactError: The number of bytes doesn't fit the shape, or an unused bit is set.

    Example:
        >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), (3,)).tolist()
        [True, False, True]
    """
    count = int(np.prod(shape, dtype=np.int64))
    if packed.dtype != torch.uint8 or packed.numel() != -(-count // 8):
        raise ArtifactError(f"mask of shape {shape} needs {-(-count // 8)} bytes, {packed.numel()} are there")
    bits = np.unpackbits(packed.cpu().numpy(), bitorder="little")
    if bits[count:].any():
        raise ArtifactError(f"mask of shape {shape} has bits set beyond its end; the file was altered")
    return torch.from_numpy(bits[:count].astype(bool)).reshape(shape)
