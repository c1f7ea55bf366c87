"""Accuracies, drops, ST-D and closure: pure functions (MAP, CVPR 2024, section "metrics", signs settled).

Accuracies are fractions in 0..1; every quotient that has no meaning is NaN, never 0 and never infinite.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

Answers = Int[Tensor, "images"]
"""One class per image, int64."""

PROTECTABLE_MARGIN = 0.05
"""How far above chance (as a fraction) a domain must stand before there is something to protect."""

_ROUNDING = 1e-12


def _check(predictions: Answers, labels: Answers) -> None:
    if predictions.shape != labels.shape or predictions.ndim != 1:
        raise ValueError(
            f"predictions {tuple(predictions.shape)} and labels {tuple(labels.shape)} must be vectors of one length"
        )


def accuracy(predictions: Answers, labels: Answers) -> float:
    """Return the share of right predictions.

    Args:
        predictions: Predicted classes, int64 of shape (N,); -1 stands for "no answer" and counts as wrong.
        labels: True classes, int64 of shape (N,).

    Returns:
        A fraction in 0..1; NaN without images.

    Raises:
        ValueError: The shapes differ.

    Example:
        >>> accuracy(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]))
        0.75
    """
    _check(predictions, labels)
    if labels.numel() == 0:
        return math.nan
    return int((predictions == labels).sum()) / labels.numel()


def balanced_accuracy(predictions: Answers, labels: Answers, classes: int) -> float:
    """Return the mean of the recalls of the classes that occur among the labels.

    A model that answers one class alone scores 1/K here on every set that holds all K classes, while its
    plain accuracy depends on how common that class is.

    Args:
        predictions: Predicted classes, int64 of shape (N,); -1 stands for "no answer" and counts as wrong.
        labels: True classes in 0..classes-1, int64 of shape (N,).
        classes: Number of classes K.

    Returns:
        A fraction in 0..1; NaN without images.

    Raises:
        ValueError: The shapes differ.

    Example:
        >>> balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]), classes=2)
        0.5
    """
    _check(predictions, labels)
    totals = torch.bincount(labels, minlength=classes).double()
    right = torch.bincount(labels[predictions == labels], minlength=classes).double()
    present = totals > 0
    return float((right[present] / totals[present]).mean())


def most_predicted_share(predictions: Answers, classes: int) -> tuple[int, float]:
    """Return the class that a model answers most often and the share of images that get it.

    Args:
        predictions: Predicted classes, int64 of shape (N,); -1 stands for "no answer".
        classes: Number of classes K.

    Returns:
        The class (the lowest one among equals; -1 where no image has an answer) and its share in 0..1 of all
        images (NaN without images).

    Example:
        >>> most_predicted_share(torch.tensor([2, 2, 2, 0]), classes=3)
        (2, 0.75)
    """
    if predictions.numel() == 0:
        return -1, math.nan
    counts = torch.bincount(predictions[predictions >= 0], minlength=classes)
    if int(counts.sum()) == 0:
        return -1, 0.0
    top = int(counts.argmax())
    return top, int(counts[top]) / predictions.numel()


def drop(before: float, after: float) -> float:
    """Return how much accuracy was lost: ``before - after``; negative where it rose.

    Example:
        >>> round(drop(0.98, 0.18), 3)
        0.8
    """
    return before - after


def relative_drop(before: float, after: float) -> float:
    """Return the lost share of the accuracy that was there: ``(before - after) / before``.

    Returns:
        A fraction of at most 1, negative where accuracy rose; NaN where there was none before.

    Example:
        >>> relative_drop(0.75, 0.1875)
        0.75
    """
    return (before - after) / before if before > 0 else math.nan


def st_d(
    source_before: float, source_after: float, target_before: Sequence[float], target_after: Sequence[float]
) -> float:
    """Return the source/target drop ratio of one row: relative source drop over relative target drop.

    The targets of a row are summed first (mean target drop over mean target accuracy before), then the
    ratio is taken. Lower is better; negative means that the source improved. The value rewards a tiny
    source drop even where the targets hardly fall, so it never stands without both drops beside it.

    Args:
        source_before: Accuracy on the authorized domain before, as a fraction (or all in percent).
        source_after: Accuracy on the authorized domain after.
        target_before: Accuracies on the unauthorized domains before, one each.
        target_after: Accuracies on the unauthorized domains after, in the same order.

    Returns:
        The ratio; NaN where the targets together don't drop, or where no accuracy was there before.

    Raises:
        ValueError: The two target lists have different lengths.

    Example:
        >>> round(st_d(0.989, 0.990, [0.963, 0.363, 0.649], [0.143, 0.189, 0.107]), 4)
        -0.0013

    Source: MAP, CVPR 2024, section 4 (metrics).
    """
    if len(target_before) != len(target_after):
        raise ValueError(f"{len(target_before)} target accuracies before, {len(target_after)} after")
    target = relative_drop(math.fsum(target_before), math.fsum(target_after))
    if math.isnan(target) or target <= _ROUNDING:
        return math.nan
    return relative_drop(source_before, source_after) / target


def mean_st_d(rows: Sequence[float]) -> float:
    """Return the value of a whole table: the mean of its rows.

    One undefined row makes the mean undefined. A row is undefined where protection failed altogether (the
    targets didn't drop), and leaving it out would reward the failure.

    Args:
        rows: ST-D of each row, see :func:`st_d`.

    Returns:
        The mean; NaN without rows or with an undefined one.

    Example:
        >>> mean_st_d([0.25, 0.75])
        0.5
    """
    return math.fsum(rows) / len(rows) if rows else math.nan


def closure(before: float, after: float, chance: float) -> float:
    """Return the share of the above-chance accuracy that was taken away.

    ``(before - after) / (before - chance)`` is comparable across models and domains where the relative drop
    isn't: 1 is down to guessing, 0 is unchanged.

    Args:
        before: Accuracy before, as a fraction.
        after: Accuracy after, as a fraction.
        chance: Accuracy of guessing, 1/K.

    Returns:
        The share; over 1 where the accuracy fell below chance, negative where it rose. NaN ("nothing to
        protect") where the accuracy before was less than 5 points above chance.

    Example:
        >>> round(closure(0.9, 0.1, chance=0.1), 6), closure(0.14, 0.1, chance=0.1)
        (1.0, nan)
    """
    if not before - chance >= PROTECTABLE_MARGIN - _ROUNDING:
        return math.nan
    return (before - after) / (before - chance)


def row_closure(pairs: Sequence[tuple[float, float]], chance: float) -> float:
    """Return the closure of several targets: summed over those that had something to protect, then the ratio.

    Args:
        pairs: Accuracy before and after of each target, as fractions.
        chance: Accuracy of guessing, 1/K.

    Returns:
        See :func:`closure`; NaN where no target had something to protect.

    Example:
        >>> round(row_closure([(0.9, 0.5), (0.3, 0.1), (0.12, 0.5)], chance=0.1), 6)
        0.6
    """
    known = [pair for pair in pairs if not math.isnan(closure(*pair, chance))]
    if not known:
        return math.nan
    return math.fsum(before - after for before, after in known) / math.fsum(before - chance for before, _ in known)
