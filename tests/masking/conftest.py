"""One fixture that goes through the matrix of networks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.masking import zoo


@pytest.fixture(params=sorted(zoo.ZOO))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[zoo.Case]:
    """Each network of the zoo in turn, fresh."""
    if request.param not in zoo.NEEDS_PROCESS_GROUP:
        yield zoo.ZOO[request.param]()
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield zoo.ZOO[request.param]()
    finally:
        dist.destroy_process_group()
