"""A model as it is named on the command line or in a run file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelfence.cli.runfile import Run, read_run
from modelfence.cli.spoken import spoken
from modelfence.cli.tables import ModelTable, domain_name
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.files import usable_path
from modelfence.models.load import WEIGHTS_FILE, LoadedModel, load_model
from modelfence.models.zoo import create_model, require_known
from modelfence.results import is_finished

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_DOTTED = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)\.([^\W\d]\w*)")


def model_option(text: str) -> dict[str, Any]:
    """Return the ``[model]`` table that a text on the command line stands for.

    Example:
        >>> model_option("vgg11"), model_option("runs/sl"), model_option("my.module:build")
        ({'name': 'vgg11'}, {'path': 'runs/sl'}, {'factory': 'my.module:build'})
    """
    if Path(text).is_dir() or "/" in text or "\\" in text or text.startswith("."):
        return {"path": text}
    return {"factory": text} if ":" in text else {"name": text}


def image_option(size: int | None) -> dict[str, Any] | None:
    """Return the ``[image]`` table of a square RGB image with pixels scaled to -1..1."""
    if size is None:
        return None
    return {"channels": 3, "height": size, "width": size, "mean": [0.5] * 3, "std": [0.5] * 3}


def run_of(
    text: str, *, weights: str | None, classes: int | None, image_size: int | None, sets: tuple[str, ...] = ()
) -> Run:
    """Return the run that a MODEL argument stands for: a run file, or a model with options."""
    is_file = text.endswith(".toml")
    options = {
        "model": ("MODEL", None if is_file else model_option(text)),
        "model.weights": ("--weights", weights),
        "model.classes": ("--classes", classes),
        "image": ("--image-size", image_option(image_size)),
    }
    return read_run(text if is_file else None, options=options, sets=sets)


def load(table: ModelTable | None, image: ImageSpec | None, where: str) -> LoadedModel:
    """Load the trained model of a run.

    Args:
        table: The ``[model]`` table.
        image: The ``[image]`` table.
        where: What names the model, for the error when there is none.

    Raises:
        InputError: There is no model, or it can't be loaded.
    """
    if table is None:
        raise InputError(f"{where}: model: is missing; give a table [model] or --model")
    return _load(table, table.classes, image)


def _load(table: ModelTable, classes: int | None, image: ImageSpec | None) -> LoadedModel:
    _refuse_dotted(table.name)
    with spoken():
        return load_model(table.reference, classes=classes, image=image, weights=table.weights, args=table.args or None)


def _refuse_dotted(name: str | None) -> None:
    """Refuse ``package.module.Class`` where it isn't the name of a network: the last sign must be a colon."""
    parts = _DOTTED.fullmatch(name or "")
    if parts is None or name is None or Path(name).exists():
        return
    try:
        require_known(name)
    except InputError as error:
        colon = f"{parts[1]}:{parts[2]}"
        raise InputError(f"{error}; a class or function of your own is written {colon!r}") from error


def description(table: ModelTable | None) -> str:
    """Say which model a table names, and with which weights.

    Example:
        >>> description(ModelTable(path="sl")), description(ModelTable(name="vgg11", weights="w.pt"))
        ('sl', 'vgg11 with the weights of w.pt')
    """
    if table is None or table.weights is None:
        return "" if table is None else table.reference
    return f"{table.reference} with the weights of {table.weights}"


def output_hint(run: Run, where: str) -> str | None:
    """Say how the finished output of a run file is measured, where it is the model before it that was named.

    Args:
        run: The run.
        where: The run file.

    Returns:
        One line, or None where there is no such output, or it is the model named.
    """
    if run.output is None or run.model is None:
        return None
    folder = usable_path(run.output.folder)
    own = [folder.resolve(), (folder / WEIGHTS_FILE).resolve()]
    named = [Path(text).resolve() for text in (run.model.path, run.model.weights) if text is not None]
    if not is_finished(folder) or any(path in own for path in named):
        return None
    what = f"{where} --weights {folder}" if run.model.factory is not None else f"{folder} DOMAIN..."
    return f"the finished output of {where} is another model; measure it with: modelfence evaluate {what}"


def load_untrained(table: ModelTable, image: ImageSpec, classes: int) -> LoadedModel:
    """Build a network with new weights, or load one to train on; seed torch's generator first.

    Raises:
        InputError: It can't be built or loaded.
    """
    if table.name is not None and table.weights is None:
        _refuse_dotted(table.name)
        with spoken():
            model = create_model(table.name, classes, image, **table.args)
        return LoadedModel(model, image, classes, table.name, dict(table.args))
    return _load(table, classes, image)


def load_before(text: str, after: LoadedModel) -> LoadedModel:
    """Load the model that another was made from: a reference, or a weights file for the same network.

    Raises:
        InputError: It can't be loaded.
    """
    with spoken(weights="a saved folder or its weights file instead"):
        if text.endswith(_WEIGHTS):
            return load_model(after.reference, classes=after.classes, image=after.image, weights=text, args=after.args)
        if Path(text).is_dir():
            return load_model(text)
        return load_model(text, classes=after.classes, image=after.image)


def named_domains(texts: Sequence[str]) -> dict[str, str] | None:
    """Return domain by name for arguments ``domain`` or ``name=domain``; None when there is none.

    Raises:
        InputError: Two have the same name, or one is empty.

    Example:
        >>> named_domains(["mnist", "clinic=scans/clinic b"])
        {'mnist': 'mnist', 'clinic': 'scans/clinic b'}
    """
    named: dict[str, str] = {}
    for text in texts:
        before, equals, after = text.partition("=")
        name, domain = (before, after) if equals and "/" not in before else (domain_name(text), text)
        if not name or not domain:
            raise InputError(f"{text!r}: a domain or name=domain is needed")
        if name in named:
            raise InputError(f"two domains are called {name!r}; write name=domain")
        named[name] = domain
    return named or None
