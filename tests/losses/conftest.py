"""The losses with their shapes checked at run time."""

import importlib
import sys
from types import ModuleType

import pytest
from jaxtyping import install_import_hook


@pytest.fixture(scope="session")
def classification() -> ModuleType:
    """A second copy of the module, in which jaxtyping and beartype check every shape that a function names."""
    import modelfence.losses as package

    name = "modelfence.losses.classification"
    plain = importlib.import_module(name)
    del sys.modules[name]
    try:
        with install_import_hook(name, "beartype.beartype"):
            checked = importlib.import_module(name)
    finally:
        sys.modules[name] = package.classification = plain
    assert checked is not plain
    return checked
