"""House rules that a reader relies on, checked by reading the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "modelfence"
FILES = sorted(SOURCE.rglob("*.py"))
ROOTS = [path for path in (SOURCE, SOURCE.parents[1] / "tests", SOURCE.parents[1] / "benchmarks") if path.is_dir()]
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE.parents[1]))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Return functions of the module and methods of its public classes, without those that start with _."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    for node in (node for body in bodies for node in body):
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def raised(function: Function) -> set[str]:
    """Return the errors of ours that a function raises itself."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            names.add(node.exc.func.id)
    return names & {"InputError", "ArtifactError", "MaskMismatchError", "NonFiniteError", "Interrupted"}


def test_there_is_something_to_check():
    assert len(FILES) > 20
    assert sum(len(list(public_functions(tree))) for _, tree in trees()) > 50


def test_no_file_is_longer_than_450_lines():
    long = {
        name_of(path): lines
        for root in ROOTS
        for path in root.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 450
    }
    assert long == {}


def test_nothing_unpickles():
    """torch.load is allowed with weights_only=True, written out at the call."""
    wrong = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if unpickles(node):
                wrong.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def unpickles(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in PICKLES
    if isinstance(node, ast.Import):
        return bool(PICKLES - {"pickle"} & {alias.name for alias in node.names})
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
        return node.attr != "UnpicklingError"  # to be caught
    if not isinstance(node, ast.Call):
        return False
    called, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
    if called == "torch.load":
        return words.get("weights_only") != "True"
    return called == "torch.save" or (called in ("np.load", "numpy.load") and words.get("allow_pickle") != "False")


def test_every_public_function_is_documented_and_says_what_it_raises():
    wrong = []
    for path, tree in trees():
        for function in public_functions(tree):
            text = ast.get_docstring(function) or ""
            where = f"{name_of(path)}:{function.lineno} {function.name}"
            if not text:
                wrong.append(f"{where} has no docstring")
            # a command's docstring is its --help, and a method may point to the one it stands for
            elsewhere = path.parent.name == "cli" or "see :meth:`" in text
            for error in () if elsewhere else raised(function):
                # a parent class in the list covers its children
                parents = {error, "InputError"} if error in ("ArtifactError", "MaskMismatchError") else {error}
                section = text.partition("Raises:")[2]
                if not any(parent in section for parent in parents) and not text.startswith(("Raise", "Refuse")):
                    wrong.append(f"{where} raises {error} and doesn't say so")
    assert wrong == []


def test_every_module_says_what_it_is_for():
    assert [name_of(path) for path, tree in trees() if not ast.get_docstring(tree)] == []
