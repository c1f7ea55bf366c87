"""All tables by name, and how a request for one is made."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from modelfence.bench import methods
from modelfence.bench.budgets import budget as budget_of
from modelfence.bench.request import Request
from modelfence.bench.tables import backbones, convergence, digits, losses, ownership, pairs, tsne
from modelfence.bench.tables.kind import Kind
from modelfence.errors import InputError
from modelfence.models.zoo import require_known

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "digits": digits.KIND,
        "ownership": ownership.KIND,
        "objects": pairs.OBJECTS,
        "pacs": pairs.PACS,
        "visda": pairs.VISDA,
        "backbones": backbones.KIND,
        "losses": losses.KIND,
        "convergence": convergence.KIND,
        "tsne": tsne.KIND,
    }
)
FOUR = (("digits", "sa"), ("digits", "sf"), ("digits", "df"), ("ownership", "sa"))
"""The four digit tables of the paper: table and setting."""


def request(
    table: str,
    *,
    budget: str,
    setting: str | None = None,
    network: str | None = None,
    chosen: Sequence[str] = (),
    seeds: Sequence[int] = (),
    what: Sequence[str] = (),
) -> Request:
    """Make a request; what isn't said is the table's or the budget's default.

    Args:
        table: Its name.
        budget: Name of the budget.
        setting: "sa", "sf" or "df".
        network: Of the zoo or of timm.
        chosen: Methods.
        seeds: Of the methods.
        what: Domains, pairs or networks.

    Raises:
        InputError: Something isn't known or doesn't fit.

    Example:
        >>> request("digits", budget="smoke", setting="df").methods
        ('DFMap',)
    """
    kind, limits = KINDS[table], budget_of(budget)
    setting = setting or kind.settings[0]
    if setting not in kind.settings:
        raise InputError(f"{table}: has no setting {setting!r}; it has {', '.join(kind.settings)}")
    if network is not None:
        require_known(network)
    names = tuple(dict.fromkeys(chosen or kind.methods(setting)))
    methods.require_methods(names, setting)
    if min(seeds, default=0) < 0:
        raise InputError(f"--seeds: {min(seeds)}; whole numbers from 0 are needed")
    count = limits.seeds["ownership" if table == "ownership" else setting]
    made = Request(
        table=table,
        setting=setting,
        budget=budget,
        network=network,
        methods=names,
        seeds=tuple(dict.fromkeys(seeds or range(count))),
        what=tuple(dict.fromkeys(what or kind.what(setting, budget))),
    )
    kind.cells(made)  # raises where something doesn't fit
    return made
