"""The loop that learns mask scores: optimizer, measurements, saved state, interruption."""

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError, Interrupted, NonFiniteError
from modelfence.masking.digest import digest_of, digest_of_tensors
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.config import MaskConfig
from modelfence.methods.state import load_state, require_same_run, save_state

Row = dict[str, float]
Step = TypeVar("Step")


class Monitor(Protocol):
    """Measures the student on images kept apart."""

    def __call__(self, student: nn.Module) -> Row:
        """Return named numbers; "gap" is the one that early stopping maximizes."""
        ...


class Companion(Protocol):
    """What changes from step to step beside the scores, such as generators; it is saved and restored with them.

    It must be the same on all processes: the first one saves, all restore.
    """

    def state(self) -> dict[str, Tensor]:
        """Return by name all that the next step depends on; no copies are needed."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned; the tensors lie on the CPU."""
        ...


@dataclass(frozen=True)
class Session:
    """What a method is given to work with.

    Attributes:
        fabric: Device, precision and processes.
        authorized: The authorized domain, if the setting has it.
        unauthorized: Unauthorized domains by name.
        monitor: Measures the student at every evaluation; None measures nothing.
        state_file: Where the run's state is kept; None keeps none.
        resume: Go on from the state file if it is there.
        progress: Told every row of the history as it is made.
        image: What the model eats, where it is known; synthesis needs it.
        cache: Folder where synthetic images are kept for other runs with the same model; None keeps those of this
            run beside its state.
        announce: Told in words how the work before the learning goes.
    """

    fabric: Fabric
    authorized: Domain | None = None
    unauthorized: Mapping[str, Domain] = field(default_factory=dict)
    monitor: Monitor | None = None
    state_file: Path | None = None
    resume: bool = False
    progress: Callable[[Row], None] | None = None
    image: ImageSpec | None = None
    cache: Path | None = None
    announce: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Learned:
    """What a method gives back.

    Attributes:
        kept: Boolean tensor by parameter name, True where the weight is kept.
        history: One row per measurement.
    """

    kept: dict[str, Tensor]
    history: list[Row]


def learn_scores(
    model: nn.Module,
    config: MaskConfig,
    session: Session,
    *,
    batches: Callable[[int], Iterator[Step]],
    loss: Callable[[nn.Module, MaskedModel, Step], dict[str, Tensor]],
    monitor: Monitor | None = None,
    companion: Companion | None = None,
) -> Learned:
    """Learn the scores of a mask by Adam.

    Args:
        model: The trained network; it isn't changed.
        config: Settings of the loop.
        session: Where to run, what to measure, where to save.
        batches: Returns an iterator over batches that begins at a given step; batch t depends on t alone.
        loss: Takes the student (call it), its masked model (for the teacher) and a batch; returns named terms, each
            a scalar. Their sum is minimized.
        monitor: What the method itself measures, beside the session's; where both give a number, this one's counts.
        companion: What ``loss`` changes beside the scores; a resumed run needs it to end as an uninterrupted one.

    Raises:
        NonFiniteError: A term became NaN or infinite; the text names it and the step.
        Interrupted: The run was stopped; its state was saved.
    """
    run = _Run(model, config, session, [one for one in (session.monitor, monitor) if one is not None], companion)
    run.restore()
    stream = batches(run.step)
    with _interruptible() as stopped:
        while run.step < config.steps and not run.out_of_patience():
            run.advance(loss, next(stream))
            if run.step % config.evaluate_every == 0 or run.step == config.steps:
                run.measure()
                run.save()
            if run.agreed(stopped.is_set()):
                run.require_finite()
                run.save()
                raise Interrupted(_resume_text(session, run.step))
    return Learned(run.best if config.patience is not None else run.masked.kept(), run.history)


