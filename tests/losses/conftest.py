"""The losses with their shapes checked at run time."""

from types import ModuleType

import pytest
from tests.losses.checked import checked_copy


@pytest.fixture(scope="session")
def classification() -> ModuleType:
    """A second copy of the module, in which jaxtyping and beartype check every shape that a function names."""
    return checked_copy("modelfence.losses.classification")
