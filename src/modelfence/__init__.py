"""Confine a trained image classifier to the domains its owner authorized."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from modelfence.data.image_spec import ImageSpec
    from modelfence.evaluation.table import evaluate
    from modelfence.masking.mask import Mask
    from modelfence.masking.preflight import preflight
    from modelfence.methods.cuti import CUTI
    from modelfence.methods.dfmap import DFMap
    from modelfence.methods.ntl import NTL
    from modelfence.methods.samap import SAMap
    from modelfence.methods.sfmap import SFMap
    from modelfence.ownership.verification import verify
    from modelfence.ownership.watermark import Watermark
    from modelfence.protect import Protection, protect

_WHERE = {
    "CUTI": "modelfence.methods.cuti",
    "DFMap": "modelfence.methods.dfmap",
    "ImageSpec": "modelfence.data.image_spec",
    "Mask": "modelfence.masking.mask",
    "NTL": "modelfence.methods.ntl",
    "Protection": "modelfence.protect",
    "SAMap": "modelfence.methods.samap",
    "SFMap": "modelfence.methods.sfmap",
    "Watermark": "modelfence.ownership.watermark",
    "evaluate": "modelfence.evaluation.table",
    "preflight": "modelfence.masking.preflight",
    "protect": "modelfence.protect",
    "verify": "modelfence.ownership.verification",
}

__all__ = [
    "CUTI",
    "NTL",
    "DFMap",
    "ImageSpec",
    "Mask",
    "Protection",
    "SAMap",
    "SFMap",
    "Watermark",
    "__version__",
    "evaluate",
    "preflight",
    "protect",
    "verify",
]


class _Package(ModuleType):
    """Keeps ``modelfence.protect`` the function: importing the module of that name would put itself in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.protect if name == "protect" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``modelfence --help`` is quick."""
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'modelfence' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
