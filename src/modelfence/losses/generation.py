"""What makes generated images look like something a classifier was trained on (Eq. 2)."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def confidence(logits: Float[Tensor, "images classes"]) -> Float[Tensor, ""]:
    r"""Cross-entropy to the classifier's own decision: the first term of Eq. 2.

    ``mean_i -ln p_i[argmax p_i]``. The paper prints it with the other sign, which would make the classifier unsure
    (spec section 3); minimized as it is here, it makes the classifier sure.

    Args:
        logits: Shape (N, K), the original network's on generated images.

    Returns:
        A scalar in nats, 0 (sure) to ln K (no opinion).

    Example:
        >>> round(confidence(torch.zeros(2, 10)).item(), 4)
        2.3026
        >>> confidence(torch.tensor([[100.0, 0.0]])).item()
        0.0
    """
    return F.cross_entropy(logits.float(), logits.argmax(dim=1))


def balance(
    logits: Float[Tensor, "images classes"], mean_over_processes: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, ""]:
    r"""Negative entropy of the batch-mean softmax: the second term of Eq. 2.

    ``sum_k pbar_k ln pbar_k`` with ``pbar = mean_i p_i``; minimized, it spreads the images over the classes. The
    batch must be several times as large as the number of classes to say anything.

    Args:
        logits: Shape (N, K).
        mean_over_processes: Averages a tensor (K,) over processes, so that pbar is that of the joint batch; needed
            with several processes of equal batches.

    Returns:
        A scalar in nats, -ln K (all classes alike) to 0 (one class). In several processes it is this process's
        share: the mean over processes of values and of gradients is that of the joint batch. It is
        differentiable once.

    Example:
        >>> round(balance(torch.zeros(2, 10)).item(), 4)
        -2.3026
        >>> round(balance(100 * torch.eye(2)).item(), 4)
        -0.6931
    """
    mean = logits.float().softmax(dim=1).mean(dim=0)
    joint = mean.detach() if mean_over_processes is None else mean_over_processes(mean.detach().clone())
    # d(p ln p) = (ln p + 1) dp, and the shares' changes sum to 0: the gradient is ln p alone
    return (mean * joint.clamp_min(torch.finfo(joint.dtype).tiny).log()).sum()


def jensen_shannon(
    teacher_logits: Float[Tensor, "images classes"], student_logits: Float[Tensor, "images classes"]
) -> Float[Tensor, ""]:
    r"""Mean Jensen-Shannon divergence of two networks' softmax outputs: the third term of Eq. 2.

    ``mean_i [KL(p || m) + KL(q || m)] / 2`` with ``m = (p + q) / 2``. Added to a generator's loss it looks for images
    on which both agree, subtracted for those on which they don't (spec section 3: the paper says both).

    Args:
        teacher_logits: Shape (N, K).
        student_logits: Shape (N, K).

    Returns:
        A scalar in nats, 0 (the same) to ln 2 (no class in common), differentiable in both.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> abs(round(jensen_shannon(logits, logits).item(), 6))
        0.0
        >>> round(jensen_shannon(torch.tensor([[99.0, 0.0]]), torch.tensor([[0.0, 99.0]])).item(), 4)
        0.6931
    """
    teacher = F.log_softmax(teacher_logits.float(), dim=1)
    student = F.log_softmax(student_logits.float(), dim=1)
    middle = torch.logaddexp(teacher, student) - math.log(2)
    each = teacher.exp() * (teacher - middle) + student.exp() * (student - middle)
    return each.sum(dim=1).mean() / 2


def activation(features: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Negative mean magnitude of features: the activation term that the paper names beside Eq. 2.

    DAFL (ICCV 2019) has it with weight 0.1 on the features before the classifier: images of the kind that a network
    was trained on excite it more than others.

    Args:
        features: Any shape.

    Returns:
        A scalar of at most 0: ``-mean |feature|``.

    Example:
        >>> activation(torch.tensor([[1.0, -3.0]])).item()
        -2.0
    """
    return -features.float().abs().mean()
