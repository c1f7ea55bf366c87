"""Flags, row values and the text table, on numbers set by hand."""

import math

import pytest

from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.scores import DomainScore, ModelScore


def score(accuracy: float, before: float | None = 0.9, **changes) -> DomainScore:
    facts = {
        "name": "usps",
        "role": "unauthorized",
        "images": 1000,
        "chance": 0.1,
        "accuracy": accuracy,
        "balanced_accuracy": accuracy,
        "most_predicted_class": 3,
        "most_predicted_share": 0.2,
        "top_label_share": 0.1,
    }
    original = changes.pop("before_refreshed", None)
    if before is not None:
        facts["before"] = ModelScore(
            accuracy=before,
            balanced_accuracy=before,
            most_predicted_class=0,
            most_predicted_share=0.1,
            refreshed_accuracy=original,
        )
    return DomainScore(**(facts | changes))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (score(0.1, before=0.14), "nothing to protect: the original model reached 14.0 %"),
        (score(0.1, most_predicted_share=0.9), "collapsed to class 3: 90.0 %"),
        (score(0.03), "below chance: balanced accuracy is 3.0 %"),
        (score(0.1, refreshed_accuracy=0.71, before_refreshed=0.86), "10.0 % accuracy back to 71.0 %"),
        (score(0.1, non_finite=5), "5 images got a non-finite output"),
    ],
)
def test_each_flag_by_itself(found, words):
    assert len(found.flags) == 1
    assert words in found.flags[0]


@pytest.mark.parametrize(
    "found",
    [
        score(0.12),
        score(0.09),  # under chance by less than three standard errors
        score(0.05, images=30),  # too few images to tell
        score(0.1, before=0.14, role="authorized"),
        score(0.1, most_predicted_share=0.9, top_label_share=0.9),  # the domain itself is of one class
        score(0.1, refreshed_accuracy=0.15, before_refreshed=0.9),
        score(0.5, before=None),
    ],
)
def test_no_flag_without_a_reason(found):
    assert found.flags == ()


def test_closure_after_refresh_compares_refreshed_with_refreshed():
    found = score(0.1, before=0.784, refreshed_accuracy=0.166, before_refreshed=0.866)
    assert found.closure_refreshed == pytest.approx((0.866 - 0.166) / (0.866 - 0.1))
    assert math.isnan(score(0.1, refreshed_accuracy=0.1).closure_refreshed)


def test_row_values_of_a_table():
    source = score(0.97, before=0.986, role="authorized", name="mnist")
    easy, hard = score(0.15, before=0.784), score(0.06, before=0.12)
    table = Evaluation((source, easy, hard), classes=10)
    falls = (0.784 - 0.15 + 0.12 - 0.06) / (0.784 + 0.12)
    assert table.relative_target_drop == pytest.approx(falls)
    assert table.relative_source_drop == pytest.approx(0.016 / 0.986)
    assert table.st_d == pytest.approx(0.016 / 0.986 / falls)
    assert table.closure == pytest.approx((0.784 - 0.15) / 0.684)  # the near-chance domain is left out of this mean
    assert math.isnan(table.closure_refreshed)
    assert math.isnan(Evaluation((source,), classes=10).st_d)


def test_the_text_table_line_by_line():
    source = score(
        0.97, before=0.986, role="authorized", name="mnist", refreshed_accuracy=0.984, before_refreshed=0.986
    )
    target = score(0.07, before=0.784, refreshed_accuracy=0.166, before_refreshed=0.866)
    lines = str(Evaluation((source, target), classes=10, refresh_images=500)).splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[3] == "* mnist 1000 98.6 97.0 98.6 97.0 98.6 98.4 1.6 - - - 3: 20.0"
    assert cells[4] == "usps 1000 78.4 7.0 78.4 7.0 86.6 16.6 71.4 104.4 104.4 91.4 3: 20.0"
    assert "ST-D 0.018: authorized accuracy fell by 1.6 % of itself, unauthorized by 91.1 %." in lines
    assert len({len(line) for line in lines[1:5]}) == 1


def test_the_text_table_fits_and_shortens_nothing_in_footnotes():
    name = "a_domain_whose_name_is_longer_than_any_column_should_be"
    worst = score(
        0.01,
        before=1.0,
        name=name,
        images=1_000_000,
        most_predicted_class=100,
        most_predicted_share=1.0,
        refreshed_accuracy=1.0,
        before_refreshed=1.0,
    )
    text = str(Evaluation((worst, score(0.95, before=0.1)), classes=10, refresh_images=500))
    assert max(map(len, text.splitlines())) <= 110
    assert f"- {name}: collapsed to class 100" in text
    assert "ST-D" not in text  # nothing is authorized: the row has no value


def test_undefined_st_d_is_said():
    table = Evaluation((score(0.9, role="authorized"), score(0.9)), classes=10)
    assert "ST-D undefined" in str(table)
