"""What the learning loop learns: the scores of a mask, or whatever else has parameters and a result."""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence.errors import InputError
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.config import MaskConfig


class Subject(ABC):
    """What a run learns, as the loop sees it.

    Attributes:
        kind: What saved states call its parameters.
        module: What is called with images (N, C, H, W) and returns logits (N, K); its parameters are learned.
    """

    kind: str
    module: nn.Module

    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what the optimizer changes, by the name saved states have for it."""

    @abstractmethod
    def result(self) -> dict[str, Tensor]:
        """Return what was learned so far, as copies on the CPU."""

    @abstractmethod
    def not_finite(self) -> str | None:
        """Say what became NaN or infinite, if anything did."""

    def buffers(self) -> Mapping[str, Tensor]:
        """Return what else changes from step to step, by name."""
        return {}

    def measured(self) -> dict[str, float]:
        """Return numbers about itself for a row of the history."""
        return {}

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the loss of a step, counted from 0, is computed."""
        del number
        return contextlib.nullcontext()

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which it is measured."""
        return contextlib.nullcontext()


class MaskScores(Subject):
    """The scores of a mask over a frozen network.

    Args:
        model: The trained network; it is copied and never changed.
        config: Its ``score_init`` and ``threshold``.
        fabric: Precision and processes.

    Attributes:
        module: The masked model.

    Raises:
        InputError: The fabric has a precision that masks aren't learned in.
    """

    kind = "score"

    def __init__(self, model: nn.Module, config: MaskConfig, fabric: Fabric) -> None:
        reduced = computes_in_bfloat16(fabric)
        self.module: MaskedModel = MaskedModel(
            _in_float32(model),
            score_init=config.score_init,
            threshold=config.threshold,
            dtype=torch.bfloat16 if reduced else None,
            channels_last=True,
        )
        self.module.world = fabric.world_size

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the scores by number."""
        return {str(index): score for index, score in enumerate(self.module.scores)}

    def result(self) -> dict[str, Tensor]:
        """Return True where a weight is kept, by parameter name."""
        return self.module.kept()

    def measured(self) -> dict[str, float]:
        """Return the share of weights kept."""
        return {"kept": self.module.kept_share()}

    def not_finite(self) -> str | None:
        """Name the weight whose score broke."""
        for name, score in zip(self.module.names, self.module.scores, strict=True):
            if not bool(score.isfinite().all()):
                return f"the gradient of {name!r}"
        return None


def computes_in_bfloat16(fabric: Fabric) -> bool:
    """Say whether a fabric's forward passes run in bfloat16; what is learned stays in float32.

    Raises:
        InputError: It has a precision that nothing is learned in here.
    """
    precision = str(fabric._precision.precision)
    if precision not in ("32-true", "bf16-mixed"):
        raise InputError(f"fabric has precision {precision!r}; learning takes '32-true' or 'bf16-mixed'")
    return precision == "bf16-mixed"


def _in_float32(model: nn.Module) -> nn.Module:
    """A network kept in half precision is learned on in float32, where small gradients don't vanish."""
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in model.parameters()):
        return copy.deepcopy(model).float()
    return model
