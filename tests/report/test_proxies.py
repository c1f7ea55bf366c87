"""Proxies and what they stand for: the right pairs, the right step."""

import pytest
from tests.report.test_figures import assert_tidy

from modelfence.report.proxies import agreement_of, agreements, pairs_of, proxy_figure, sentence

HISTORY = [
    {"step": 50, "source_agreement": 0.97, "target_agreement:usps": 0.8, "watch:mnist": 0.98, "watch:usps": 0.6},
    {"step": 100, "source_agreement": 0.95, "target_agreement:usps": 0.5, "watch:mnist": 0.80, "watch:usps": 0.4},
    {"step": 150, "source_agreement": 0.96, "target_agreement:usps": 0.3, "watch:mnist": 0.90, "watch:usps": 0.25},
]


def test_source_goes_with_source_and_a_target_with_its_name():
    pairs = pairs_of(HISTORY, ["mnist"])
    assert [(pair.proxy, pair.domain) for pair in pairs] == [
        ("source_agreement", "mnist"),
        ("target_agreement:usps", "usps"),
    ]
    assert pairs[1].steps == [50, 100, 150]
    assert pairs[1].agreement == [0.8, 0.5, 0.3]
    assert pairs[1].accuracy == [0.6, 0.4, 0.25]
    assert [pair.widest for pair in pairs] == [1, 0]
    assert [pair.apart for pair in pairs] == [pytest.approx(0.15), pytest.approx(0.2)]


def test_a_domain_without_a_proxy_of_its_own_goes_with_all():
    rows = [{"step": 1, "target_agreement:neighbours": 0.5, "watch:svhn": 0.25, "watch:usps": 0.5}]
    assert [(pair.proxy, pair.domain) for pair in pairs_of(rows, [])] == [
        ("target_agreement:neighbours", "svhn"),
        ("target_agreement:neighbours", "usps"),
    ]
    assert pairs_of([{"step": 1, "source_accuracy": 0.5, "watch:svhn": 0.2}], []) == []
    assert pairs_of([], []) == []


def test_steps_that_begin_anew_are_another_mask():
    again = [{**row, "mask": 1} for row in HISTORY]
    assert pairs_of([*HISTORY, *again], ["mnist"])[0].steps == [50, 100, 150]


def test_the_widest_difference_is_told():
    assert sentence(pairs_of(HISTORY, ["mnist"])) == (
        "The widest difference: at step 50 the model agreed with the original on 80.0 % of the unlabelled images of "
        "usps, and was right on 60.0 % of usps, 20.0 points apart. Agreement counts what the original model got wrong "
        "too."
    )
    assert agreements(agreement_of(HISTORY[-1])) == [
        "It agrees with the original model on 96.0 % of the images near the source.",
        "It agrees with the original model on 30.0 % of the unlabelled images of usps.",
    ]
    assert agreements(agreement_of({"step": 1, "gap": 0.5})) == []


@pytest.mark.parametrize("rows", [1, 3])
def test_the_figure_draws_both(rows):
    pairs = pairs_of(HISTORY[:rows], ["mnist"])
    figure = proxy_figure(pairs)
    assert len(figure.axes) == 2
    full, dashed = figure.axes[1].lines
    assert list(full.get_ydata()) == pytest.approx([60, 40, 25][:rows])
    assert list(dashed.get_ydata()) == pytest.approx([80, 50, 30][:rows])
    assert_tidy(figure)
