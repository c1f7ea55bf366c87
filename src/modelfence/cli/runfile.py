"""The run file: one TOML file that holds every setting of a run, and the checks that name a wrong key."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

import modelfence.methods  # noqa: F401 (registers the methods)
from modelfence.cli.tables import DataTable, EvaluateTable, ModelTable, OutputTable
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError, nearest
from modelfence.files import usable_path
from modelfence.methods.config import LearnConfig, MaskConfig
from modelfence.methods.registry import METHODS, method_for, settings_of
from modelfence.models.training import TrainConfig
from modelfence.ownership.watermark import Watermark

Tables = dict[str, Any]

SECTIONS: Mapping[str, type] = {
    "model": ModelTable,
    "image": ImageSpec,
    "data": DataTable,
    "train": TrainConfig,
    "method": LearnConfig,
    "watermark": Watermark,
    "key": Watermark,
    "evaluate": EvaluateTable,
    "output": OutputTable,
}


@dataclass(frozen=True)
class Run:
    """The checked settings of a run. A table that wasn't given has its defaults, or None where it has none.

    Attributes:
        model: Where the model comes from.
        image: What it eats.
        data: The domains and how many images of each.
        train: How a source model is trained.
        method: How it is learned; the name chooses the class, or else the domains do.
        watermark: A mark that the model shall fail on.
        key: A mark that the model shall need.
        evaluate: How models are measured.
        output: Where results go.
    """

    model: ModelTable | None = None
    image: ImageSpec | None = None
    data: DataTable | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    method: LearnConfig | None = None
    watermark: Watermark | None = None
    key: Watermark | None = None
    evaluate: EvaluateTable = field(default_factory=EvaluateTable)
    output: OutputTable | None = None

    @property
    def marked(self) -> bool:
        """Whether the authorized images with a watermark, or without a key, are unauthorized."""
        return self.watermark is not None or self.key is not None

    def tables(self, *names: str) -> Tables:
        """Return tables of the run as TOML values, every default written out that has an effect.

        Args:
            names: The tables wanted, such as "model"; one that is None is left out.
        """
        found = {name: getattr(self, name) for name in names}
        tables = {name: _plain(_fields_of(value)) for name, value in found.items() if value is not None}
        if self.method is not None and "method" in tables:
            tables["method"] = {"name": type(self.method).__name__, **_plain(settings_of(self.method))}
        return tables


def read_run(
    path: str | Path | None, *, options: Mapping[str, tuple[str, Any]] | None = None, sets: Sequence[str] = ()
) -> Run:
    """Put together what a run file, options and ``--set`` say, and check it.

    Args:
        path: The run file, or None.
        options: Flag and value by dotted key, for the options of a verb; None as value is left out.
        sets: Texts ``table.key=value``, stronger than the rest; a value that isn't TOML is taken as text. Where
            they choose another recipe than the file's, the file's values that are those of its own recipe give
            way to those of the new one.

    Raises:
        InputError: The file can't be read, a key is unknown, or a value isn't allowed; the text names the file or
            flag, the key and what is allowed.
    """
    tables, origins = ({}, {}) if path is None else (parse_toml(Path(path)), {})
    filed = tables.get("method", {})
    filed = dict(filed) if isinstance(filed, dict) else {}
    old = _chosen(tables)["recipe"]
    for key, (flag, value) in (options or {}).items():
        if value is not None:
            _put(tables, key, value, flag)
            origins[key] = flag
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or "." not in key.strip():
            raise InputError(f"--set {text!r}: table.key=value is needed, such as method.steps=400")
        _put(tables, key.strip(), _toml_value(value.strip()), "--set")
        origins[key.strip()] = "--set"
    _leave_recipe(tables, filed, old, origins)
    return _Checker(str(path) if path is not None else "command line", origins).run(tables)


def write_toml(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML text.

    Example:
        >>> print(write_toml({"output": {"folder": "out"}}).strip())
        [output]
        folder = "out"
    """
    import tomli_w

    return tomli_w.dumps(tables)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Name the first key in which two runs differ, or return an empty text.

    Example:
        >>> difference({"method": {"steps": 3}}, {"method": {"steps": 4}})
        'method.steps (3, now 4)'
    """
    before, after = _flat(old), _flat(new)
    for key in [*before, *after]:
        if before.get(key) != after.get(key):
            shown = [value if (value := side.get(key)) is not None else "none" for side in (before, after)]
            return f"{key} ({shown[0]}, now {shown[1]})"
    return ""


def parse_toml(path: Path) -> Tables:
    """Read a TOML file.

    Raises:
        InputError: It can't be read or isn't TOML.
    """
    usable_path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: run file can't be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: isn't TOML: {error}") from error
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise InputError(f"{path}: can't be read as TOML ({error}); write plain tables and values") from error


def _toml_value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or too deep, or too many digits
        return text
    return found["value"] if found.keys() == {"value"} else text


def _put(tables: Tables, key: str, value: Any, flag: str) -> None:
    *parents, last = key.split(".")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise InputError(f"{flag}: {key}: {parent!r} is a value, not a table")
    table[last] = value


def _chosen(tables: Tables) -> Tables:
    """Return name and recipe of the method: what its table says, or else those of the setting that the domains make."""
    method, data = (table if isinstance(table := tables.get(name), dict) else {} for name in ("method", "data"))
    given = {name: name in data for name in ("authorized", "unauthorized")}
    config = method_for(None, given, marked="watermark" in tables or "key" in tables)[1]
    usual = {"name": type(config).__name__, "recipe": "default" if "name" in method else config.recipe}
    return {key: method.get(key, value) for key, value in usual.items()}


def _leave_recipe(tables: Tables, filed: Tables, old: Any, origins: Mapping[str, str]) -> None:
    """Drop what a run file took from its own recipe where another recipe was chosen over it.

    Args:
        tables: What was put together so far; the table "method" is changed.
        filed: That table as the file has it.
        old: The file's recipe, said or not.
        origins: Flag by dotted key, of the keys that the file didn't have the last word on.
    """
    method = tables.get("method")
    if not isinstance(method, dict) or "method.recipe" not in origins:
        return
    kind = next((kind for kind in METHODS if kind.__name__ == _chosen({**tables, "method": filed})["name"]), None)
    if old == method["recipe"] or kind is None or not issubclass(kind, MaskConfig) or old not in list(kind.RECIPES):
        return
    own = _plain(dataclasses.asdict(kind(recipe=old)))
    for key, value in filed.items():
        if key != "recipe" and key in own and value == own[key] and f"method.{key}" not in origins:
            del method[key]


class _Checker:
    """Turns tables into checked sections; errors say where the wrong value came from."""

    def __init__(self, source: str, origins: Mapping[str, str]) -> None:
        self.source, self.origins = source, origins

    def run(self, tables: Tables) -> Run:
        found: dict[str, Any] = {}
        for name, content in tables.items():
            if name not in SECTIONS:
                flag = next((flag for key, flag in self.origins.items() if key.startswith(f"{name}.")), self.source)
                raise InputError(f"{flag}: {name}: unknown table.{nearest(name, SECTIONS)} {_known(SECTIONS)}")
            if not isinstance(content, dict):
                raise InputError(f"{self._where(name)}: is {content!r:.40}; a table [{name}] is needed")
            kind, values = SECTIONS[name], content
            if name == "method":
                kind, values = self._method(tables)
            found[name] = self._section(name, kind, values)
        return Run(**found)

    def _method(self, tables: Tables) -> tuple[type, Tables]:
        """Return the configuration class that the table's name chooses, and the rest of the table."""
        known = {kind.__name__: kind for kind in METHODS}
        chosen, content = _chosen(tables), tables["method"]
        name = chosen["name"]
        if not isinstance(name, str) or name not in known:
            close = nearest(str(name), known)
            raise InputError(f"{self._where('method.name')}: unknown method {name!r:.40}.{close} {_known(known)}")
        if issubclass(known[name], MaskConfig):
            content = {**content, "recipe": chosen["recipe"]}
        return known[name], {key: value for key, value in content.items() if key != "name"}

    def _section(self, name: str, kind: type, content: Tables) -> Any:
        keys = _keys(kind)
        for key in content:
            if key not in keys:
                where = self._where(f"{name}.{key}")
                raise InputError(f"{where}: unknown key.{nearest(key, keys)} {_known(keys)}")
            self._require_sizes(f"{name}.{key}", content[key])
        try:
            return TypeAdapter(kind).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([name, *(str(part) for part in first["loc"][:1])])
            raise InputError(f"{self._where(key)}: {_reason(first)}") from error

    def _require_sizes(self, key: str, value: Any) -> None:
        """Refuse numbers that neither the tensors nor the random generators of torch can hold."""
        for where, found in _flat(value, key).items():
            for number in found if isinstance(found, list) else [found]:
                if isinstance(number, int) and abs(number) >= 2**63:
                    raise InputError(f"{self._where(where)}: is too large; a whole number below 2**63 is needed")
                if isinstance(number, float) and _LARGEST < abs(number) < float("inf"):
                    raise InputError(f"{self._where(where)}: is too large; at most {_LARGEST:.2g} (got {number:g})")

    def _where(self, key: str) -> str:
        nearest_first = sorted(self.origins, key=len, reverse=True)
        given = next((given for given in nearest_first if f"{key}.".startswith(f"{given}.")), None)
        return f"{self.source if given is None else self.origins[given]}: {key}"


