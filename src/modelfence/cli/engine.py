"""The processes of a run that torchrun started."""

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def joined_fabric(precision: str) -> "Fabric | None":
    """Return a launched Fabric that joins the processes torchrun started, or None where there is one process.

    Args:
        precision: "auto", "bf16" or "fp32".

    Example:
        >>> joined_fabric("fp32") is None
        True
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    from lightning_fabric import Fabric

    from modelfence.models.autocast import resolve_precision

    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=device,
        devices=local,
        num_nodes=world // local,
        strategy="ddp",
        precision="bf16-mixed" if resolve_precision(precision, device) == "bf16" else "32-true",
    )
    fabric.launch()
    return fabric


def is_first(fabric: "Fabric | None") -> bool:
    """Say whether this process is the one that writes and speaks."""
    return fabric is None or fabric.is_global_zero