class _Run:
    """Everything that changes while scores are learned."""

    def __init__(
        self,
        model: nn.Module,
        config: MaskConfig,
        session: Session,
        monitors: Sequence[Monitor] = (),
        companion: Companion | None = None,
    ) -> None:
        self.config, self.session, self.fabric = config, session, session.fabric
        self.monitors, self.companion = monitors, companion
        reduced = _computes_in_bfloat16(self.fabric)
        self.masked = MaskedModel(
            _in_float32(model),
            score_init=config.score_init,
            threshold=config.threshold,
            dtype=torch.bfloat16 if reduced else None,
            channels_last=True,
        )
        self.masked.world = self.fabric.world_size
        self.identity = {
            "model": digest_of(model),
            "configuration": asdict(config),
            "domains": _named(session),
            "number of processes": self.fabric.world_size,
        }
        self.student, self.optimizer = self.fabric.setup(self.masked, self._adam())
        self.step = 0
        self.history: list[Row] = []
        self.best: dict[str, Tensor] = {}
        self.best_gap, self.waited = -float("inf"), 0
        self._clock, self._spent = time.monotonic(), 0.0
        self._forget()

    def _adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.masked.scores.parameters(), lr=self.config.learning_rate, fused=True)

    def _forget(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.summed = 0
        self.bad_step: Tensor = torch.full((), -1, device=self.fabric.device)

    def advance(self, loss: Callable[[nn.Module, MaskedModel, Any], dict[str, Tensor]], batch: Any) -> None:
        """Take one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * self._decayed()
        terms = loss(self.student, self.masked, batch)
        total = torch.stack(tuple(terms.values())).sum()
        self.optimizer.zero_grad()
        self.fabric.backward(total)
        self.optimizer.step()
        self.step += 1
        self._note(terms, total)

    def _decayed(self) -> float:
        tail = self.config.decay * self.config.steps
        return min(1.0, (self.config.steps - self.step) / tail) if tail else 1.0

    def _note(self, terms: dict[str, Tensor], total: Tensor) -> None:
        first = (self.bad_step < 0) & ~total.detach().isfinite()
        self.bad_step = torch.where(first, self.step, self.bad_step)
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, value.new_zeros(())) + value.detach()
        self.summed += 1

    def measure(self) -> None:
        """Add a row to the history; fail if a term wasn't finite since the last one."""
        self.require_finite()
        means = {name: float(value) / max(self.summed, 1) for name, value in self.sums.items()}
        now = time.monotonic()
        self._spent, self._clock = self._spent + now - self._clock, now
        row: Row = {"step": self.step, "loss": sum(means.values()), **means, "kept": self.masked.kept_share()}
        with torch.no_grad():
            for monitor in self.monitors:
                row |= monitor(self.student)
        row["seconds"] = round(self._spent, 3)
        self.history.append(row)
        self._forget()
        self._keep_best(row)
        if self.session.progress is not None and self.fabric.is_global_zero:
            self.session.progress(row)

    def require_finite(self) -> None:
        """Refuse to go on, or to save, once a term, a score or the companion is NaN or infinite.

        Raises:
            NonFiniteError: Names the step and the term, the weight whose score broke, or the companion's tensor.
        """
        remedy = "lower learning_rate, or use precision fp32"
        if int(self.bad_step) >= 0:
            terms = [name for name, value in self.sums.items() if not bool(value.isfinite())]
            named = terms[0] if terms else "sum"
            raise NonFiniteError(f"step {int(self.bad_step)}: loss term {named!r} became NaN or infinite; {remedy}")
        for name, score in zip(self.masked.names, self.masked.scores, strict=True):
            if not bool(score.isfinite().all()):
                raise NonFiniteError(f"step {self.step}: the gradient of {name!r} became NaN or infinite; {remedy}")
        for name, value in self._companion_state().items():
            if not bool(value.isfinite().all()):
                raise NonFiniteError(f"step {self.step}: {name!r} became NaN or infinite; lower its learning rate")

    def _companion_state(self) -> dict[str, Tensor]:
        return {} if self.companion is None else self.companion.state()

    def _keep_best(self, row: Row) -> None:
        if self.config.patience is None:
            return
        gap = float(self.fabric.broadcast(row.get("gap", -float("inf"))))
        if gap > self.best_gap or not self.best:
            self.best_gap, self.waited, self.best = gap, 0, self.masked.kept()
        else:
            self.waited += 1

    def agreed(self, stop: bool) -> bool:
        """Whether all processes stop now: one that was told to stop must not leave the others waiting for it."""
        if self.fabric.world_size == 1:
            return stop
        if self.step % self.config.evaluate_every:
            return False
        told = torch.tensor(float(stop), device=self.fabric.device)
        return bool(cast("Tensor", self.fabric.all_reduce(told, reduce_op="sum")) > 0)

    def out_of_patience(self) -> bool:
        """Whether early stopping says that it is enough."""
        return self.config.patience is not None and self.waited >= self.config.patience

    def save(self) -> None:
        """Write the state, on the first process alone."""
        if self.session.state_file is None or not self.fabric.is_global_zero:
            return
        tensors = {f"best/{name}": kept for name, kept in self.best.items()}
        tensors |= {f"sum/{name}": value for name, value in self.sums.items()}
        tensors |= {f"companion/{name}": value for name, value in self._companion_state().items()}
        for index, score in enumerate(self.masked.scores):
            moments = self.optimizer.state[score]  # empty for a weight that the logits don't depend on
            tensors[f"score/{index}"] = score
            tensors |= {f"adam/{index}/{key}": value for key, value in moments.items()}
        facts = {
            "identity": self.identity,
            "step": self.step,
            "history": self.history,
            "summed": self.summed,
            "best": [self.best_gap, self.waited],
            "spent": self._spent + time.monotonic() - self._clock,
        }
        save_state(self.session.state_file, tensors, facts)

    def restore(self) -> None:
        """Go on from the saved state, if there is one and it is wanted."""
        path = self.session.state_file
        if path is None or not self.session.resume or not path.exists():
            return
        tensors, facts = load_state(path)
        require_same_run(path, facts, self.identity)
        with torch.no_grad():
            for index, score in enumerate(self.masked.scores):
                score.copy_(tensors[f"score/{index}"])
                if f"adam/{index}/step" not in tensors:
                    continue
                moments = self.optimizer.state[score]
                moments["step"] = tensors[f"adam/{index}/step"].to(score.device)
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[key] = torch.empty_like(score).copy_(tensors[f"adam/{index}/{key}"])
        self.step, self.history, self.summed = facts["step"], facts["history"], facts["summed"]
        self.best_gap, self.waited = facts["best"]
        self._spent, self._clock = facts["spent"], time.monotonic()
        companion = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "best":
                self.best[rest] = value
            elif kind == "sum":
                self.sums[rest] = value.to(self.fabric.device)
            elif kind == "companion":
                companion[rest] = value
        if self.companion is not None:
            self.companion.load(companion)


def _computes_in_bfloat16(fabric: Fabric) -> bool:
    """Whether the forward pass runs in bfloat16; the scores must stay in float32."""
    precision = str(fabric._precision.precision)
    if precision not in ("32-true", "bf16-mixed"):
        raise InputError(f"fabric has precision {precision!r}; masks are learned in '32-true' or 'bf16-mixed'")
    return precision == "bf16-mixed"


def _in_float32(model: nn.Module) -> nn.Module:
    """A network kept in half precision is learned on in float32, where small gradients don't vanish."""
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in model.parameters()):
        return copy.deepcopy(model).float()
    return model


def _named(session: Session) -> dict[str, list[Any]]:
    """What tells the domains of one run from those of another: name, size, and the first images where they stay."""
    domains = {**session.unauthorized, **({} if session.authorized is None else {"": session.authorized})}
    named: dict[str, list[Any]] = {}
    for name, domain in domains.items():
        named[name] = [domain.name, domain.size]
        if isinstance(domain, IndexedDomain):
            named[name].append(digest_of_tensors({"first": next(domain.once(8, limit=8)).images}))
    return named


def _resume_text(session: Session, step: int) -> str:
    if session.state_file is None:
        return f"stopped at step {step}; nothing was saved, as no output folder was given"
    return f"stopped at step {step}; the state is saved in {session.state_file.parent}: go on with --resume"


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a flag, so that the step at hand ends and the state is saved."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(*_: object) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
