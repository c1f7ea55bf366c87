"""A second copy of a module in which jaxtyping and beartype check every shape that a function names."""

import importlib
import sys
from types import ModuleType

from jaxtyping import install_import_hook


def checked_copy(name: str) -> ModuleType:
    """Import a module once more under the hook, and leave the plain one in its place."""
    package, _, leaf = name.rpartition(".")
    plain = importlib.import_module(name)
    del sys.modules[name]
    try:
        with install_import_hook(name, "beartype.beartype"):
            checked = importlib.import_module(name)
    finally:
        sys.modules[name] = plain
        setattr(sys.modules[package], leaf, plain)
    assert checked is not plain
    return checked
