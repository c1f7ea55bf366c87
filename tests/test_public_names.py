"""The public surface: changing it is a decision, and importing it is quick."""

import subprocess
import sys

import pytest

import modelfence

NAMES = {
    "CUTI",
    "DFMap",
    "ImageSpec",
    "Mask",
    "NTL",
    "Protection",
    "SAMap",
    "SFMap",
    "Watermark",
    "__version__",
    "evaluate",
    "preflight",
    "protect",
    "verify",
}
HEAVY = ("datasets", "timm", "matplotlib", "sklearn", "torchvision", "lightning_fabric", "pyarrow")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_names_are_these():
    assert set(modelfence.__all__) == NAMES
    assert all(hasattr(modelfence, name) for name in NAMES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'SFMop'"):
        modelfence.SFMop  # noqa: B018


def test_importing_brings_no_more_than_is_needed():
    """Nothing comes with the bare name; data sets, plots and zoos don't come with the core."""
    code = f"""
import sys
import modelfence as mf
heavy = {HEAVY!r}
print([name for name in (*heavy, "torch") if name in sys.modules])
mf.protect, mf.SAMap, mf.Mask, mf.preflight, mf.ImageSpec
print([name for name in heavy if name in sys.modules])
"""
    assert python(code).splitlines() == ["[]", "['lightning_fabric']"]


ORDERS = [
    "import modelfence as mf; mf.protect; protect = mf.protect",
    "from modelfence.protect import Protection; import modelfence as mf; protect = mf.protect",
    "import modelfence.protect; from modelfence import protect",
    "from modelfence import *",
    "from modelfence import protect; from modelfence import protect",
]


def test_protect_stays_the_function_though_a_module_has_its_name(monkeypatch):
    """Whatever is imported first; each order starts from a package that isn't imported yet."""
    for order in ORDERS:
        for name in ("modelfence", "modelfence.protect"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        names: dict[str, object] = {}
        exec(order, names)  # noqa: S102 (the lines above)
        assert type(names["protect"]).__name__ == "function", order
