"""Exact probabilities of counts: no approximation by a normal distribution anywhere."""


def at_least(count: int, trials: int, rate: float) -> float:
    """Return the probability of ``count`` or more successes: ``P(Bin(trials, rate) >= count)``.

    Args:
        count: Successes seen, from 0 to ``trials``.
        trials: Independent trials.
        rate: Chance of success in each, above 0 and below 1.

    Returns:
        The probability, accurate far into the tail; 1 when ``count`` is 0.

    Example:
        >>> at_least(2, 3, 0.5)
        0.5
    """
    from scipy.special import betainc  # type: ignore[import-untyped]  # scipy has no types

    if count <= 0:
        return 1.0
    return 0.0 if count > trials else float(betainc(count, trials - count + 1, rate))


def sign_test(against: int, other: int) -> float:
    """Return the exact one-sided p of McNemar's test for paired answers.

    Under the hypothesis tested, a pair whose two answers differ is as likely, or more, to differ the ``other`` way.

    Args:
        against: Pairs that speak against the hypothesis.
        other: Pairs that differ the other way.

    Returns:
        ``P(Bin(against + other, 1/2) >= against)``.

    Example:
        >>> sign_test(3, 0)
        0.125
    """
    return at_least(against, against + other, 0.5)


def clopper_pearson(count: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return an exact two-sided confidence interval of a rate (Clopper and Pearson, 1934).

    Args:
        count: Successes seen.
        trials: Independent trials, at least 1.
        confidence: Chance that the interval covers the rate, at least.

    Returns:
        Lower and upper end, 0..1.

    Example:
        >>> low, high = clopper_pearson(0, 20, 0.95)
        >>> low, round(high, 4)
        (0.0, 0.1684)
    """
    from scipy.special import betaincinv

    side = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, trials - count + 1, side))
    high = 1.0 if count == trials else float(betaincinv(count + 1, trials - count, 1 - side))
    return low, high


def gap_interval(lost: int, won: int, images: int, confidence: float) -> tuple[float, float]:
    """Return a confidence interval of the difference of two accuracies on the same images.

    The difference is the rate of lost images less that of won ones. Each rate gets a Clopper-Pearson interval that
    misses with half the chance allowed, so both cover together with at least the confidence asked for, whatever the
    dependence between them: wider than need be, never too narrow.

    Args:
        lost: Images right the first time and wrong the second.
        won: Images wrong the first time and right the second.
        images: All images, at least 1.
        confidence: Chance that the interval covers the difference, at least.

    Returns:
        Lower and upper end, -1..1.

    Example:
        >>> low, high = gap_interval(70, 0, 100, 0.95)
        >>> round(low, 2), round(high, 2)
        (0.54, 0.8)
    """
    each = (1 + confidence) / 2
    lost_low, lost_high = clopper_pearson(lost, images, each)
    won_low, won_high = clopper_pearson(won, images, each)
    return lost_low - won_high, lost_high - won_low
