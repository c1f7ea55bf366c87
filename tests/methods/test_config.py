"""The configuration of a method: recipes fill what isn't given; what is wrong is named."""

import dataclasses

import pytest
from pydantic import TypeAdapter

from modelfence import DFMap, SAMap
from modelfence.errors import InputError
from modelfence.methods.registry import METHODS, method_for

FIELDS = {field.name for field in dataclasses.fields(SAMap)}


def test_the_paper_recipe_is_the_papers():
    paper = SAMap(recipe="paper")
    expected = {
        "ascent": 0.1,
        "limit": 1.0,
        "scale": "mean",
        "clamp": "sample",  # decision 16: the paper prints the bound on the mean
        "source_loss": "cross_entropy",
        "batch_statistics": False,
        "batch_size": 32,
        "learning_rate": 1e-4,
        "score_init": 1e-2,
        "threshold": 5e-3,
        "decay": 0.5,  # decision 12: the paper has no schedule
        "masks": "joint",
    }
    assert {name: getattr(paper, name) for name in expected} == expected


@pytest.mark.parametrize("recipe", SAMap.RECIPES)
def test_a_recipe_fills_what_is_not_given_and_nothing_else(recipe):
    values = SAMap.RECIPES[recipe]
    assert values.keys() <= FIELDS - {"recipe"}
    config = SAMap(recipe=recipe)
    assert config.recipe == recipe
    for name, value in values.items():
        assert getattr(config, name) == value
    plain = {field.name: field.default for field in dataclasses.fields(SAMap)}
    for name in FIELDS - values.keys() - {"recipe"}:
        assert getattr(config, name) == plain[name]


def test_what_is_given_wins_over_the_recipe():
    paper = SAMap(recipe="paper", batch_size=8, clamp="batch", ascent=0.5)
    assert (paper.batch_size, paper.clamp, paper.ascent) == (8, "batch", 0.5)
    assert paper.source_loss == SAMap(recipe="paper").source_loss
    default = SAMap(steps=7, clamp="batch")
    assert (default.steps, default.clamp, default.recipe) == (7, "batch", "default")


def test_a_run_file_gives_the_same_as_the_constructor():
    for table in ({}, {"recipe": "paper"}, {"recipe": "paper", "batch_size": 6}, {"steps": 3, "masks": "one_each"}):
        assert TypeAdapter(SAMap).validate_python(table) == SAMap(**table)


def test_it_is_frozen_and_copies_keep_the_values():
    config = SAMap(recipe="paper", steps=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 6
    assert dataclasses.replace(config, steps=6) == SAMap(recipe="paper", steps=6)
    assert SAMap(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"step": 3}, "step"),
        ({"batch_size": 1}, "batch_size"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"decay": 1.1}, "decay"),
        ({"held_out": 1.0}, "held_out"),
        ({"held_out": -0.1}, "held_out"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"patience": 0}, "patience"),
        ({"patience": 2, "held_out": 0}, "patience needs held_out"),
        ({"masks": "both"}, "masks.*'joint' or 'one_each'"),
        ({"precision": "fp64"}, "precision.*'auto', 'bf16' or 'fp32'"),
        ({"recipe": "papers"}, "recipe.*'default', 'paper' or 'ownership'"),
        ({"clamp": "element"}, "clamp.*'batch' or 'sample'"),
        ({"source_loss": "kl"}, "source_loss"),
        ({"ascent": -1}, "ascent"),
        ({"limit": 0}, "limit"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**53 + 1}, "seed.*less than or equal to"),
        ({"score_init": 1e-3}, "score_init .0.001. must be above threshold .0.005."),
        ({"threshold": 0.5}, "must be above threshold"),
        ({"score_init": 1e300}, "score_init.*less than or equal to 100"),
        ({"threshold": -1e300}, "threshold.*greater than or equal to -100"),
        ({"score_init": 0.005 + 1e-12}, "must be above threshold"),  # the same in float32
    ],
)
def test_a_wrong_key_or_value_is_named(values, named):
    with pytest.raises(ValueError, match=f"(?s){named}"):
        SAMap(**values)


def test_positional_values_are_refused():
    with pytest.raises(ValueError, match="positional"):
        SAMap("paper")


# Which method a configuration names, and what it needs


def given(**there: bool) -> dict[str, bool]:
    return {"authorized": False, "unauthorized": False} | there


def test_both_domains_mean_source_available():
    method, config = method_for(None, given(authorized=True, unauthorized=True))
    assert method is METHODS[SAMap]
    assert config == SAMap()
    asked = SAMap(steps=3)
    assert method_for(asked, given(authorized=True, unauthorized=True)) == (METHODS[SAMap], asked)


@pytest.mark.parametrize("missing", ["authorized", "unauthorized"])
def test_a_missing_domain_is_named(missing):
    there = given(**{name: name != missing for name in ("authorized", "unauthorized")})
    with pytest.raises(InputError, match=f"SAMap needs {missing}=: pass the {missing} domain") as caught:
        method_for(SAMap(), there)
    assert "\n" not in str(caught.value)


def test_one_mask_each_of_no_domain_is_refused():
    for there in ({}, {"authorized": True}):
        with pytest.raises(InputError, match='masks="one_each" .* unauthorized='):
            method_for(DFMap(masks="one_each"), given(**there))


@pytest.mark.parametrize(
    ("there", "name"),
    [
        ({"authorized": True, "unauthorized": True}, "SAMap"),
        ({"unauthorized": True}, "SFMap"),
        ({"authorized": True}, "DFMap"),
        ({}, "DFMap"),
    ],
)
def test_the_data_given_chooses_the_method(there, name):
    found, config = method_for(None, given(**there))
    assert type(config).__name__ == found.config.__name__ == name


@pytest.mark.parametrize("wrong", [SAMap, "SAMap", {"steps": 3}, 3])
def test_what_is_no_configuration_is_refused(wrong):
    with pytest.raises(InputError, match="isn't a method configuration; known: .*SAMap"):
        method_for(wrong, given(authorized=True, unauthorized=True))
