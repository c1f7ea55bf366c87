"""A budget that costs next to nothing."""

from dataclasses import replace

import pytest

from modelfence.bench import budgets
from modelfence.bench.budgets import Scale
from modelfence.bench.domains import parts_of


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the smoke budget one of 16 pixels and two steps."""
    quick = {"steps": 2, "evaluate_every": 1, "batch_size": 8, "precision": "fp32", "held_out": 0.0}
    pool = {"generated": 64, "translated": 64, "restyled": 64, "generator_steps": 1, "synthesis_batch": 16}
    smoke = replace(
        budgets.BUDGETS["smoke"],
        scale=Scale(train_images=64, validation_images=16, test_images=20, epochs=1),
        sizes=dict.fromkeys(budgets.BUDGETS["smoke"].sizes, 16),
        overrides={"*": quick, "SFMap": pool},
    )
    monkeypatch.setattr(budgets, "BUDGETS", {**budgets.BUDGETS, "smoke": smoke})
    parts_of.cache_clear()
