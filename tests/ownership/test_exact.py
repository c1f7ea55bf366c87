import math
from fractions import Fraction

import pytest
import scipy.stats
import torch

from modelfence.errors import InputError
from modelfence.ownership.exact import at_least, clopper_pearson, gap_interval, sign_test
from modelfence.ownership.planning import sample_size


def summed(count: int, trials: int, rate: float) -> float:
    """The binomial sum in exact fractions of whole numbers."""
    p = Fraction(rate)
    terms = (math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count, trials + 1))
    return float(sum(terms, Fraction(0)))


@pytest.mark.parametrize(
    ("count", "trials", "rate"),
    [(0, 5, 0.3), (5, 5, 0.3), (3, 7, 0.5), (70, 97, 0.1), (12, 100, 0.1), (180, 200, 0.1), (1, 400, 0.001)],
)
def test_the_tail_is_the_binomial_sum(count: int, trials: int, rate: float) -> None:
    assert at_least(count, trials, rate) == pytest.approx(summed(count, trials, rate), rel=1e-11, abs=0)
    if count:
        reference = scipy.stats.binomtest(count, trials, rate, alternative="greater").pvalue
        assert at_least(count, trials, rate) == pytest.approx(reference, rel=1e-9, abs=0)


def test_more_than_all_is_impossible() -> None:
    assert at_least(6, 5, 0.3) == 0


def test_the_sign_test_by_hand() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(0, 4) == 1
    assert sign_test(3, 1) == pytest.approx((4 + 1) / 16)
    assert sign_test(20, 0) == 2**-20


@pytest.mark.parametrize(("count", "trials"), [(0, 20), (20, 20), (3, 17), (85, 100)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_of_a_rate(count: int, trials: int, confidence: float) -> None:
    reference = scipy.stats.binomtest(count, trials).proportion_ci(confidence, method="exact")
    assert clopper_pearson(count, trials, confidence) == pytest.approx((reference.low, reference.high), abs=1e-12)


@pytest.mark.parametrize(("lost", "won"), [(0.0, 0.0), (0.7, 0.0), (0.2, 0.15), (0.05, 0.3)])
def test_the_interval_of_a_gap_covers_it_often_enough(lost: float, won: float) -> None:
    """All outcomes of 25 images, weighted."""
    covered = 0.0
    for a in range(26):
        for b in range(26 - a):
            low, high = gap_interval(a, b, 25, 0.95)
            chance = math.comb(25, a) * math.comb(25 - a, b) * lost**a * won**b * (1 - lost - won) ** (25 - a - b)
            covered += chance * (low <= lost - won <= high)
    assert covered >= 0.95


def claim_holds(right: int, lost: int, alpha: float, tolerance: float) -> bool:
    return max(summed(lost, right, tolerance), 2.0**-lost) < alpha


def chance_to_hold(images: int, gap: float, accuracy: float, alpha: float, tolerance: float) -> float:
    """Go through every outcome: images right without the mark, and how many of them the mark takes."""
    total = 0.0
    for right in range(images + 1):
        weight = math.comb(images, right) * accuracy**right * (1 - accuracy) ** (images - right)
        for lost in range(right + 1):
            if claim_holds(right, lost, alpha, tolerance):
                rate = gap / accuracy
                total += weight * math.comb(right, lost) * rate**lost * (1 - rate) ** (right - lost)
    return total


@pytest.mark.parametrize(
    ("gap", "alpha", "power", "accuracy", "tolerance"),
    [
        (0.7, 1e-6, 0.99, 1.0, 0.1),
        (0.5, 1e-3, 0.9, 0.8, 0.1),
        (0.6, 0.01, 0.95, 0.9, 0.3),
        (0.9, 2**-10, 0.5, 0.9, 0.1),
    ],
)
def test_the_sample_size_is_the_smallest(
    gap: float, alpha: float, power: float, accuracy: float, tolerance: float
) -> None:
    images = sample_size(gap, alpha, power, accuracy=accuracy, tolerance=tolerance)
    assert chance_to_hold(images, gap, accuracy, alpha, tolerance) >= power
    assert all(chance_to_hold(fewer, gap, accuracy, alpha, tolerance) < power for fewer in range(1, images))


def test_the_sample_size_by_trying() -> None:
    images = sample_size(0.4, 1e-4, 0.9, accuracy=0.9, tolerance=0.1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(2000, images, generator=generator)
    holds = [
        max(at_least(lost, right, 0.1), sign_test(lost, 0)) < 1e-4
        for right, lost in zip((draws < 0.9).sum(1).tolist(), (draws < 0.4).sum(1).tolist(), strict=True)
    ]
    assert sum(holds) / 2000 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"gap": 0.05}, "no number of images"),
        ({"gap": 0.9, "accuracy": 0.8}, "gap is 0.9 and accuracy 0.8"),
        ({"gap": 0.0}, "gap is 0.0"),
        ({"gap": 0.5, "alpha": 0.0}, "alpha is 0.0"),
        ({"gap": 0.5, "power": 1.0}, "power is 1.0"),
        ({"gap": 0.5, "tolerance": 0}, "tolerance is 0"),
        ({"gap": 0.301}, "more than 5000 images"),
    ],
)
def test_a_sample_size_that_there_is_not(arguments: dict, fragment: str) -> None:
    with pytest.raises(InputError) as caught:
        sample_size(**arguments)
    assert fragment in str(caught.value)
