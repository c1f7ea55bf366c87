"""Tables as Markdown, LaTeX and CSV."""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelfence.files import atomic_write

OPEN, FAILED, UNDEFINED = "...", "failed", "-"


@dataclass(frozen=True)
class Table:
    """A table of texts, and the same numbers for machines.

    Attributes:
        title: One line.
        header: Column heads; those of numbers are aligned right.
        rows: One text for each column.
        texts: How many of the columns, from the left, are words.
        notes: Sentences under the table.
        records: One record for each number, in JSON values.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = field(default_factory=list)


def spread(values: Iterable[float], *, scale: float = 100, digits: int = 1) -> str:
    """Write the mean of some values and, where there are several, their sample standard deviation.

    Args:
        values: One for each seed; NaN stands for undefined, and makes the mean so.
        scale: What they are multiplied by; 100 makes percent of fractions.
        digits: After the point.

    Returns:
        Such as "97.1 ± 0.4"; "..." without values, "-" where undefined.

    Example:
        >>> spread([0.97, 0.98]), spread([0.5]), spread([]), spread([0.1, float("nan")])
        ('97.5 ± 0.7', '50.0', '...', '-')
    """
    known = [scale * value for value in values]
    if not known:
        return OPEN
    if any(math.isnan(value) for value in known):
        return UNDEFINED
    shown = f"{_no_minus_zero(statistics.fmean(known), digits)}"
    return shown if len(known) == 1 else f"{shown} ± {statistics.stdev(known):.{digits}f}"


def record_of(values: Sequence[float], **facts: Any) -> dict[str, Any]:
    """Return a record of one number over seeds: what it is, mean, spread, count.

    Args:
        values: One for each seed.
        **facts: What it is.

    Example:
        >>> record_of([0.5], who="ours")
        {'who': 'ours', 'mean': 0.5, 'spread': None, 'seeds': 1}
    """
    known = [value for value in values if not math.isnan(value)]
    whole = bool(known) and len(known) == len(values)
    return {
        **facts,
        "mean": round(statistics.fmean(known), 6) if whole else None,
        "spread": round(statistics.stdev(known), 6) if whole and len(known) > 1 else None,
        "seeds": len(values),
    }


def markdown(table: Table) -> str:
    r"""Write a table as Markdown.

    Args:
        table: The table.

    Example:
        >>> print(markdown(Table("T", ["a", "b"], [["x", "1.0"]])), end="")
        ### T
        <BLANKLINE>
        | a | b |
        | --- | ---: |
        | x | 1.0 |
    """
    lines = [f"### {table.title}", "", _piped(table.header)]
    lines.append(_piped(["---" if index < table.texts else "---:" for index in range(len(table.header))]))
    lines += [_piped(row) for row in table.rows]
    lines += [line for note in table.notes for line in ("", note)]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """Write a table as LaTeX, for a document that loads ``booktabs``.

    Args:
        table: The table.
    """
    columns = "".join("l" if index < table.texts else "r" for index in range(len(table.header)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(' '.join([table.title + '.', *table.notes]))}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _ampersands(table.header),
        r"\midrule",
        *(_ampersands(row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def comma_separated(table: Table) -> str:
    """Write the numbers of a table as CSV, one a line, as fractions.

    Args:
        table: The table.
    """
    text = io.StringIO()
    keys = dict.fromkeys(key for record in table.records for key in record)
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.records)
    return text.getvalue()


def write_table(table: Table, folder: Path, name: str) -> None:
    """Write ``name.md``, ``name.tex`` and ``name.csv``.

    Args:
        table: The table.
        folder: Where to.
        name: Of the files, without ending.

    Raises:
        ArtifactError: The folder can't be written.
    """
    for ending, content in ((".md", markdown(table)), (".tex", latex(table)), (".csv", comma_separated(table))):
        atomic_write(folder / f"{name}{ending}", content)


def escaped(text: str) -> str:
    r"""Write plain text for LaTeX.

    Args:
        text: Any text.

    Example:
        >>> print(escaped("a_b 5 % => 3 ± 1"))
        a\_b 5 \% $\Rightarrow$ 3 $\pm$ 1
    """
    for plain, written in _LATEX.items():
        text = text.replace(plain, written)
    return text


_LATEX = {
    "\\": r"\textbackslash ",
    "=>": r"$\Rightarrow$",
    "±": r"$\pm$",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "#": r"\#",
    "†": r"\dag",
    ">": r"$>$",
    "<": r"$<$",
}


def _ampersands(row: Sequence[str]) -> str:
    return " & ".join(escaped(text) for text in row) + r" \\"


def _piped(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _no_minus_zero(value: float, digits: int) -> str:
    shown = f"{value:.{digits}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown
