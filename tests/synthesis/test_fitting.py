"""The loop that fits generators."""

import pytest
import torch
from torch import Tensor, nn

from modelfence.errors import NonFiniteError
from modelfence.synthesis.fitting import fit


def weight(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(value)
    return module


def test_the_sum_of_the_terms_is_minimized() -> None:
    module = weight(4.0)

    def terms(step: int) -> dict[str, Tensor]:
        del step
        return {"a": module.weight.square().sum(), "b": (module.weight - 2).square().sum()}

    fit(module, terms, steps=200, learning_rate=0.1, title="it")
    assert module.weight.item() == pytest.approx(1.0, abs=0.02)
    assert not module.training


def test_a_loss_that_is_not_finite_is_named() -> None:
    module, said = weight(1.0), []

    def terms(step: int) -> dict[str, Tensor]:
        return {"only": module.weight.sum() * (torch.nan if step > 5 else 1)}

    with pytest.raises(NonFiniteError, match="memory: the loss became NaN or infinite by step 8; use precision fp32"):
        fit(module, terms, steps=16, learning_rate=0.1, title="memory", announce=said.append)
    assert [text.split(" (")[0] for text in said] == ["memory: step 4 of 16"]
