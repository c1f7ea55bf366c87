"""Learning of a whole network in the common loop: rate, modes, random numbers, resuming, fresh starts, files."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from pydantic import TypeAdapter
from safetensors.torch import load_file
from tests.methods import toy
from torch import Tensor, nn
from torch.nn.utils import prune

import modelfence as mf
from modelfence import CUTI, NTL, SAMap, protect
from modelfence.artifact import Artifact, read_history, read_report, write_artifact
from modelfence.data.sources import as_domain
from modelfence.errors import InputError, Interrupted, NonFiniteError
from modelfence.masking.digest import digest_of
from modelfence.methods.config import RetrainConfig
from modelfence.methods.loop import Session, learn
from modelfence.methods.retraining import NetworkWeights, Retrained, retrain, start_fresh, with_weights
from modelfence.models.load import LoadedModel, load_model

SOURCE, TARGET = toy.blobs(80, seed=1), toy.blobs(80, seed=2, inverted=True)
FAST: dict[str, Any] = {"steps": 9, "batch_size": 16, "learning_rate": 1e-3, "evaluate_every": 4, "precision": "fp32"}


def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def confine(method: RetrainConfig, model: nn.Module | None = None, **parts: Any) -> mf.Protection:
    parts = {"authorized": SOURCE, "unauthorized": {"far": TARGET}, **parts}
    return protect(model or toy.trained("cnn"), method=method, **parts)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return digest_of(one) == digest_of(other)


def rows(result: mf.Protection) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result.history]


# The rate


@pytest.mark.parametrize("decay", [0.999, 0.5, 1.0])
def test_the_rate_falls_by_a_factor_every_step(decay):
    """Adam moves by exactly its rate where the gradient never changes."""
    config = RetrainConfig(steps=6, learning_rate=1e-2, decay_per_step=decay, precision="fp32")
    subject = NetworkWeights(nn.Linear(3, 2, bias=False), config, fabric())
    seen: list[Tensor] = []

    def pull(_: nn.Module, trained: Retrained, __: int) -> dict[str, Tensor]:
        seen.append(trained.network.weight.detach().clone())
        return {"pull": trained.network.weight.sum()}

    learn(subject, nn.Linear(3, 2, bias=False), config, Session(fabric()), batches=itertools.count, loss=pull)
    seen.append(subject.module.network.weight.detach())
    for step, (old, new) in enumerate(itertools.pairwise(seen)):
        torch.testing.assert_close(old - new, torch.full((2, 3), 1e-2 * decay**step), rtol=1e-3, atol=1e-7)


# Ordinary training


def test_it_is_trained_in_train_mode_and_measured_in_eval_mode():
    modes: dict[str, list[bool]] = {"loss": [], "measure": []}

    def loss(student: nn.Module, trained: Retrained, step: Any) -> dict[str, Tensor]:
        modes["loss"] += [module.training for module in trained.network.modules()]
        return {"all": student(torch.cat(step.groups)).square().mean()}

    def monitor(student: nn.Module) -> dict[str, float]:
        modes["measure"] += [module.training for module in student.modules() if not list(module.children())]
        return {}

    session = Session(fabric(), as_domain(SOURCE, name="a"), {"b": as_domain(TARGET, name="b")}, monitor=monitor)
    learned = retrain(toy.trained("cnn"), RetrainConfig(**FAST), session, loss)
    assert all(modes["loss"])
    assert not any(modes["measure"])
    before = toy.trained("cnn").state_dict()
    changed = [name for name, value in learned.weights.items() if not torch.equal(value, before[name])]
    assert changed == list(before)  # running statistics too
    assert learned.weights["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 9


def test_the_model_given_and_the_users_random_numbers_are_left_alone():
    model = toy.trained("cnn")
    model[0].weight.requires_grad_(False)
    model.train()[3].eval()
    before = digest_of(model)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    result = confine(CUTI(**FAST, isolation="code"), model)
    assert torch.equal(torch.rand(3), expected)
    assert digest_of(model) == before
    changed = [not torch.equal(*pair) for pair in zip(result.model.parameters(), model.parameters(), strict=True)]
    assert changed == [True] * 6  # the frozen weight too
    for ours, theirs in zip(result.model.modules(), model.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.training == theirs.training
    assert [value.requires_grad for value in result.model.parameters()] == [False, True, True, True, True, True]


def test_the_seed_decides_and_a_run_can_be_repeated():
    one, again, other = (confine(CUTI(**FAST, seed=seed)) for seed in (0, 0, 1))
    assert same_weights(one.model, again.model)
    assert not same_weights(one.model, other.model)


def test_a_pruned_network_that_can_be_copied_is_retrained_and_stays_pruned():
    model = toy.trained("mlp").requires_grad_(False)
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    prune.l1_unstructured(layer, "weight", 0.3)
    with torch.no_grad():
        model(toy.blobs(2).tensors[0])
    data = {"authorized": toy.blobs(80), "unauthorized": toy.blobs(80, inverted=True)}
    found = protect(model, **data, method=NTL(steps=2, batch_size=8)).model
    changed = next(module for module in found.modules() if isinstance(module, nn.Linear))
    assert torch.equal(changed.weight_mask, layer.weight_mask)
    assert not torch.equal(changed.weight_orig, layer.weight_orig)
    with pytest.raises(InputError, match="is pruned and would not be masked"):
        protect(model, **data, method=SAMap(steps=2, batch_size=8))


def test_half_precision_is_trained_in_float32_and_comes_back_as_it_was():
    model = toy.trained("mlp").bfloat16()
    learned = with_weights(model, {name: value.float() + 1 for name, value in model.state_dict().items()})
    assert {value.dtype for value in learned.parameters()} == {torch.bfloat16}
    assert NetworkWeights(model, RetrainConfig(), fabric()).module.network[1].weight.dtype == torch.float32


def test_activation_checkpointing_is_off_in_the_copy_where_hooks_would_run_twice():
    model = toy.mlp()
    model.grad_checkpointing = True
    assert not NetworkWeights(model, RetrainConfig(), fabric()).module.network.grad_checkpointing
    assert model.grad_checkpointing


def test_bfloat16_learns_too():
    result = confine(NTL(**{**FAST, "precision": "bf16", "steps": 60, "learning_rate": 3e-3, "batch_size": 32}))
    assert {value.dtype for value in result.model.parameters()} == {torch.float32}
    assert toy.accuracy(result.model, toy.blobs(seed=3)) > 0.9
    assert toy.accuracy(result.model, TARGET) < 0.7


# Going on


def stopping(at: int, monkeypatch: pytest.MonkeyPatch, module: str, terms: str) -> None:
    """Send Ctrl-C when the loss of a step is computed."""
    import importlib

    target = importlib.import_module(module)
    original: Callable[..., Any] = getattr(target, terms)
    calls = itertools.count()

    def loss(*args: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(target, terms, loss)


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize(
    "method",
    [NTL(**FAST), NTL(**FAST, start="fresh"), CUTI(**FAST), CUTI(**FAST, isolation="paper"), CUTI(**FAST, patience=1)],
    ids=["NTL", "NTL fresh", "CUTI code", "CUTI paper", "CUTI with patience"],
)
def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch, method, at):
    """With dropout, running statistics, matrices that are drawn and matrices that are learned."""
    whole = confine(method)
    name = type(method).__name__.lower()
    with monkeypatch.context() as patch:
        stopping(at, patch, f"modelfence.methods.{name}", f"{name}_terms")
        with pytest.raises(Interrupted, match=rf"stopped at step {at + 1}; the state is saved in"):
            confine(method, output=tmp_path)
    resumed = confine(method, output=tmp_path, resume=True)
    assert same_weights(resumed.model, whole.model)
    assert rows(resumed) == rows(whole)


def test_patience_keeps_the_weights_that_measured_best():
    seen: list[dict[str, Tensor]] = []
    gaps = iter([0.5, 0.4, 0.3])

    def monitor(student: nn.Module) -> dict[str, float]:
        network = student.get_submodule("network") if hasattr(student, "network") else student
        seen.append({name.split("network.")[-1]: value.clone() for name, value in network.state_dict().items()})
        return {"gap": next(gaps)}

    session = Session(fabric(), as_domain(SOURCE, name="a"), {"b": as_domain(TARGET, name="b")}, monitor=monitor)
    config = RetrainConfig(**{**FAST, "patience": 2, "steps": 40})
    learned = retrain(
        toy.trained("cnn"), config, session, lambda student, _, step: {"all": student(step.groups[1]).square().mean()}
    )
    assert len(learned.history) == 3
    assert all(torch.equal(value, seen[0][name]) for name, value in learned.weights.items())
    assert not torch.equal(learned.weights["0.weight"], seen[2]["0.weight"])


# Fresh starts


def test_a_fresh_start_depends_on_the_seed_alone():
    def started(kind: str, seed: int) -> nn.Module:
        network = toy.trained(kind)
        start_fresh(network, seed)
        return network

    assert same_weights(started("cnn", 1), started("cnn", 1))
    assert not same_weights(started("cnn", 1), started("cnn", 2))
    network = started("cnn", 1)
    assert network[1].running_var.tolist() == [1.0] * 12
    assert network[0].weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.2)
    one, other = (confine(NTL(**FAST, start="fresh"), toy.mlp_from(seed)) for seed in (1, 2))
    assert same_weights(one.model, other.model)
    assert not same_weights(one.model, confine(NTL(**FAST), toy.mlp_from(1)).model)


def test_a_layer_that_cannot_be_drawn_anew_is_named():
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(3, 2)

    with pytest.raises(InputError, match="start='fresh': 'token' belongs to a layer that has no reset_parameters"):
        start_fresh(Token(), 0)


# What is refused


def test_a_batch_too_small_for_its_domains_is_refused():
    several = {str(number): TARGET for number in range(3)}
    with pytest.raises(InputError, match=r"batch_size 8 leaves 1 .* raise batch_size, or leave domains out$"):
        confine(NTL(**{**FAST, "batch_size": 8}), unauthorized=several)


@pytest.mark.parametrize("kind", [NTL, CUTI])
def test_one_mask_each_makes_no_sense_without_masks(kind):
    with pytest.raises(ValueError, match="masks"):
        kind(masks="one_each")


def test_a_run_file_gives_the_same_as_the_constructor():
    assert TypeAdapter(NTL).validate_python({"layer": "features.9", "scale": "mean"}) == NTL(
        layer="features.9", scale="mean"
    )
    assert TypeAdapter(CUTI).validate_python({"layers": ["a", "b"]}) == CUTI(layers=("a", "b"))


@pytest.mark.parametrize(
    "values",
    [
        {"decay_per_step": 0.0},
        {"decay_per_step": 1.5},
        {"batch_size": 3},
        {"start": "imagenet"},
        {"patience": 1, "held_out": 0},
    ],
)
def test_a_wrong_value_is_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        RetrainConfig(**values)


def test_several_processes_are_refused():
    class Two:
        world_size, device, _precision = 2, torch.device("cpu"), fabric()._precision

    with pytest.raises(InputError, match="NTL learns in one process, the fabric has 2"):
        NetworkWeights(toy.mlp(), NTL(), Two())  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_named():
    def loss(student: nn.Module, _: Retrained, step: Any) -> dict[str, Tensor]:
        return {"target": student(step.groups[1]).mean() * (float("nan") if step.number == 2 else 1)}

    session = Session(fabric(), as_domain(SOURCE, name="a"), {"b": as_domain(TARGET, name="b")})
    with pytest.raises(NonFiniteError, match="step 3: loss term 'target' became NaN or infinite"):
        retrain(toy.trained("mlp"), RetrainConfig(**FAST), session, loss)


def test_a_weight_that_is_not_finite_is_named():
    def loss(student: nn.Module, _: Retrained, step: Any) -> dict[str, Tensor]:
        return {"root": (student(step.groups[1]).sum() * 0).sqrt()}  # slope at 0 is infinite

    session = Session(fabric(), as_domain(SOURCE, name="a"), {"b": as_domain(TARGET, name="b")})
    with pytest.raises(NonFiniteError, match=r"step 1: '1.weight' became NaN or infinite; lower"):
        retrain(toy.trained("mlp"), RetrainConfig(**{**FAST, "evaluate_every": 1}), session, loss)


# Files


def test_the_output_folder_has_no_mask_and_the_card_speaks_of_none(tmp_path):
    domains = {"far": TARGET, "own": SOURCE}
    masked = confine(SAMap(steps=2, batch_size=16))
    masked.save(tmp_path)
    assert (tmp_path / "mask/mask.json").exists()
    result = confine(NTL(**FAST))
    result.save(tmp_path, evaluation=mf.evaluate(result.model, domains, before=toy.trained("cnn"), authorized="own"))
    assert not (tmp_path / "mask").exists()
    card = (tmp_path / "README.md").read_text()
    assert "all its weights were retrained" in card
    assert "Retraining is no lock" in card
    assert "mask" not in card
    report = read_report(tmp_path)
    assert report["method"] == "NTL"
    assert "mask" not in json.loads((tmp_path / "report.json").read_text())
    assert [row["step"] for row in read_history(tmp_path)] == [4, 8, 9]
    assert "kept" not in read_history(tmp_path)[0]
    loaded = toy.cnn()
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same_weights(loaded, result.model)


def test_with_its_origin_the_model_is_loaded_by_its_folder(tmp_path):
    result = confine(CUTI(**FAST))
    spec = mf.ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
    origin = LoadedModel(toy.trained("cnn"), spec, toy.CLASSES, "tests.methods.toy:cnn", {})
    write_artifact(tmp_path, Artifact(model=result.model, mask=None, config=result.config, origin=origin))
    loaded = load_model(origin.reference, weights=str(tmp_path), classes=toy.CLASSES, image=spec)
    assert same_weights(loaded.model, result.model)


def test_an_ownership_mark_is_unlearned_as_any_domain():
    pixels = ((toy.blobs(80, seed=1).tensors[0] + 1) * 80).clamp(0, 255).to(torch.uint8)
    data = torch.utils.data.TensorDataset(pixels, SOURCE.tensors[1])
    spec = mf.ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
    result = protect(
        toy.trained("cnn"), authorized=data, image=spec, method=NTL(**FAST), ownership=mf.Watermark("digits")
    )
    assert "target_accuracy:watermark" in result.history[-1]
