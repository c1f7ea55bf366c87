"""The public surface: changing it is a decision, and importing it is quick."""

import subprocess
import sys

import pytest

import modelfence

NAMES = {"ImageSpec", "Mask", "Protection", "SAMap", "__version__", "evaluate", "preflight", "protect"}
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


def test_importing_the_package_is_quick():
    """Neither torch nor anything heavier comes with the bare name; the rest comes with what needs it."""
    heavy = ("torch", *HEAVY)
    code = f"import sys, modelfence; print(sorted(set({heavy!r}) & set(sys.modules)))"
    assert python(code) == "[]"


def test_the_core_does_not_pull_in_data_sets_plots_or_zoos():
    unwanted = tuple(name for name in HEAVY if name != "lightning_fabric")
    code = (
        "import sys, modelfence as mf; mf.protect; mf.SAMap; mf.Mask; mf.preflight; mf.ImageSpec; "
        f"print(sorted(set({unwanted!r}) & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_protect_stays_the_function_though_a_module_has_its_name():
    checks = [
        "import modelfence as mf; mf.protect; assert callable(mf.protect)",
        "from modelfence.protect import Protection; import modelfence as mf; assert callable(mf.protect)",
        "import modelfence.protect; from modelfence import protect; assert callable(protect)",
        "from modelfence import *; assert callable(protect)",
    ]
    python("\n".join(checks[:1] + checks[2:]))
    python(checks[1])
