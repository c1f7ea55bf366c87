"""The tables of a run file that aren't the configuration of something else."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from modelfence.methods.config import STRICT
from modelfence.models.autocast import Resolved


def domain_name(text: str) -> str:
    """Return a short name for a domain given as text: the text itself, or the last part of a path.

    Example:
        >>> domain_name("mnist"), domain_name("scans/ward 7/"), domain_name("hub:owner/name")
        ('mnist', 'ward 7', 'hub:owner/name')
    """
    if text.startswith("hub:"):
        return text
    last = PurePath(text)
    return (last.stem if last.suffix in (".parquet", ".tar") else last.name) or text


def _named(value: Any) -> dict[str, str]:
    """Accept a text, a list of texts, or a table of texts by name."""
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed):
        named = {domain_name(one): one for one in listed}
        if len(named) < len(listed):
            raise ValueError("two domains have the same name; write a table name = path")
        return named
    if isinstance(value, Mapping) and value and all(isinstance(one, str) for one in value.values()):
        return dict(value)
    raise ValueError(f"must be a domain, a list of domains, or a table name = domain (got {value!r:.60})")


def _one_named(value: Any) -> dict[str, str]:
    named = _named(value)
    if len(named) > 1:
        raise ValueError(f"must be one domain (got {', '.join(named)})")
    return named


def _size(value: Any) -> Any:
    if value == "whole" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f'must be a whole number >= 1, or "whole" (got {value!r:.60})')


def refuse_both_roles(authorized: Mapping[str, str] | None, unauthorized: Mapping[str, str] | None) -> None:
    """Refuse a domain, or a name, that is both authorized and unauthorized.

    Raises:
        ValueError: There is one; the text names it.
    """
    for name, text in (authorized or {}).items():
        for other, same in (unauthorized or {}).items():
            if name == other or text == same:
                raise ValueError(f"{other!r} can't be authorized and unauthorized; give different domains")


Domains = Annotated[dict[str, str], BeforeValidator(_named)]
OneDomain = Annotated[dict[str, str], BeforeValidator(_one_named)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelTable:
    """Where a model comes from: exactly one of ``path``, ``name`` and ``factory``.

    Attributes:
        path: A folder written by ``modelfence train`` or ``modelfence protect``.
        name: A network of the zoo or of timm.
        factory: ``package.module:function`` that returns the network.
        weights: A .safetensors, .pt or .pth file, or a saved folder, for the latter two.
        args: Arguments of the network's constructor or of the factory.
        classes: Number of classes; a saved folder knows it.
    """

    path: str | None = None
    name: str | None = None
    factory: str | None = None
    weights: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    classes: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "name", "factory") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of path, name and factory (got {' and '.join(given) or 'none'})")
        if self.factory is not None and ":" not in self.factory:
            raise ValueError(f"factory must be package.module:function (got {self.factory!r})")
        if self.path is not None and self.weights is not None:
            raise ValueError("path is a folder with its own weights; leave weights out")
        return self

    @property
    def reference(self) -> str:
        """What :func:`modelfence.models.load.load_model` is given."""
        return self.path or self.name or self.factory or ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataTable:
    """The domains of a run. Each is a catalog name, a path or ``hub:owner/name``.

    Attributes:
        authorized: The authorized domain; as a table, name = domain.
        unauthorized: The unauthorized ones. Where there is no authorized domain their labels aren't looked at.
        watch: Labelled domains that are measured, during learning and afterwards, and never learned from.
        train_size: Images of each domain to learn on, at most; "whole" takes all but those for validation.
        validation_size: Images of each domain to choose an epoch by, at most a sixth of the domain.
        seed: Of the choice of images.
    """

    authorized: OneDomain | None = None
    unauthorized: Domains | None = None
    watch: Domains | None = None
    train_size: Annotated[int | Literal["whole"], BeforeValidator(_size)] = 5000
    validation_size: Annotated[int, Field(ge=1)] = 1000
    seed: Annotated[int, Field(ge=0)] = 2022

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        refuse_both_roles(self.authorized, self.unauthorized)
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluateTable:
    """How models are measured.

    Attributes:
        authorized: Labelled domains that count as authorized, beside those of ``[data]``; never learned from.
        unauthorized: Labelled domains that count as unauthorized, beside those of ``[data]``; never learned from.
        limit: Test images of each domain at most, spread evenly over it; None takes all.
        batch_size: Images per forward pass.
        refresh_images: Unlabelled images for the BatchNorm refresh.
        precision: "fp32" or "bf16".
    """

    authorized: Domains | None = None
    unauthorized: Domains | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 250
    refresh_images: Annotated[int, Field(ge=2)] = 500
    precision: Resolved = "fp32"

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        refuse_both_roles(self.authorized, self.unauthorized)
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OutputTable:
    """Where results go.

    Attributes:
        folder: The output folder.
        cache: Folder where synthetic images are kept for other runs with the same model; None keeps them beside the
            run's state, until it is finished.
    """

    folder: Annotated[str, Field(min_length=1)]
    cache: Annotated[str, Field(min_length=1)] | None = None
