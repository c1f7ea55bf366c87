"""Labels: readable, distinct, apart from each other."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelfence.evaluation.text import shorten
from modelfence.report.labels import beside, shorten_path, spread


@given(st.text(max_size=40), st.integers(9, 30))
def test_shortened_names_fit_and_keep_both_ends(name, most):
    short = shorten(name, most)
    assert len(short) <= most
    if len(name) <= most:
        assert short == name
    else:
        head, tail = short.split("...")[0], short[-3:]
        assert name.startswith(head)
        assert name.endswith(tail)


@given(st.text(max_size=80), st.integers(9, 40))
def test_shortened_paths_fit(name, most):
    assert len(shorten_path(name, most)) <= most


def test_blocks_of_a_transformer_stay_apart():
    names = [f"stages.{s}.blocks.{b}.attention.projection" for s in range(4) for b in range(30)]
    assert len({shorten_path(name) for name in names}) == len(names)


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.1, 20))
def test_spread_keeps_order_distance_and_bounds(values, gap):
    places = spread(values, gap=gap, low=0, high=100)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    least = min(gap, 100 / (len(values) - 1)) if len(values) > 1 else 0
    ranked = [place for _, place in sorted(zip(values, places, strict=True))]
    assert all(upper - lower >= least - 1e-6 for lower, upper in itertools.pairwise(ranked))


def test_spread_leaves_labels_that_are_apart_and_shares_the_move():
    assert spread([10, 90, 50], gap=5, low=0, high=100) == [10, 90, 50]
    assert spread([50, 50, 50], gap=6, low=0, high=100) == pytest.approx([44, 50, 56])
    assert spread([1, 1], gap=10, low=0, high=100) == pytest.approx([0, 10])


def test_only_labels_on_the_line_are_moved():
    assert beside(5, avoid=10, width=6) > 10
    assert beside(3, avoid=10, width=6) == 3
    assert beside(11, avoid=10, width=6) == 11
