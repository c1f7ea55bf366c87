"""What numbers were measured on."""

import platform
from pathlib import Path
from typing import Any

from modelfence import artifact


def machine() -> dict[str, Any]:
    """Say what the numbers were measured on: processor, device, threads, versions.

    Example:
        >>> sorted(machine())
        ['device', 'modelfence', 'processor', 'python', 'threads', 'torch']
    """
    return {"processor": _processor(), **artifact.machine()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
