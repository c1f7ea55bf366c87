"""The learning loop by itself: Adam and its decay, rows, early stopping, what isn't finite, interruption."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence import SAMap
from modelfence.errors import Interrupted, NonFiniteError
from modelfence.masking.digest import digest_of
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.loop import Learned, Session, learn_scores

IMAGES = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
RATE = 1e-3


def network() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(1)
    for value in model.parameters():
        value.data = torch.randn(value.shape, generator=generator)
    return model.eval()


def config(**values: Any) -> SAMap:
    return SAMap(
        **({"steps": 6, "learning_rate": RATE, "evaluate_every": 2, "decay": 0.0, "precision": "fp32"} | values)
    )


def run(
    settings: SAMap,
    loss: Callable[[nn.Module, MaskedModel, int], dict[str, Tensor]],
    model: nn.Module | None = None,
    **parts: Any,
) -> Learned:
    """Learn on batches that are just the numbers of the steps."""
    session = Session(Fabric(accelerator="cpu", devices=1), **parts)
    return learn_scores(model or network(), settings, session, batches=itertools.count, loss=loss)


def squares(student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
    return {"first": student(IMAGES + step).square().mean(), "second": -0.5 * student(IMAGES - step).abs().mean()}


class Watch:
    """A loss that remembers the masked model, and what its scores were at each step."""

    def __init__(self, loss: Callable[[nn.Module, MaskedModel, int], dict[str, Tensor]]) -> None:
        self.loss = loss
        self.steps: list[int] = []
        self.before: list[list[Tensor]] = []

    def __call__(self, student: nn.Module, masked: MaskedModel, step: int) -> dict[str, Tensor]:
        self.masked = masked
        self.steps.append(step)
        self.before.append(self.scores())
        return self.loss(student, masked, step)

    def scores(self) -> list[Tensor]:
        return [score.detach().clone() for score in self.masked.scores]


def test_the_scores_are_those_of_plain_adam():
    watch = Watch(squares)
    run(config(), watch)
    masked = MaskedModel(network())
    adam = torch.optim.Adam(masked.scores.parameters(), lr=RATE)
    for step in range(6):
        adam.zero_grad()
        sum(squares(masked, masked, step).values()).backward()
        adam.step()
    for found, expected in zip(watch.masked.scores, masked.scores, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert watch.steps == list(range(6))


def test_no_gradient_is_held_while_a_step_runs_forward():
    """That is where memory peaks."""
    held = []

    def loss(student: nn.Module, masked: MaskedModel, step: int) -> dict[str, Tensor]:
        held.append([score.grad for score in masked.scores])
        return squares(student, masked, step)

    run(config(), loss)
    assert held == [[None, None]] * 6


@pytest.mark.parametrize(("decay", "rates"), [(0.0, [1] * 4), (0.5, [1, 1, 1, 0.5]), (1.0, [1, 0.75, 0.5, 0.25])])
def test_the_rate_falls_linearly_over_the_last_share_of_the_steps(decay, rates):
    """Adam moves by exactly its rate where the gradient never changes."""
    watch = Watch(lambda _, masked, step: {"pull": sum(weight.sum() for weight in masked.weights().values())})
    run(config(steps=4, decay=decay), watch)
    scores = [states[0] for states in watch.before] + [watch.scores()[0]]
    sign = watch.masked.base[1].weight.sign()
    for rate, old, new in zip(rates, scores, scores[1:], strict=False):
        torch.testing.assert_close((old - new) * sign / RATE, torch.full_like(old, rate), rtol=1e-3, atol=1e-3)


def test_rows_hold_means_since_the_last_row(tmp_path):
    seen: list[dict[str, float]] = []
    learned = run(
        config(steps=5, evaluate_every=2),
        lambda student, _, step: {"one": student(IMAGES).mean() * 0 + step, "two": torch.tensor(-1.0)},
        monitor=lambda student: {"source_accuracy": 0.5, "gap": float(student(IMAGES).isfinite().all())},
        progress=seen.append,
    )
    assert [row["step"] for row in learned.history] == [2, 4, 5]
    assert [row["one"] for row in learned.history] == [0.5, 2.5, 4.0]
    assert [row["loss"] for row in learned.history] == [-0.5, 1.5, 3.0]
    keys = ["step", "loss", "one", "two", "kept", "source_accuracy", "gap", "seconds"]
    assert all(list(row) == keys for row in learned.history)
    assert seen == learned.history
    assert [row["kept"] for row in learned.history] == [1.0] * 3
    assert all(later >= sooner >= 0 for sooner, later in itertools.pairwise(row["seconds"] for row in learned.history))


def test_seconds_are_those_of_learning_without_measuring(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("modelfence.methods.loop.time.monotonic", lambda: clock[0])

    def loss(student: nn.Module, _: MaskedModel, step: int) -> dict[str, torch.Tensor]:
        clock[0] += 3
        return {"one": student(IMAGES).mean() * 0 + step}

    def monitor(student: nn.Module) -> dict[str, float]:
        clock[0] += 100
        return {}

    learned = run(config(steps=5, evaluate_every=2), loss, monitor=monitor)
    assert [row["seconds"] for row in learned.history] == [6, 12, 15]


def test_the_mask_is_where_scores_ended_above_the_threshold():
    watch = Watch(squares)
    learned = run(config(steps=12, learning_rate=2e-3, threshold=5e-3), watch)
    for name, score in zip(watch.masked.names, watch.masked.scores, strict=True):
        assert torch.equal(learned.kept[name], score > 5e-3)
    shares = [kept.float().mean() for kept in learned.kept.values()]
    assert min(shares) < 1
    assert max(shares) > 0


def test_the_model_is_not_changed():
    model = network().train()
    before = digest_of(model)
    run(config(), squares, model)
    assert digest_of(model) == before
    assert all(module.training for module in model.modules())
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


# Not finite


def test_a_term_that_is_not_finite_is_named_with_its_step(tmp_path):
    def loss(student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
        good = student(IMAGES).square().mean()
        return {"source": good, "target": good * (float("nan") if step >= 4 else 1)}

    file = tmp_path / "state.safetensors"
    with pytest.raises(
        NonFiniteError, match="step 5: loss term 'target' became NaN or infinite; lower learn"
    ) as caught:
        run(config(steps=8, evaluate_every=3), loss, state_file=file)
    assert "\n" not in str(caught.value)
    good = run(config(steps=8, evaluate_every=3), squares, state_file=tmp_path / "other")
    assert file.exists()  # the state of step 3, from before
    assert file.stat().st_size < (tmp_path / "other").stat().st_size + 200
    assert good.history[0]["step"] == 3


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
def test_terms_that_cancel_are_still_found(bad):
    def loss(student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
        return {"a": student(IMAGES).mean(), "b": torch.tensor(bad), "c": torch.tensor(-bad)}

    with pytest.raises(NonFiniteError, match="step 1: loss term 'b'"):
        run(config(), loss)


def test_a_gradient_that_is_not_finite_is_named_though_the_loss_is():
    def loss(student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
        return {"root": (student(IMAGES).sum() * 0).sqrt()}  # slope at 0 is infinite

    with pytest.raises(NonFiniteError, match=r"step 2: the gradient of '1.weight' became NaN or infinite"):
        run(config(), loss)


# Early stopping


def scripted(gaps: list[float]) -> Callable[[nn.Module], dict[str, float]]:
    values = iter(gaps)
    return lambda _: {"gap": next(values)}


def test_patience_stops_and_keeps_the_best_mask():
    watch = Watch(squares)
    gaps = [0.1, 0.5, 0.5, 0.4, 0.9]
    settings = {"steps": 20, "learning_rate": 2e-3, "evaluate_every": 2}
    learned = run(config(patience=2, **settings), watch, monitor=scripted(gaps))
    assert [row["gap"] for row in learned.history] == gaps[:4]  # an equal gap is no better
    best = watch.before[4]  # the scores after step 4, the second measurement
    for kept, score in zip(learned.kept.values(), best, strict=True):
        assert torch.equal(kept, score > 5e-3)
    assert not all(torch.equal(k, s > 5e-3) for k, s in zip(learned.kept.values(), watch.scores(), strict=True))


def test_without_patience_the_last_mask_counts():
    watch = Watch(squares)
    learned = run(config(steps=20, learning_rate=2e-3), watch, monitor=scripted([9.0] + [0.0] * 9))
    assert len(learned.history) == 10
    assert all(torch.equal(k, s > 5e-3) for k, s in zip(learned.kept.values(), watch.scores(), strict=True))


def test_patience_survives_a_resume(tmp_path):
    file = tmp_path / "state.safetensors"
    settings = config(steps=20, learning_rate=2e-3, evaluate_every=2, patience=2)
    gaps = [0.1, 0.5, 0.4, 0.3]
    whole = run(settings, squares, monitor=scripted(gaps))
    with pytest.raises(StopIteration):  # breaks at the third measurement, after the state of the second was saved
        run(settings, squares, monitor=scripted(gaps[:2]), state_file=file)
    resumed = run(settings, squares, monitor=scripted(gaps[2:]), state_file=file, resume=True)
    assert [row["gap"] for row in resumed.history] == gaps
    assert all(torch.equal(resumed.kept[name], kept) for name, kept in whole.kept.items())
    again = run(settings, squares, monitor=scripted([]), state_file=file, resume=True)  # nothing left to do
    assert all(torch.equal(again.kept[name], kept) for name, kept in whole.kept.items())


# Interruption


def interrupting(at: int, number: int = signal.SIGINT) -> Callable[[nn.Module, MaskedModel, int], dict[str, Tensor]]:
    def loss(student: nn.Module, masked: MaskedModel, step: int) -> dict[str, Tensor]:
        if step == at:
            os.kill(os.getpid(), number)
        return squares(student, masked, step)

    return loss


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_interrupted_run_goes_on_to_the_same_scores(tmp_path: Path, number, at):
    whole, cut = Watch(squares), Watch(interrupting(at, number))
    expected = run(config(steps=5), whole)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    file = tmp_path / "state.safetensors"
    with pytest.raises(Interrupted, match=rf"stopped at step {at + 1}; the state is saved in .*: go on with --resume"):
        run(config(steps=5), cut, state_file=file)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    rest = Watch(squares)
    learned = run(config(steps=5), rest, state_file=file, resume=True)
    assert rest.steps == list(range(at + 1, 5))
    assert all(map(torch.equal, rest.scores(), whole.scores()))
    for found, row in zip(learned.history, expected.history, strict=True):
        assert {**found, "seconds": 0} == {**row, "seconds": 0}


def test_without_an_output_folder_nothing_can_be_saved_and_the_text_says_so():
    with pytest.raises(Interrupted, match="stopped at step 3; nothing was saved"):
        run(config(), interrupting(2))


def test_an_interruption_does_not_save_what_is_not_finite(tmp_path):
    def loss(student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"source": student(IMAGES).mean() * float("nan")}

    with pytest.raises(NonFiniteError, match="step 1"):
        run(config(), loss, state_file=tmp_path / "state.safetensors")
    assert not any(tmp_path.iterdir())


def test_in_another_thread_the_loop_leaves_signals_alone():
    found: list[Learned] = []
    thread = threading.Thread(target=lambda: found.append(run(config(steps=2), squares)))
    thread.start()
    thread.join(60)
    assert found[0].history[-1]["step"] == 2


# A layer that gets no gradient


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = network(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.main(x)
        return logits, self.side(logits)


def test_a_layer_that_the_logits_do_not_depend_on_is_kept_and_the_run_resumes(tmp_path):
    model, file = Auxiliary().eval(), tmp_path / "state.safetensors"
    whole = run(config(learning_rate=2e-3), squares, model)
    with pytest.raises(Interrupted):
        run(config(learning_rate=2e-3), interrupting(2), model, state_file=file)
    resumed = run(config(learning_rate=2e-3), squares, model, state_file=file, resume=True)
    assert whole.kept["side.weight"].all()
    assert all(torch.equal(resumed.kept[name], kept) for name, kept in whole.kept.items())


def test_only_the_stream_is_asked_to_skip(tmp_path):
    """Batches of steps already taken aren't made again."""
    starts: list[int] = []

    def batches(start: int) -> Iterator[int]:
        starts.append(start)
        return itertools.count(start)

    file = tmp_path / "state.safetensors"
    parts = {"batches": batches, "loss": squares}
    for resume in (False, True):
        session = Session(Fabric(accelerator="cpu", devices=1), state_file=file, resume=resume)
        learn_scores(network(), config(steps=4), session, **parts)
    assert starts == [0, 4]


