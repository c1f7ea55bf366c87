from pathlib import Path

from modelfence.bench.rendering import Table, comma_separated, latex, markdown, spread, write_table

TABLE = Table(
    "Source-free, a_b",
    ["method", "source", "MT", "drop, %"],
    [["SF-MAP", "MT", "99.0 => 97.1 ± 0.4", "-"], ["NTL", "MT", "failed", "..."]],
    texts=2,
    notes=["Mean & spread."],
    records=[
        {"method": "SF-MAP", "quantity": "after", "mean": 0.971, "spread": 0.004},
        {"method": "NTL", "quantity": "after", "mean": None, "spread": None},
    ],
)


def test_markdown() -> None:
    assert markdown(TABLE) == (
        "### Source-free, a_b\n"
        "\n"
        "| method | source | MT | drop, % |\n"
        "| --- | --- | ---: | ---: |\n"
        "| SF-MAP | MT | 99.0 => 97.1 ± 0.4 | - |\n"
        "| NTL | MT | failed | ... |\n"
        "\n"
        "Mean & spread.\n"
    )


def test_latex() -> None:
    assert latex(TABLE) == (
        "\\begin{table}\n"
        "\\centering\n"
        "\\caption{Source-free, a\\_b. Mean \\& spread.}\n"
        "\\begin{tabular}{llrr}\n"
        "\\toprule\n"
        "method & source & MT & drop, \\% \\\\\n"
        "\\midrule\n"
        "SF-MAP & MT & 99.0 $\\Rightarrow$ 97.1 $\\pm$ 0.4 & - \\\\\n"
        "NTL & MT & failed & ... \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\end{table}\n"
    )


def test_csv() -> None:
    assert comma_separated(TABLE) == "method,quantity,mean,spread\nSF-MAP,after,0.971,0.004\nNTL,after,,\n"


def test_spread_is_mean_and_sample_standard_deviation() -> None:
    assert spread([0.1, 0.2, 0.3]) == "20.0 ± 10.0"
    assert spread([0.2442], scale=1, digits=3) == "0.244"
    assert spread([-0.0001]) == "0.0"


def test_all_three_are_written(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path / "tables", "x")
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["x.csv", "x.md", "x.tex"]
