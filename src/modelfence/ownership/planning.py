"""How many images a claim needs."""

import itertools
import math

import torch

from modelfence.errors import InputError
from modelfence.ownership.exact import at_least, sign_test

MOST_IMAGES = 5000
"""Where :func:`sample_size` stops looking."""


def sample_size(
    gap: float, alpha: float = 1e-6, power: float = 0.99, *, accuracy: float = 1.0, tolerance: float = 0.3
) -> int:
    """Return the smallest number of images with which a true claim comes out as holding.

    Exact, for the test of :func:`modelfence.ownership.verification.verify` without references: the probability that p
    is below ``alpha`` is summed over all outcomes. The mark is taken to help on no image. Because counts are whole
    numbers, a slightly larger number of images can have slightly less power.

    Args:
        gap: True accuracy without the mark less that with it, above 0, at most ``accuracy``.
        alpha: Level of the test, above 0 and below 1.
        power: Probability wanted that the claim holds, above 0 and below 1.
        accuracy: True accuracy without the mark.
        tolerance: As in the test; 0.3 is that of a weak mark (:attr:`Watermark.tolerance`).

    Returns:
        The number of images.

    Raises:
        InputError: A number is out of range, the mark costs no more than is tolerated, or more than 5,000 images would
            be needed.

    Example:
        >>> sample_size(0.7, alpha=1e-6, power=0.99)
        73
    """
    for name, value in (("alpha", alpha), ("power", power), ("tolerance", tolerance)):
        if not 0 < value < 1:
            raise InputError(f"{name} is {value}; a number above 0 and below 1 is needed")
    if not 0 < gap <= accuracy <= 1:
        raise InputError(f"gap is {gap} and accuracy {accuracy}; 0 < gap <= accuracy <= 1 is needed")
    rate = gap / accuracy
    if rate <= tolerance:
        raise InputError(
            f"the mark takes {rate:.3g} of the images that are right without it, and {tolerance:.3g} is tolerated: no "
            "number of images shows such a claim; lower tolerance only if unmarked models lose less"
        )
    detected = _detected(rate, alpha, tolerance)
    for images in range(1, MOST_IMAGES + 1):
        if _power(images, accuracy, detected) >= power:
            return images
    raise InputError(f"more than {MOST_IMAGES} images would be needed; learn a stronger mark, or accept a higher alpha")


def _detected(rate: float, alpha: float, tolerance: float) -> list[float]:
    """Return the chance that p < alpha for each number of images right without the mark."""
    needed = next(count for count in itertools.count(1) if sign_test(count, 0) < alpha)
    chances = []
    for right in range(MOST_IMAGES + 1):
        while needed <= right and at_least(needed, right, tolerance) >= alpha:
            needed += 1
        chances.append(at_least(needed, right, rate))
    return chances


def _power(images: int, accuracy: float, detected: list[float]) -> float:
    """Average the chances over how many of the images are right without the mark."""
    if accuracy == 1:
        return detected[images]
    right = torch.arange(images + 1, dtype=torch.float64)
    ways = math.lgamma(images + 1) - torch.lgamma(right + 1) - torch.lgamma(images - right + 1)
    weights = (ways + right * math.log(accuracy) + (images - right) * math.log1p(-accuracy)).exp()
    return float(weights @ torch.tensor(detected[: images + 1], dtype=torch.float64))
