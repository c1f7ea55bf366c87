"""What a budget means: network, images, steps and seeds of every table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from modelfence.errors import InputError, nearest

Overrides = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        train_images: Images of a domain to learn from.
        validation_images: Images of a domain to choose an epoch of the source model by.
        test_images: Test images of a domain at most; None takes all.
        epochs: Of the source model; None takes 6 for VGG with BatchNorm and ResNet, and 12 for others.
        learning_rate: Of its training; None takes the usual one.
    """

    train_images: int = 5000
    validation_images: int = 1000
    test_images: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Budget:
    """What one cell may cost.

    Attributes:
        name: Its name.
        scale: Images and epochs.
        sizes: Height and width of images in pixels, by family of domains.
        networks: Network by family of domains.
        seeds: How many seeds, by setting; "ownership" is one.
        references: Unmarked models that an ownership claim is tested against.
        overrides: Configuration values that differ from a method's recipe, by method; "*" is for all.
        backbones: Networks of the table of backbones.
    """

    name: str
    scale: Scale
    sizes: Mapping[str, int]
    networks: Mapping[str, str]
    seeds: Mapping[str, int]
    references: int
    backbones: tuple[str, ...]
    overrides: Overrides = field(default_factory=lambda: MappingProxyType({}))

    def overrides_of(self, method: str) -> dict[str, Any]:
        """Return the configuration values that this budget sets for a method, such as "SFMap"."""
        return {**self.overrides.get("*", {}), **self.overrides.get(method, {})}


_PAPER = {"digits": "vgg11", "objects": "vgg13", "pacs": "vgg13", "visda": "vgg19"}
_POOL = {"generated": 128, "translated": 128, "restyled": 128, "generator_steps": 6, "synthesis_batch": 32}
_SHORT = {"steps": 624, "evaluate_every": 156}  # four passes over 5,000 images; published are thirty

BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "smoke": Budget(
            name="smoke",
            scale=Scale(train_images=1000, validation_images=100, test_images=200, epochs=8, learning_rate=2e-3),
            sizes=dict.fromkeys(_PAPER, 32),
            networks=dict.fromkeys(_PAPER, "small_vgg_bn"),
            seeds={"sa": 1, "sf": 1, "df": 1, "ownership": 1},
            references=1,
            backbones=("small_vgg_bn", "resnet18"),
            overrides={
                "*": {"steps": 60, "evaluate_every": 60, "precision": "fp32", "held_out": 0.0},
                "SAMap": {"learning_rate": 3e-4},
                "NTL": {"learning_rate": 1e-3},
                "CUTI": {"learning_rate": 1e-3},
                "SFMap": {**_POOL, "learning_rate": 3e-4},
                "DFMap": {**_POOL, "drawings": 128, "neighbours": 2048, "outside": 0.5, "learning_rate": 3e-4},
            },
        ),
        "cpu": Budget(
            name="cpu",
            scale=Scale(test_images=2000),
            sizes=dict.fromkeys(_PAPER, 32),
            networks=_PAPER,
            seeds={"sa": 3, "sf": 1, "df": 1, "ownership": 1},
            references=1,
            backbones=("vgg11", "vgg13", "vgg19", "resnet18", "resnet34", "swin_t"),
            overrides={"*": {"evaluate_every": 100}, "NTL": _SHORT, "CUTI": _SHORT},
        ),
        "full": Budget(
            name="full",
            scale=Scale(),
            sizes={"digits": 32, "objects": 64, "pacs": 64, "visda": 112},
            networks=_PAPER,
            seeds={"sa": 5, "sf": 5, "df": 5, "ownership": 5},
            references=3,
            backbones=(
                "vgg11",
                "vgg13",
                "vgg19",
                "resnet18",
                "resnet34",
                "resnet50",
                "resnet101",
                "swin_t",
                "xception",
            ),
            overrides={"*": {"evaluate_every": 100}},
        ),
    }
)


def budget(name: str) -> Budget:
    """Return a budget by name.

    Args:
        name: "smoke", "cpu" or "full".

    Raises:
        InputError: There is no such budget.

    Example:
        >>> budget("cpu").networks["digits"]
        'vgg11'
    """
    if name not in BUDGETS:
        raise InputError(f"budget: unknown {name!r}.{nearest(name, BUDGETS)} Known: {', '.join(BUDGETS)}")
    return BUDGETS[name]
