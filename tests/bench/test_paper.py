import json
from importlib import resources
from statistics import fmean

import pytest

from modelfence.bench import paper
from modelfence.bench.tables.digits import DOMAINS, row_of

# relative source drop, relative target drop, ST-D: means over the four sources, recomputed by hand from the printed
# accuracies of the paper's tables
MEANS = {
    ("sa", "NTL"): (0.0099, 0.8152, 0.0124),
    ("sa", "CUTI"): (0.0026, 0.8020, 0.0033),
    ("sa", "SAMap"): (-0.0027, 0.8112, -0.0032),
    ("sf", "NTL"): (0.6894, 0.6797, 1.0151),
    ("sf", "CUTI"): (0.8740, 0.8059, 1.0847),
    ("sf", "SFMap"): (0.0882, 0.3585, 0.2442),
    ("df", "DFMap"): (0.0573, 0.2542, 0.2802),
}


@pytest.mark.parametrize("key", MEANS)
def test_ratios_follow_from_the_printed_accuracies(key: tuple[str, str]) -> None:
    rows = [paper.row(*key, source) for source in DOMAINS]
    found = [fmean(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    assert found == pytest.approx(MEANS[key], abs=1e-4)


def test_rows_have_the_source_first_and_four_domains() -> None:
    assert list(paper.row("sf", "SFMap", "svhn").accuracies) == ["svhn", "mnist", "usps", "mnist_m"]
    assert paper.row("df", "NTL", "mnist") is None
    assert paper.row("sa", "SAMap:paper", "mnist") == paper.row("sa", "SAMap", "mnist")


CLOSURES = [0.97, 0.95, 0.97, 0.81, 0.96, 0.43, 0.30]


@pytest.mark.parametrize(("key", "closure"), list(zip(MEANS, CLOSURES, strict=True)))
def test_closure_as_recomputed(key: tuple[str, str], closure: float) -> None:
    rows = [paper.row(*key, source) for source in DOMAINS]
    closures = [row_of(row.accuracies, source)[3] for row, source in zip(rows, DOMAINS, strict=True)]
    assert fmean(closures) == pytest.approx(closure, abs=0.006)


def test_mean_gaps_of_the_ownership_table() -> None:
    domains = ["mnist", "usps", "svhn", "mnist_m", "cifar10", "stl10", "visda_t"]
    for method, gap in (("SL", -0.386), ("NTL", 58.0), ("CUTI", 60.957), ("SAMap", 63.3)):
        pairs = [paper.ownership(domain, method) for domain in domains]
        assert 100 * fmean(clean - marked for marked, clean in pairs) == pytest.approx(gap, abs=0.06)


def test_the_file_says_where_its_numbers_are_from() -> None:
    record = json.loads(resources.files("modelfence.bench").joinpath("paper.json").read_text())
    assert "CVPR 2024" in record["source"]
