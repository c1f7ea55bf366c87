"""The loop that fits a generator to a frozen classifier."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from modelfence.errors import NonFiniteError
from modelfence.synthesis.judge import Judge

Announce = Callable[[str], None]
Terms = Mapping[str, Tensor]

_SAID = 4  # times a fit tells how it stands


def fit(
    module: nn.Module,
    terms: Callable[[int], Terms],
    *,
    steps: int,
    learning_rate: float,
    title: str,
    announce: Announce | None = None,
) -> None:
    """Minimize the sum of some terms by Adam (betas 0.5 and 0.999, as is usual for generators), in place.

    Args:
        module: What is fitted.
        terms: From the number of the step to named scalars.
        steps: How many.
        learning_rate: Falls to zero over the last half of the steps.
        title: What messages call the fit.
        announce: Told now and then how the terms stand.

    Raises:
        NonFiniteError: The sum became NaN or infinite.
    """
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate, betas=(0.5, 0.999))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, 2 * (steps - step) / steps)
        found = terms(step)
        total = torch.stack(tuple(found.values())).sum()
        optimizer.zero_grad()
        torch.autograd.backward(total)
        optimizer.step()
        if (step + 1) % max(1, steps // _SAID) == 0 or step + 1 == steps:
            if not math.isfinite(float(total.detach())):
                raise NonFiniteError(f"{title}: the loss became NaN or infinite by step {step + 1}; use precision fp32")
            if announce is not None:
                shown = ", ".join(f"{name} {float(value.detach()):.3f}" for name, value in found.items())
                announce(f"{title}: step {step + 1} of {steps} ({shown})")
    module.eval()


@torch.no_grad()
def in_parts(make: Callable[[int, int], Tensor], count: int, judge: Judge) -> Tensor:
    """Make many images, a few at a time, and return them as pixels.

    Args:
        make: From first and last index (exclusive) to so many normalized images.
        count: How many.
        judge: Knows what images are, and the context to compute in.

    Returns:
        uint8 (count, C, H, W), on the CPU.
    """
    parts, size = [], judge.at_once(250)
    for first in range(0, count, size):
        with judge.autocast():
            made = make(first, min(count, first + size))
        parts.append(judge.image.denormalize(made).cpu())
    return torch.cat(parts)
