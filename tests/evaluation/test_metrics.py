"""Metrics against scikit-learn, numpy and numbers derived by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from modelfence.evaluation import metrics

fractions = st.integers(0, 1000).map(lambda hits: hits / 1000)  # of 1,000 images
points = st.floats(1.0, 99.9).map(lambda value: round(value, 1))

# Accuracies printed in the paper: (source before, after), targets before, targets after; ST-D by hand.
PAPER_ROWS = [
    ("SA-MAP, mnist", (98.9, 99.0), [96.3, 36.3, 64.9], [14.3, 18.9, 10.7], -0.0013),
    ("NTL, mnist", (98.9, 97.4), [96.3, 36.3, 64.9], [14.0, 19.0, 11.2], 0.0195),
    ("CUTI, usps", (99.7, 99.8), [90.0, 32.8, 42.5], [16.7, 10.1, 8.5], -0.0013),
    ("SF-MAP, mnist", (99.2, 90.2), [96.3, 36.7, 64.8], [59.9, 19.4, 24.5], 0.1909),
    ("SF-MAP, usps", (99.7, 83.5), [90.0, 32.8, 42.4], [67.3, 7.1, 30.8], 0.4474),
    ("DF-MAP, svhn", (91.5, 76.3), [58.6, 70.9, 29.5], [46.6, 59.2, 24.2], 0.9108),
]


@pytest.mark.parametrize(("name", "source", "before", "after", "expected"), PAPER_ROWS)
def test_st_d_follows_from_the_papers_accuracies(name, source, before, after, expected):
    assert metrics.st_d(*source, before, after) == pytest.approx(expected, abs=5e-5), name


def test_table_value_is_the_mean_of_rows():
    rows = [
        metrics.st_d(98.9, 99.0, [96.3, 36.3, 64.9], [14.3, 18.9, 10.7]),
        metrics.st_d(99.7, 99.7, [90.0, 32.8, 42.5], [11.0, 7.8, 10.8]),
        metrics.st_d(91.9, 92.7, [68.4, 74.9, 32.8], [9.5, 8.5, 9.4]),
        metrics.st_d(97.1, 97.2, [97.6, 88.2, 40.1], [11.2, 14.3, 19.3]),
    ]
    assert metrics.mean_st_d(rows) == pytest.approx(-0.0032, abs=5e-5)


def test_an_undefined_row_makes_the_table_undefined():
    assert math.isnan(metrics.mean_st_d([0.1, math.nan]))
    assert math.isnan(metrics.mean_st_d([]))


def test_targets_with_nothing_to_protect_are_left_out_of_a_row_s_closure():
    pairs = [(0.9, 0.5), (0.14, 0.1), (0.2, 0.05)]
    assert metrics.row_closure(pairs, 0.1) == pytest.approx((0.4 + 0.15) / (0.8 + 0.1))
    assert math.isnan(metrics.row_closure(pairs[1:2], 0.1))
    assert math.isnan(metrics.row_closure([], 0.1))


def test_row_sums_targets_before_the_ratio():
    # Targets 0.8 -> 0.2 and 0.2 -> 0.2: summed drop 0.6 of 1.0; a mean of ratios would give 0.375.
    assert metrics.st_d(1.0, 0.94, [0.8, 0.2], [0.2, 0.2]) == pytest.approx(0.06 / 0.6)


@pytest.mark.parametrize(
    ("before", "after"),
    [([0.5], [0.5]), ([0.5], [0.6]), ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]), ([0.0], [0.0]), ([], [])],
)
def test_st_d_is_undefined_where_targets_do_not_drop(before, after):
    assert math.isnan(metrics.st_d(0.9, 0.8, before, after))


def test_st_d_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="2 target accuracies before, 1 after"):
        metrics.st_d(0.9, 0.9, [0.5, 0.5], [0.1])


@given(
    source=st.tuples(points, points),
    target=st.tuples(points, points),
    scale=st.sampled_from([0.01, 0.5, 3.0]),
)
def test_st_d_does_not_depend_on_the_unit(source, target, scale):
    plain = metrics.st_d(*source, [target[0]], [target[1]])
    scaled = metrics.st_d(*(scale * s for s in source), [scale * target[0]], [scale * target[1]])
    assert scaled == pytest.approx(plain, rel=1e-9, nan_ok=True)


@given(source=st.tuples(points, points), targets=st.lists(st.tuples(points, points), min_size=1, max_size=5))
def test_st_d_equals_the_ratio_of_means(source, targets):
    before, after = np.array(targets).T
    falls = (before - after).mean() / before.mean()
    got = metrics.st_d(*source, list(before), list(after))
    if falls <= 1e-12:
        assert math.isnan(got)
    else:
        assert got == pytest.approx(((source[0] - source[1]) / source[0]) / falls, rel=1e-6)


@given(before=fractions, after=fractions)
def test_drops_agree(before, after):
    relative = metrics.relative_drop(before, after)
    if before == 0:
        assert math.isnan(relative)
    else:
        assert relative <= 1
        assert relative * before == pytest.approx(metrics.drop(before, after), abs=1e-12)


@given(before=fractions, after=fractions, classes=st.integers(2, 100))
def test_closure_is_one_at_chance_and_nothing_where_there_was_nothing(before, after, classes):
    chance = 1 / classes
    if before < chance + 0.05 - 1e-9:
        assert math.isnan(metrics.closure(before, after, chance))
    elif before > chance + 0.05 + 1e-9:
        assert metrics.closure(before, chance, chance) == pytest.approx(1)
        assert metrics.closure(before, before, chance) == 0
        assert (metrics.closure(before, after, chance) > 1) == (after < chance)


def test_closure_counts_from_exactly_five_points_above_chance():
    assert metrics.closure(0.15, 0.10, 0.10) == pytest.approx(1)
    assert math.isnan(metrics.closure(0.149, 0.1, 0.1))
    assert math.isnan(metrics.closure(math.nan, 0.1, 0.1))


@given(data=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_accuracies_equal_scikit_learns(data):
    labels, predictions = np.array(data).T
    own = torch.from_numpy(predictions), torch.from_numpy(labels)
    assert metrics.accuracy(*own) == pytest.approx(sk.accuracy_score(labels, predictions))
    # recall_score over the classes present; balanced_accuracy_score warns on labels it hasn't seen
    recalls = sk.recall_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0)
    assert metrics.balanced_accuracy(*own, classes=5) == pytest.approx(recalls)


@given(data=st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_most_predicted_share_equals_a_count(data):
    top, share = metrics.most_predicted_share(torch.tensor(data), classes=5)
    assert share == max(data.count(k) for k in range(5)) / len(data) == data.count(top) / len(data)


def test_one_class_for_all_scores_chance_in_balanced_accuracy():
    labels = torch.tensor([0] * 90 + [1] * 5 + [2] * 5)
    answers = torch.zeros(100, dtype=torch.int64)
    assert metrics.accuracy(answers, labels) == 0.9
    assert metrics.balanced_accuracy(answers, labels, classes=3) == pytest.approx(1 / 3)


def test_no_answer_counts_as_wrong():
    answers, labels = torch.tensor([-1, 0, -1, 1]), torch.tensor([0, 0, 1, 1])
    assert metrics.accuracy(answers, labels) == 0.5
    assert metrics.balanced_accuracy(answers, labels, classes=2) == 0.5
    assert metrics.most_predicted_share(answers, classes=2) == (0, 0.25)
    assert metrics.most_predicted_share(torch.tensor([-1]), classes=2) == (-1, 0.0)


def test_empty_and_mismatched_input():
    none = torch.empty(0, dtype=torch.int64)
    assert math.isnan(metrics.accuracy(none, none))
    assert math.isnan(metrics.balanced_accuracy(none, none, classes=2))
    assert math.isnan(metrics.most_predicted_share(none, classes=2)[1])
    with pytest.raises(ValueError, match="vectors of one length"):
        metrics.accuracy(torch.tensor([1]), torch.tensor([1, 2]))
