"""A cell of the ownership table: accuracy on clean and on marked images, and the test of the claim."""

from collections.abc import Sequence

from torch import nn

from modelfence.bench.cells import Cell, Record
from modelfence.data.catalog import lookup
from modelfence.data.domain import IndexedDomain
from modelfence.ownership.verification import verify
from modelfence.ownership.watermark import Watermark

_KINDS = {"digits": "digits", "visda": "visda"}
"""By family of domains; all others are photographs, and take that of the objects."""


def mark_of(cell: Cell) -> Watermark:
    """Return the watermark of a cell's domain, as NTL puts it on digits, objects and VisDA.

    Args:
        cell: Of the ownership table.
    """
    return Watermark(_KINDS.get(lookup(cell.source).family, "objects"))


def claim(cell: Cell, model: nn.Module, test: IndexedDomain, references: Sequence[nn.Module]) -> Record:
    """Test the claim that a model carries the mark.

    Args:
        cell: Of the ownership table.
        model: The suspect; the source model, for the row of unmarked models.
        test: Clean test images.
        references: Source models of other seeds.

    Returns:
        "verdict": what :meth:`modelfence.ownership.verification.Verdict.to_dict` gives.
    """
    verdict = verify(model, test, mark_of(cell), references=references)
    shown = f"clean {100 * verdict.accuracy_clean:.1f} | marked {100 * verdict.accuracy_marked:.1f}"
    return {"verdict": verdict.to_dict(), "line": f"{shown} | p {verdict.p_value:.2g}"}
