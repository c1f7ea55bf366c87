"""Writes settings.md, the settings of every method with their values by recipe: ``python docs/settings_page.py``."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from modelfence import CUTI, NTL, DFMap, SAMap, SFMap
from modelfence.methods.registry import unused
from modelfence.models.training import TrainConfig

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Made by `python docs/settings_page.py` from the configurations; don't edit by hand. In Python they are arguments
(`SAMap(steps=400)`), in a run file keys of `[method]`, on the command line `--set method.steps=400`. A dash: the recipe
doesn't use it, and giving it is an error. Networks without BatchNorm get other values, which a result records: `SAMap`
those of the recipe "paper" ([decision 17](decisions/0017-without-batch-norm-the-default-is-the-papers.md)), `SFMap` and
`DFMap` the factors below.
"""
METHODS = {
    SAMap: "source-available, and ownership",
    SFMap: "source-free",
    DFMap: "data-free, and source only",
    NTL: "a rival, retrains the network",
    CUTI: "a rival, retrains the network",
}


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for config, what in METHODS.items():
        recipes = list(getattr(config, "RECIPES", {})) or [""]
        made = [config(recipe=name) if name else config() for name in recipes]
        absent = [unused(config, name) for name in recipes]
        parts.append(f"\n## {config.__name__}: {what}\n")
        parts += table(config, [name or "default" for name in recipes], made, absent)
    parts.append("\n## [train], for `modelfence train`\n")
    parts += table(TrainConfig, ["default"], [TrainConfig()], [frozenset()])
    return "\n".join(parts) + "\n"


def table(config: type, recipes: list[str], made: list[object], unused: list[frozenset[str]]) -> list[str]:
    """Return the lines of a table: a setting, its value by recipe, its meaning."""
    said = meanings(config)
    lines = [f"| | {' | '.join(recipes)} | |", f"| --- |{' ---: |' * len(recipes)} --- |"]
    for one in sorted(fields(config), key=lambda field: list(said).index(field.name)):
        if one.name == "recipe":
            continue
        values = [
            "-" if one.name in absent else f"`{getattr(its, one.name)!r}`"
            for its, absent in zip(made, unused, strict=True)
        ]
        lines.append(f"| `{one.name}` | {' | '.join(values)} | {said[one.name]} |")
    return lines


def meanings(config: type) -> dict[str, str]:
    """Return what the docstrings of a configuration and its bases say of each setting."""
    said: dict[str, str] = {}
    for base in reversed(config.__mro__):
        block = re.search(r"\n(?:Attributes|Args):\n((?:    .*\n|\n)+)", inspect.cleandoc(base.__doc__ or "") + "\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", block[1] if block else "", re.MULTILINE):
            plain = re.sub(r":\w+:`[~.\w]*?(\w+)`", r"`\1`", text.replace("``", "`"))
            said[name] = " ".join(plain.split()).replace("|", "\\|")
    return said


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
