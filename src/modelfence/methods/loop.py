"""The loop that all methods learn by: optimizer, measurements, saved state, interruption."""

import contextlib
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
from modelfence.errors import ArtifactError, Interrupted, ModelfenceError, NonFiniteError
from modelfence.masking.digest import digest_of, digest_of_tensors
from modelfence.masking.masked_model import MaskedModel
from modelfence.methods.config import LearnConfig, MaskConfig
from modelfence.methods.samples import Synthetic
from modelfence.methods.state import load_state, part_of, require_same_run, save_state
from modelfence.methods.subject import MaskScores, Subject

Row = dict[str, float]
Step = TypeVar("Step")


class Monitor(Protocol):
    """Measures the student on images kept apart."""

    def __call__(self, student: nn.Module) -> Row:
        """Return named numbers; "gap" is the one that early stopping maximizes."""
        ...


class Companion(Protocol):
    """What changes from step to step beside what is learned, such as generators; saved and restored with that.

    It must be the same on all processes: the first one saves, all restore.
    """

    def state(self) -> dict[str, Tensor]:
        """Return by name all that the next step depends on; no copies are needed."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`state` returned; the tensors lie on the CPU."""
        ...


WARNING = "warning: "
"""How a warning begins among the lines of text that :attr:`Session.announce` is told."""


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
        announce: Told in words how the work before the learning goes, and warnings.
        warnings: What was warned of so far; sessions made from this one by ``replace`` share it.
        about: What the warnings are about, where several masks are learned; they begin with it.
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
    warnings: list[str] = field(default_factory=list)
    about: str = ""

    def warn(self, text: str) -> None:
        """Note a warning, and tell it; once, however often it comes up."""
        text = f"{self.about}: {text}" if self.about else text
        if text in self.warnings:
            return
        self.warnings.append(text)
        if self.announce is not None:
            self.announce(f"{WARNING}{text}")


@dataclass(frozen=True)
class Learned:
    """What a method gives back.

    Attributes:
        kept: Boolean tensor by parameter name, True where the weight is kept; empty where the network was retrained.
        history: One row per measurement.
        weights: Where the network was retrained, with no mask: its parameters and buffers by name; else None.
        synthetic: What was synthesized for it, to look at.
    """

    kept: dict[str, Tensor]
    history: list[Row]
    weights: dict[str, Tensor] | None = None
    synthetic: Synthetic = field(default_factory=Synthetic)


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
    learned, history = learn(
        MaskScores(model, config, session.fabric),
        model,
        config,
        session,
        batches=batches,
        loss=loss,
        monitor=monitor,
        companion=companion,
    )
    return Learned(learned, history)


def learn(
    subject: Subject,
    model: nn.Module,
    config: LearnConfig,
    session: Session,
    *,
    batches: Callable[[int], Iterator[Step]],
    loss: Callable[[nn.Module, Any, Step], dict[str, Tensor]],
    monitor: Monitor | None = None,
    companion: Companion | None = None,
) -> tuple[dict[str, Tensor], list[Row]]:
    """Learn anything by Adam; the arguments that :func:`learn_scores` has too are the same here.

    Args:
        subject: What is learned.
        model: The trained network, by which a saved run is told from others.
        config: Settings of the loop.
        session: Where to run, what to measure, where to save.
        batches: Returns an iterator over batches that begins at a given step.
        loss: Takes the student (call it), the subject's module and a batch; returns named terms.
        monitor: What the method itself measures.
        companion: What ``loss`` changes beside the subject.

    Returns:
        The subject's result (the best one, with patience), and the history.

    Raises:
        NonFiniteError: A term became NaN or infinite; the text names it and the step.
        Interrupted: The run was stopped; its state was saved.
    """
    monitors = [one for one in (session.monitor, monitor) if one is not None]
    run = _Run(subject, digest_of(model), config, session, monitors, companion)
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
    return (run.best if config.patience is not None else subject.result()), run.history


