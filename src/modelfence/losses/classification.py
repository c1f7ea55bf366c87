"""Cross-entropy, distillation and the clamped ascent that unlearns a domain (Eqs. 1, 4 and 7)."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

Clamp = Literal["batch", "sample"]
Labels = Int[Tensor, "images"] | Float[Tensor, "images classes"]


def cross_entropy(logits: Float[Tensor, "images classes"], labels: Labels) -> Float[Tensor, ""]:
    """Mean cross-entropy: the first term of Eq. 1.

    The paper writes ``KL(p || y)``, which is infinite for a one-hot ``y``; it is cross-entropy (spec section 2).

    Args:
        logits: Shape (N, K), unnormalized.
        labels: Class indices of shape (N,), or class probabilities (N, K).

    Returns:
        A scalar in nats, at least 0.

    Example:
        >>> import torch
        >>> round(cross_entropy(torch.zeros(2, 10), torch.tensor([0, 1])).item(), 4)
        2.3026
    """
    return F.cross_entropy(logits.float(), labels)


def distillation(
    teacher_logits: Float[Tensor, "images classes"], student_logits: Float[Tensor, "images classes"]
) -> Float[Tensor, ""]:
    """Mean ``KL(teacher || student)`` of the softmax outputs: the first term of Eq. 4.

    Args:
        teacher_logits: Shape (N, K); no gradient is needed.
        student_logits: Shape (N, K).

    Returns:
        A scalar in nats, at least 0; 0 where both agree.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> distillation(logits, logits).item()
        0.0
    """
    return F.kl_div(
        F.log_softmax(student_logits.float(), dim=1),
        F.log_softmax(teacher_logits.float(), dim=1),
        reduction="batchmean",
        log_target=True,
    )


def clamped_ascent(
    logits: Float[Tensor, "images classes"],
    labels: Labels,
    *,
    weight: float = 0.1,
    limit: float = 1.0,
    clamp: Clamp = "batch",
    mean_over_processes: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    r"""Cross-entropy to be maximized, up to a limit: the second term of Eqs. 1, 4 and 7.

    ``clamp="batch"``: ``min(weight * mean_i CE_i, limit)``, as the paper has it; a few images whose loss explodes
    stop the gradient of all. ``clamp="sample"``: ``mean_i min(weight * CE_i, limit)``; only those images stop.

    Args:
        logits: Shape (N, K), unnormalized.
        labels: Class indices of shape (N,), or class probabilities (N, K), of the unauthorized images.
        weight: The factor lambda, above 0.
        limit: The bound alpha, beta or gamma, above 0.
        clamp: What is bounded.
        mean_over_processes: Averages a scalar over processes, so that the bound is that of the joint batch;
            needed for ``clamp="batch"`` with several processes.

    Returns:
        A scalar in 0..limit; subtract it from the loss. In several processes it is this process's share.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 100.0], [0.0, 0.0]])
        >>> labels = torch.tensor([0, 0])
        >>> clamped_ascent(logits, labels, weight=0.1, limit=1.0).item()
        1.0
        >>> round(clamped_ascent(logits, labels, weight=0.1, limit=1.0, clamp="sample").item(), 4)
        0.5347
    """
    each = weight * F.cross_entropy(logits.float(), labels, reduction="none")
    if clamp == "sample":
        return each.clamp(max=limit).mean()
    mean = each.mean()
    joint = mean.detach() if mean_over_processes is None else mean_over_processes(mean.detach().clone())
    return mean.new_full((), limit).where(joint >= limit, mean)  # NaN passes, so that it is noticed


def dependence(
    logits: Float[Tensor, "images classes"],
    *,
    mean_over_processes: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    r"""How much the answers depend on the images: mutual information, ``mean_i KL(p_i || mean_j p_j)``.

    It is 0 where all images get the same answer, whatever that is, so that balanced accuracy is at chance; no labels.
    The mean answer is taken as a constant, which leaves the gradient as it is: probabilities sum to 1.

    Args:
        logits: Shape (N, K), unnormalized.
        mean_over_processes: Averages a tensor over processes, so that the mean answer is that of the joint batch.

    Returns:
        A scalar in nats, from 0 to the log of the number of classes.

    Source: this project's, not the paper's; mutual information of answer and image as in Bridle et al. (NIPS 1991).

    Example:
        >>> import torch
        >>> round(dependence(torch.tensor([[100.0, 0.0], [0.0, 100.0]])).item(), 4), dependence(torch.ones(2, 2)).item()
        (0.6931, 0.0)
    """
    each = F.log_softmax(logits.float(), dim=1)
    mean = each.detach().exp().mean(dim=0)
    joint = mean if mean_over_processes is None else mean_over_processes(mean)
    return (each.exp() * (each - joint.clamp_min(1e-12).log())).sum(dim=1).mean()