def _keys(kind: type) -> list[str]:
    return [one.name for one in dataclasses.fields(kind) if one.init]


def _fields_of(value: Any) -> Tables:
    """Return the settings of a table; a path as text."""
    found = {key: getattr(value, key) for key in _keys(type(value))}
    return {key: str(one) if isinstance(one, Path) else one for key, one in found.items()}


_LARGEST = 3.4e38  # of a float32
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "text in quotes",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
}


def _reason(error: Any) -> str:
    """Say in plain words what pydantic found."""
    kind, context, given = error["type"], error.get("ctx", {}), f"(got {error['input']!r:.60})"
    if kind == "missing":
        return "is missing"
    if kind == "literal_error":
        return f"must be {context['expected']} {given}"
    bound = next(((sign, context[key]) for key, sign in _BOUNDS.items() if key in context), None)
    if bound is not None:
        return f"must be {bound[0]} {bound[1] if isinstance(bound[1], int) else f'{bound[1]:g}'} {given}"
    if kind in ("value_error", "assertion_error"):
        return str(error["msg"]).partition(", ")[2].removeprefix("image spec: ").removeprefix("watermark: ")
    wanted = next((text for start, text in _KINDS.items() if kind.startswith(start)), None)
    return f"must be {wanted} {given}" if wanted else f"{error['msg'][:1].lower()}{error['msg'][1:]} {given}"


def _known(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f"Known: {', '.join(names)}"


def _plain(value: Any) -> Any:
    """Return TOML values: tuples as lists; what is None or an empty table is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if one is not None and one != {}}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _flat(value: Any, prefix: str = "") -> Tables:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        key: one for name, inner in value.items() for key, one in _flat(inner, f"{prefix}.{name}".lstrip(".")).items()
    }