# Companions and monitors of the method's own


class Counter:
    """A companion whose next number depends on all before."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.loads = 0

    def __call__(self, student: nn.Module, _: MaskedModel, step: int) -> dict[str, Tensor]:
        self.total = 0.5 * self.total + step
        return {"pull": (student(IMAGES) * self.total).mean()}

    def state(self) -> dict[str, Tensor]:
        return {"deep/total": self.total}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.loads += 1
        self.total = tensors["deep/total"]


def accompanied(companion: Counter, stop: int = -1, **parts: Any) -> Learned:
    def loss(student: nn.Module, masked: MaskedModel, step: int) -> dict[str, Tensor]:
        if step == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return companion(student, masked, step)

    session = Session(Fabric(accelerator="cpu", devices=1), **parts)
    settings = config(steps=8, learning_rate=2e-3)
    return learn_scores(network(), settings, session, batches=itertools.count, loss=loss, companion=companion)


def test_a_companion_is_saved_and_restored_with_the_scores(tmp_path):
    whole, cut, rest = Counter(), Counter(), Counter()
    expected = accompanied(whole)
    file = tmp_path / "state.safetensors"
    with pytest.raises(Interrupted):
        accompanied(cut, stop=4, state_file=file)
    resumed = accompanied(rest, state_file=file, resume=True)
    assert (whole.loads, cut.loads, rest.loads) == (0, 0, 1)
    assert torch.equal(rest.total, whole.total)
    assert [{**row, "seconds": 0} for row in resumed.history] == [{**row, "seconds": 0} for row in expected.history]
    assert all(torch.equal(resumed.kept[name], kept) for name, kept in expected.kept.items())


def test_a_companion_that_is_not_finite_is_named_and_not_saved(tmp_path):
    class Broken(Counter):
        def __call__(self, student: nn.Module, masked: MaskedModel, step: int) -> dict[str, Tensor]:
            terms = super().__call__(student, masked, step)
            self.total = self.total * (float("nan") if step == 3 else 1)
            return terms

    file = tmp_path / "state.safetensors"
    with pytest.raises(NonFiniteError, match=r"step 4: 'deep/total' became NaN or infinite; lower its learning rate"):
        accompanied(Broken(), state_file=file)
    rest = Counter()
    accompanied(rest, state_file=file, resume=True)  # from step 2
    assert rest.loads == 1


def test_the_numbers_of_the_methods_own_monitor_stand_beside_the_sessions_and_win():
    session = Session(Fabric(accelerator="cpu", devices=1), monitor=lambda _: {"source_accuracy": 0.5, "gap": 0.1})
    learned = learn_scores(
        network(),
        config(steps=2, patience=1),
        session,
        batches=itertools.count,
        loss=squares,
        monitor=lambda student: {"agreement": float(student(IMAGES).isfinite().all()), "gap": 0.7},
    )
    row = learned.history[0]
    assert (row["source_accuracy"], row["agreement"], row["gap"]) == (0.5, 1.0, 0.7)
