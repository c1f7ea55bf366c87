"""The processes of a run that torchrun started."""

import os
from typing import TYPE_CHECKING

import torch

from modelfence.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def joined_fabric(precision: str) -> "Fabric | None":
    """Return a launched Fabric that joins the processes torchrun started, or None where there is one process.

    Args:
        precision: "auto", "bf16" or "fp32".

    Raises:
        InputError: The environment holds something else than what torchrun sets.

    Example:
        >>> joined_fabric("fp32") is None
        True
    """
    world = _count("WORLD_SIZE", 1)
    if world == 1:
        return None
    local = _count("LOCAL_WORLD_SIZE", world)
    if world % local:
        raise InputError(f"LOCAL_WORLD_SIZE is {local}, which doesn't divide WORLD_SIZE {world}; start with torchrun")
    from lightning_fabric import Fabric

    from modelfence.models.autocast import resolve_precision

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


def _count(name: str, default: int) -> int:
    """Return a number of processes from the environment."""
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal() or not 1 <= int(text[:7]) <= 10**6:
        raise InputError(f"the environment variable {name} is {text!r:.40}; a number of processes is needed: unset it")
    return int(text)
