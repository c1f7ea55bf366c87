"""Fixtures that every area shares."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on a busy machine two threads wait for each other

import pytest
import torch


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real domains; tests that need it are skipped, and say so, without it."""
    root = os.environ.get("MODELFENCE_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("MODELFENCE_DATA isn't set: no real images to test on")
    return Path(root)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
