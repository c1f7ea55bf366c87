"""What the benchmark scripts share with ``modelfence bench``: real domains, source models, cells that are files."""

import json
import os
from pathlib import Path

from modelfence.bench import source_models
from modelfence.bench.cells import read_record
from modelfence.bench.domains import domains, image_spec
from modelfence.bench.machine import machine
from modelfence.files import atomic_write

__all__ = ["RESULTS", "WORK", "cell", "domains", "image_spec", "machine", "source_model"]

RESULTS = Path(__file__).parent / "results"
WORK = Path(os.environ.get("MODELFENCE_BENCH", "out/bench"))


def cell(path, make):
    """Return a finished record; make it and save it if it isn't finished."""
    found = read_record(Path(path), print)
    if found is None:
        found = make()
        atomic_write(Path(path), json.dumps(found, indent=1) + "\n")
    return found


def source_model(network, domain, size, classes=10, seed=0):
    """Return the source model (SL) of a domain; it is trained once and kept in the work folder."""
    wanted = source_models.SourceModel(network, domain, size, classes, seed)
    return source_models.source_model(WORK, wanted, wait=True)
