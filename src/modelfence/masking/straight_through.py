"""The straight-through step between a real score and a binary mask."""

from typing import Any

import torch
from torch import Tensor


class StraightThrough(torch.autograd.Function):
    """Weights where the score exceeds a threshold, zero elsewhere; the score's gradient passes straight through.

    Forward: ``W' = W where s > tau, else +0.0``. Backward: ``dL/ds = dL/dW' * W`` (MAP, CVPR 2024; spec section 1).
    Only the frozen weight is kept for the backward pass, which lives anyway: no float mask, no bit mask.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, weight: Tensor, threshold: float) -> Tensor:
        """Return the masked weight, with the dtype and strides of the weight."""
        ctx.save_for_backward(weight)
        ctx.score_dtype = score.dtype
        return torch.where(score > threshold, weight, weight.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Return the gradient of the score; the weight is frozen and gets none."""
        (weight,) = ctx.saved_tensors
        grad = grads[0]
        if grad.dtype == ctx.score_dtype:
            return grad * weight, None, None
        return grad.to(ctx.score_dtype).mul_(weight), None, None  # of the copy: no second one is needed


def masked_weight(score: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """Apply a binary mask to a frozen weight, differentiably in the score.

    Args:
        score: Real scores in float32, any shape.
        weight: Frozen weights of the same shape; float32, bfloat16 or float16.
        threshold: A weight is kept where its score is above it.

    Returns:
        ``weight`` with exact +0.0 where it is cut (also where the weight is NaN or infinite), in its own dtype.

    Example:
        >>> import torch
        >>> score = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> out = masked_weight(score, torch.tensor([-2.0, 3.0]), threshold=0.5)
        >>> out.detach().tolist()
        [-2.0, 0.0]
        >>> out.sum().backward()
        >>> score.grad.tolist()
        [-2.0, 3.0]
    """
    result: Tensor = StraightThrough.apply(score, weight, threshold)
    return result
