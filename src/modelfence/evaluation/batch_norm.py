"""Re-estimating BatchNorm statistics: what anyone can do to a shipped model with a few unlabelled images."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modelfence.errors import InputError, first_line
from modelfence.masking.batch_mode import batch_norms
from modelfence.masking.unwrap import unwrap

_BATCH = 128


@torch.no_grad()
def refreshed(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Return a copy whose running statistics describe the given images (AdaBN).

    The statistics of every BatchNorm layer are forgotten and averaged anew with equal weight per batch; all
    other layers stay in eval mode (no dropout), no weight changes, no label is needed. A mask that was
    learned without regard to this is undone by it.

    Args:
        model: Any module; it isn't changed. Wrappers (compile, DDP, Fabric) are left out of the copy.
        batches: Normalized images, float32 (B, C, H, W) each, on the model's device. A batch of more than 128
            images is cut into equal parts of at most 128.

    Returns:
        The copy, in eval mode. A model without running statistics comes back as a plain copy.

    Raises:
        InputError: There are fewer than two images, or the model can't be copied.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(1)).eval()
        >>> copied = refreshed(model, [torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)])
        >>> copied[0].running_mean, model[0].running_mean
        (tensor([2.]), tensor([0.]))

    Source: Li et al., "Revisiting batch normalization for practical domain adaptation", 2016.
    """
    twin = copied(unwrap(model))
    twin.eval()
    norms = batch_norms(twin)
    if not norms:
        return twin
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    images = 0
    for batch in batches:
        images += len(batch)
        for part in batch.tensor_split(max(1, -(-len(batch) // _BATCH))):
            if len(part):
                twin(part)
    if images < 2:
        raise InputError(f"BatchNorm statistics can't be re-estimated on {images} image(s); give at least two")
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return twin.eval()


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy.

    Raises:
        InputError: The model can't be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"the model ({type(model).__name__}) can't be copied ({first_line(error)}); "
            "make pruning or parametrization permanent first"
        ) from error
