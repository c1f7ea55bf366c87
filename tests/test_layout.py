"""The rules of the layout that no linter knows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modelfence

SOURCE = Path(modelfence.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST = 450


def test_the_files_are_found() -> None:
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_is_short_and_loads_no_pickle(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        assert not name.startswith(("pickle.", "joblib.", "marshal.")), name
        if name == "torch.load":
            safe = {key.arg: ast.unparse(key.value) for key in call.keywords}
            assert safe.get("weights_only") == "True"


def _public_functions() -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found.append((f"{path.relative_to(SOURCE)}:{node.name}", node))
    return found


@pytest.mark.parametrize(("name", "node"), [pytest.param(*found, id=found[0]) for found in _public_functions()])
def test_what_a_public_function_raises_is_documented(name: str, node: ast.FunctionDef) -> None:
    doc = ast.get_docstring(node) or ""
    assert doc, f"{name} has no docstring"
    if "cli/" in name:
        return  # a verb's docstring is its help text
    raised = {
        ast.unparse(step.exc.func)
        for step in ast.walk(node)
        if isinstance(step, ast.Raise) and isinstance(step.exc, ast.Call)
    }
    for error in raised:
        assert f"{error}:" in doc, f"{name} raises {error} and its docstring doesn't say when"


def test_the_public_names() -> None:
    names = ["ImageSpec", "Mask", "Protection", "SAMap", "__version__", "evaluate", "preflight", "protect"]
    assert sorted(modelfence.__all__) == names
    for name in names:
        assert getattr(modelfence, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Mapp'"):
        modelfence.Mapp  # noqa: B018


@pytest.mark.parametrize("command", ["import modelfence", "import modelfence.cli.main"])
def test_importing_is_light(command: str) -> None:
    heavy = "{'datasets', 'timm', 'torchvision', 'matplotlib', 'sklearn', 'lightning_fabric'}"
    code = f"import sys; {command}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
