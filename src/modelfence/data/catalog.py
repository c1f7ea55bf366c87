"""The catalog of named domains: what they are, where they come from, how their labels are ordered."""

import os
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from modelfence.errors import InputError, nearest

DATA_VARIABLE = "MODELFENCE_DATA"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CatalogEntry:
    """What the catalog says about one domain.

    Attributes:
        name: The name users write.
        title: One line for people.
        family: Domains of one family share their label set.
        classes: Class names in label order.
        source: ``built-in`` (made from what installed packages carry), ``hub``, or ``local`` (no hub copy known).
        hub: Hugging Face data set, ``owner/name``, or None.
        config: The data set's configuration, or None.
        columns: Image and label column on the hub.
        splits: Our split name to the hub's.
        held_out: Where the hub has one split only: the share of it that makes our test split.
        where: Columns of the hub's data set and the value (or class name) that this domain's rows have in them.
        label_map: For each label on the hub, the label here; empty when they are the same.
        licence: Terms of the original data.
        note: What a user should know, such as what couldn't be confirmed.
    """

    name: str
    title: str
    family: str
    classes: tuple[str, ...]
    source: Literal["built-in", "hub", "local"]
    licence: str
    hub: str | None = None
    config: str | None = None
    columns: tuple[str, str] = ("image", "label")
    splits: dict[str, str] | None = None
    held_out: float | None = None
    where: dict[str, str] | None = None
    label_map: tuple[int, ...] = ()
    note: str = ""

    def local_file(self, split: str) -> Path | None:
        """Return ``$MODELFENCE_DATA/<name>/<split>.parquet``, or None when there is no such folder.

        Args:
            split: ``train`` or ``test``.

        Returns:
            The path, or None.

        Raises:
            InputError: The folder is there but the file isn't: a split from elsewhere could overlap with it.
        """
        root = os.environ.get(DATA_VARIABLE)
        if not root or not (Path(root) / self.name).is_dir():
            return None
        path = Path(root) / self.name / f"{split}.parquet"
        if not path.is_file():
            raise InputError(f"domain {self.name!r}: {path} is missing; add it, or remove the folder to use the hub")
        return path


@cache
def _entries() -> dict[str, CatalogEntry]:
    text = resources.files("modelfence.data").joinpath("catalog.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {
        name: CatalogEntry(name=name, **(table["families"][entry["family"]] | entry))
        for name, entry in table["domains"].items()
    }


def names() -> list[str]:
    """Return the names of all domains in the catalog.

    Example:
        >>> "mnist" in names()
        True
    """
    return list(_entries())


def lookup(name: str) -> CatalogEntry:
    """Return the catalog's entry of a domain.

    Args:
        name: Its name.

    Returns:
        The entry.

    Raises:
        InputError: The name isn't in the catalog; the text has the nearest ones.

    Example:
        >>> lookup("sklearn_digits").family
        'digits'
    """
    if name not in _entries():
        raise InputError(
            f"unknown domain {name!r}.{nearest(name, names())} The catalog has {', '.join(names())}; a path or "
            "hub:owner/name works too"
        )
    return _entries()[name]