class _Run:
    """Everything that changes while something is learned."""

    def __init__(
        self,
        subject: Subject,
        digest: str,
        config: LearnConfig,
        session: Session,
        monitors: Sequence[Monitor] = (),
        companion: Companion | None = None,
    ) -> None:
        self.subject, self.config, self.session, self.fabric = subject, config, session, session.fabric
        self.monitors, self.companion = monitors, companion
        self.identity = {
            "model": digest,
            "configuration": asdict(config),
            "image": None if session.image is None else asdict(session.image),
            "domains": _named(session),
            "number of processes": self.fabric.world_size,
        }
        self.student, self.optimizer = self.fabric.setup(subject.module, self._adam())
        self.step = 0
        self.history: list[Row] = []
        self.best: dict[str, Tensor] = {}
        self.best_gap, self.waited = -float("inf"), 0
        self._clock, self._spent = time.monotonic(), 0.0
        self._forget()

    def _adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.subject.parameters().values(), lr=self.config.learning_rate, fused=True)

    def _forget(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.summed = 0
        self.bad_step: Tensor = torch.full((), -1, device=self.fabric.device)

    def advance(self, loss: Callable[[nn.Module, Any, Any], dict[str, Tensor]], batch: Any) -> None:
        """Take one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.step)
        with self.subject.step(self.step):
            terms = loss(self.student, self.subject.module, batch)
            total = torch.stack(tuple(terms.values())).sum()
        self.fabric.backward(total)
        self.optimizer.step()
        self.optimizer.zero_grad()  # here: the next forward pass is where memory peaks
        self.step += 1
        self._note(terms, total)

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
        self._spent += time.monotonic() - self._clock
        row: Row = {"step": self.step, "loss": sum(means.values()), **means, **self.subject.measured()}
        with torch.no_grad(), self.subject.measuring():
            for monitor in self.monitors:
                row |= monitor(self.student)
        row["seconds"] = round(self._spent, 3)
        self.history.append(row)
        self._forget()
        self._keep_best(row)
        if self.session.progress is not None and self.fabric.is_global_zero:
            self.session.progress(row)
        self._clock = time.monotonic()  # measuring isn't learning

    def require_finite(self) -> None:
        """Refuse to go on, or to save, once a term, what is learned or the companion is NaN or infinite.

        Raises:
            NonFiniteError: Names the step and the term, the weight that broke, or the companion's tensor.
        """
        remedy = "lower learning_rate, or use precision fp32"
        if int(self.bad_step) >= 0:
            terms = [name for name, value in self.sums.items() if not bool(value.isfinite())]
            named = terms[0] if terms else "sum"
            raise NonFiniteError(f"step {int(self.bad_step)}: loss term {named!r} became NaN or infinite; {remedy}")
        broken = self.subject.not_finite()
        if broken is not None:
            raise NonFiniteError(f"step {self.step}: {broken} became NaN or infinite; {remedy}")
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
            self.best_gap, self.waited, self.best = gap, 0, self.subject.result()
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
        tensors |= {f"buffer/{name}": value for name, value in self.subject.buffers().items()}
        for name, parameter in self.subject.parameters().items():
            moments = self.optimizer.state[parameter]  # empty for a weight that the logits don't depend on
            tensors[f"{self.subject.kind}/{name}"] = parameter
            tensors |= {f"adam/{name}/{key}": value for key, value in moments.items()}
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
        """Go on from the saved state, if there is one and it is wanted.

        Raises:
            InputError: It is of another run, or damaged, here or at another process; or the processes' steps differ.
        """
        failure = None
        try:
            self._restore()
        except ModelfenceError as failed:
            failure = failed
        self._agree(failure)
        if failure is not None:
            raise failure

    def _restore(self) -> None:
        path = self.session.state_file
        if path is None or not self.session.resume or not path.exists():
            return
        tensors, facts = load_state(path)
        require_same_run(path, facts, self.identity)
        with torch.no_grad():
            for name, buffer in self.subject.buffers().items():
                buffer.copy_(tensors[f"buffer/{name}"])
            for name, parameter in self.subject.parameters().items():
                parameter.copy_(tensors[f"{self.subject.kind}/{name}"])
                self._restore_moments(parameter, part_of(tensors, f"adam/{name}"))
        self.step, self.history, self.summed = facts["step"], facts["history"], facts["summed"]
        self.best_gap, self.waited = facts["best"]
        self._spent, self._clock = facts["spent"], time.monotonic()
        self.best = part_of(tensors, "best")
        self.sums = {name: value.to(self.fabric.device) for name, value in part_of(tensors, "sum").items()}
        if self.companion is not None:
            self.companion.load(part_of(tensors, "companion"))

    def _agree(self, failure: ModelfenceError | None) -> None:
        """Refuse processes that found different states; all take part, as one that had raised would be waited for."""
        if self.fabric.world_size == 1:
            return
        here = torch.tensor([float(self.step), -float(self.step), float(bool(failure))], device=self.fabric.device)
        most, least, failed = cast("Tensor", self.fabric.all_reduce(here, reduce_op="max")).abs().tolist()
        if failed and failure is None:
            raise ArtifactError(f"{self.session.state_file}: another process can't go on from the state that it has")
        if least != most and failure is None:
            steps = f"the processes would go on at different steps ({least:.0f} and {most:.0f})"
            raise ArtifactError(f"{self.session.state_file}: {steps}; give an output folder that all machines see")

    def _restore_moments(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """Take back what Adam knew of a parameter; nothing where it never had a gradient."""
        if not saved:
            return
        moments = self.optimizer.state[parameter]
        moments["step"] = saved["step"].to(parameter.device)
        for key in ("exp_avg", "exp_avg_sq"):
            moments[key] = torch.empty_like(parameter).copy_(saved[key])


def row_kept(history: Sequence[Row], config: LearnConfig) -> Row:
    """Return the row of the history that measured what a run keeps: with patience the best one, else the last.

    Args:
        history: Of one run; at least one row.
        config: Its ``patience``.

    Example:
        >>> rows = [{"step": 1, "gap": 0.9}, {"step": 2, "gap": 0.5}]
        >>> row_kept(rows, LearnConfig())["step"], row_kept(rows, LearnConfig(patience=1))["step"]
        (2, 1)
    """
    if config.patience is None:
        return history[-1]
    return max(history, key=lambda row: row.get("gap", -float("inf")))


def _named(session: Session) -> dict[str, list[Any]]:
    """What tells the domains of one run from others: name, size; where they stay, eight images and the labels."""
    domains = {**session.unauthorized, **({} if session.authorized is None else {"": session.authorized})}
    named: dict[str, list[Any]] = {}
    for name, domain in domains.items():
        named[name] = [domain.name, domain.size]
        if isinstance(domain, IndexedDomain):
            known = {} if domain.labels is None else {"labels": domain.labels}
            named[name].append(digest_of_tensors({"first": next(domain.once(8, limit=8)).images, **known}))
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
