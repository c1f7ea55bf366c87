"""``modelfence domains``: the catalog."""

from typing import TYPE_CHECKING

import click

from modelfence.cli import options
from modelfence.cli.console import Console

if TYPE_CHECKING:
    from modelfence.data.catalog import CatalogEntry


@click.command(name="domains", short_help="List the domains known by name.")
@options.as_json
def command(as_json: bool) -> None:
    """List the domains known by name, and where each is found."""
    from modelfence.data import catalog

    entries = [catalog.lookup(name) for name in catalog.names()]
    record = [
        {
            "name": entry.name,
            "title": entry.title,
            "family": entry.family,
            "classes": list(entry.classes),
            "found": _found(entry),
            "licence": entry.licence,
            "note": entry.note,
        }
        for entry in entries
    ]
    widths = [max(len(str(one[key])) for one in record) for key in ("name", "family")]
    lines = [f"{'name':{widths[0]}}  {'family':{widths[1]}}  classes  found"]
    lines += [
        f"{one['name']:{widths[0]}}  {one['family']:{widths[1]}}  {len(one['classes']):7}  {one['found']}"
        for one in record
    ]
    lines += ["", f"A folder of parquet files named by {catalog.DATA_VARIABLE} goes before the hub."]
    Console(as_json=as_json).result("\n".join(lines), record)


def _found(entry: "CatalogEntry") -> str:
    from modelfence.data import catalog

    if entry.source == "built-in":
        return "built in"
    if all(entry.local_file(split) is not None for split in ("train", "test")):
        return catalog.DATA_VARIABLE
    return f"hub:{entry.hub}" if entry.hub else "nowhere yet: see its note (--json)"
