"""Logits out of whatever a classifier returns."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from modelfence.errors import InputError


def logits_of(output: object) -> Tensor:
    """Return the logits in a model's output.

    Args:
        output: A tensor, a mapping with the key ``logits``, an object with the attribute ``logits``, or a
            sequence whose first item is one of these.

    Returns:
        Logits of shape (N, K), unnormalized.

    Raises:
        InputError: No tensor of two dimensions can be found in the output.

    Example:
        >>> import torch
        >>> logits_of({"logits": torch.zeros(2, 10)}).shape
        torch.Size([2, 10])
    """
    found = output
    if isinstance(found, Mapping) and "logits" in found:
        found = found["logits"]
    elif hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, Sequence) and not isinstance(found, str) and found:
        return logits_of(found[0])
    if not isinstance(found, Tensor):
        raise InputError(
            f"the model returned {type(output).__name__}; a tensor, a mapping or object with 'logits', "
            "or a tuple that starts with one is needed: wrap the model so that it returns logits"
        )
    if found.ndim != 2:
        raise InputError(
            f"the model returned logits of shape {tuple(found.shape)}; (images, classes) is needed: "
            "modelfence confines image classifiers only"
        )
    return found
