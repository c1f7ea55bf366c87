"""What numbers were measured on."""

from typing import Any

from modelfence import artifact
from modelfence.models.autocast import processor


def machine() -> dict[str, Any]:
    """Say what the numbers were measured on: processor, device, threads, versions.

    Example:
        >>> sorted(machine())
        ['device', 'modelfence', 'processor', 'python', 'threads', 'torch']
    """
    return {"processor": processor(), **artifact.machine()}
