"""Training a source classifier from scratch: AdamW, warm-up, cosine decay, best validated epoch."""

import copy
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, cast

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional as F

from modelfence.data.domain import Domain
from modelfence.data.splits import MOST_SEED
from modelfence.errors import InputError, NonFiniteError
from modelfence.masking.unwrap import require_network
from modelfence.models.autocast import Precision, attention_in_float32, autocast, resolve_precision
from modelfence.models.outputs import logits_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_CHECK_EVERY = 50  # steps between two looks at the losses, each of which waits for the device


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """How a source model is trained.

    The defaults train VGG, with and without BatchNorm, from scratch on a few thousand 32-pixel digits.

    Args:
        epochs: Passes over the training images.
        batch_size: Images per step and process.
        learning_rate: Peak of the schedule, after the warm-up; then it falls to zero by half a cosine.
        warmup: Share of all steps in which the learning rate rises linearly, in [0, 1).
        weight_decay: Of AdamW; matrices and convolutions only, not biases and norms.
        label_smoothing: Probability spread over the other classes, in [0, 1).
        gradient_clip: Largest norm of the gradient, above 0.
        shift: Largest random shift of an image along each side, in pixels; 0 for none. Never flipped.
        precision: ``"auto"``, ``"bf16"`` or ``"fp32"``; weights are float32 in all cases.
        steps_per_epoch: Needed for streams, whose length isn't known; otherwise one pass.
        seed: Of the order of images, the shifts and dropout; 0 to 2**53.

    Example:
        >>> TrainConfig(epochs=3).batch_size
        64
    """

    epochs: Annotated[int, Field(ge=1)] = 12
    batch_size: Annotated[int, Field(ge=2)] = 64
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[int, Field(ge=0)] = 2
    precision: Precision = "auto"
    steps_per_epoch: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0


def train(
    model: nn.Module,
    data: Domain,
    validation: Domain,
    config: TrainConfig | None = None,
    *,
    fabric: "Fabric | None" = None,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train a classifier in place and keep the epoch with the best validation accuracy.

    Args:
        model: The network; only parameters with ``requires_grad`` are trained. Afterwards it holds the best
            epoch (the later of equals), in eval mode, on the device it was trained on.
        data: Labelled images to learn from.
        validation: Labelled images to choose the epoch by.
        config: Settings; the defaults when not given.
        fabric: A Lightning Fabric with device and processes set up; by default one process on the
            best device.
        progress: Called after each epoch with that epoch's row.

    Returns:
        One row per epoch: ``epoch`` (from 1), ``loss`` (mean training loss), ``validation_accuracy`` (0..1),
        ``learning_rate`` (at its end), ``seconds`` (since the start).

    Raises:
        InputError: A domain without labels, with fewer images than a batch or of unknown length, or with
            labels that the model has no logit for; or a model without trainable parameters.
        NonFiniteError: A loss became NaN or infinite; the text names epoch and step.
    """
    config = config or TrainConfig()
    require_network(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("the model has no parameter with requires_grad; nothing can be trained")
    fabric = fabric or _default_fabric()
    steps = _steps_per_epoch(data, validation, config, fabric.world_size)
    many_convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1
    layout = torch.channels_last if many_convolutions else torch.contiguous_format
    model.to(memory_format=layout)
    wrapped, optimizer = fabric.setup(model, _optimizer(model, config))
    loop = _Loop(fabric=fabric, model=wrapped, optimizer=optimizer, config=config, steps=steps, layout=layout)
    state = torch.random.get_rng_state()
    try:
        with attention_in_float32(fabric.device, loop.precision):
            history = _epochs(loop, model, data, validation, progress)
    finally:
        torch.random.set_rng_state(state)
        model.to(memory_format=torch.contiguous_format)
        model.eval()
    return history


def accuracy_on(
    model: nn.Module, domain: Domain, *, device: torch.device | str = "cpu", precision: str = "fp32"
) -> float:
    """Return the share of a domain's images that a model, put in eval mode, classifies correctly.

    Args:
        model: The network, on ``device``.
        domain: Labelled images.
        device: Where the model is.
        precision: ``"auto"``, ``"bf16"`` or ``"fp32"``.

    Returns:
        Accuracy in 0..1.

    Raises:
        InputError: The domain has no labels or no images.
    """
    require_network(model).eval()
    right = torch.zeros((), device=device)
    seen = 0
    with torch.no_grad(), autocast(device, precision):
        for images, labels in domain.once(250, device=device):
            if labels is None:
                raise InputError(f"domain {domain.name!r} has no labels; accuracy needs them")
            right += (logits_of(model(images)).argmax(1) == labels).sum()
            seen += len(labels)
    if not seen:
        raise InputError(f"domain {domain.name!r} has no images")
    return float(right) / seen


def learning_rate_at(step: int, total: int, *, peak: float, warmup: float) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine that ends just above zero.

    Args:
        step: Number of the step, from 0 to ``total - 1``.
        total: Number of steps.
        peak: Largest learning rate.
        warmup: Share of the steps that warm up.

    Returns:
        The learning rate, in (0, peak].

    Example:
        >>> [round(learning_rate_at(step, 6, peak=1.0, warmup=0.5), 2) for step in range(6)]
        [0.33, 0.67, 1.0, 1.0, 0.75, 0.25]
    """
    rising = round(total * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / (total - rising)))


def shifted(images: Tensor, largest: int, generator: torch.Generator) -> Tensor:
    """Shift each image by its own random number of pixels; the border is repeated into the gap.

    Args:
        images: (N, C, H, W).
        largest: Largest shift along each side, in pixels.
        generator: Of random numbers, on the CPU.

    Returns:
        Images of the same shape, dtype and device.

    Example:
        >>> image = torch.arange(9.0).reshape(1, 1, 3, 3)
        >>> torch.equal(shifted(image, 0, torch.Generator()), image)
        True
    """
    if not largest:
        return images
    count, _, height, width = images.shape
    padded = F.pad(images, (largest,) * 4, mode="replicate")
    offsets = torch.randint(0, 2 * largest + 1, (2, count, 1), generator=generator).to(images.device)
    rows = offsets[0] + torch.arange(height, device=images.device)
    columns = offsets[1] + torch.arange(width, device=images.device)
    each = torch.arange(count, device=images.device)
    picked = padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (N, H, W, C)
    return picked.permute(0, 3, 1, 2)


class _Loop:
    """What stays the same from step to step."""

    def __init__(
        self,
        *,
        fabric: "Fabric",
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        steps: int,
        layout: torch.memory_format,
    ) -> None:
        self.fabric, self.model, self.optimizer = fabric, model, optimizer
        self.config, self.steps, self.layout = config, steps, layout
        self.precision = resolve_precision(config.precision, fabric.device)
        self.generator = torch.Generator().manual_seed(config.seed * 1000 + fabric.global_rank)
        optimizer.zero_grad()  # the caller's gradients are none of ours

    def step(self, number: int, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step on images (B, C, H, W) and labels (B,); return the loss, detached."""
        config = self.config
        rate = learning_rate_at(number, self.steps * config.epochs, peak=config.learning_rate, warmup=config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        images = shifted(images, config.shift, self.generator).contiguous(memory_format=self.layout)
        with autocast(self.fabric.device, self.precision):
            logits = logits_of(self.model(images)).float()
        if labels.device.type == "cpu" and int(labels.max()) >= logits.shape[1]:
            raise InputError(
                f"training: label {int(labels.max())} has no logit, the model has {logits.shape[1]}; "
                "build it with the domain's number of classes"
            )
        loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=config.gradient_clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()  # here: the next forward pass is where memory peaks
        return loss.detach()


def _epochs(
    loop: _Loop,
    model: nn.Module,
    data: Domain,
    validation: Domain,
    progress: Callable[[dict[str, float]], None] | None,
) -> list[dict[str, float]]:
    """Run all epochs and leave the best one in the model."""
    fabric, config, steps = loop.fabric, loop.config, loop.steps
    torch.manual_seed(config.seed + fabric.global_rank)
    started = time.perf_counter()
    history: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    batches = data.batches(
        config.batch_size,
        seed=config.seed,
        rank=fabric.global_rank,
        world=fabric.world_size,
        device=fabric.device,
    )
    for epoch in range(1, config.epochs + 1):
        loop.model.train()
        losses: list[Tensor] = []
        for number in range(steps):
            images, labels = next(batches)
            if labels is None:
                raise InputError(f"domain {data.name!r} has no labels; training needs them")
            losses.append(loop.step((epoch - 1) * steps + number, images, labels))
            if len(losses) % _CHECK_EVERY == 0 or len(losses) == steps:
                _check_finite(losses, epoch)
        accuracy = accuracy_on(model, validation, device=fabric.device, precision=loop.precision)
        row = {
            "epoch": float(epoch),
            "loss": float(cast(Tensor, fabric.all_reduce(torch.stack(losses).mean()))),
            "validation_accuracy": fabric.broadcast(accuracy),  # running statistics differ between processes
            "learning_rate": float(loop.optimizer.param_groups[0]["lr"]),
            "seconds": time.perf_counter() - started,
        }
        if all(row["validation_accuracy"] >= earlier["validation_accuracy"] for earlier in history):
            best = copy.deepcopy(model.state_dict())
        history.append(row)
        if progress:
            progress(row)
    model.load_state_dict(best)
    return history


def _check_finite(losses: list[Tensor], epoch: int) -> None:
    """Raise when a loss isn't finite."""
    wrong = (~torch.stack(losses).isfinite()).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise NonFiniteError(
            f"training: the cross-entropy of epoch {epoch}, step {first + 1} is {losses[first].item()}; "
            "lower learning_rate, or check the images and the starting weights"
        )


def _steps_per_epoch(data: Domain, validation: Domain, config: TrainConfig, world: int) -> int:
    """Return the number of steps of an epoch after checking both domains."""
    for domain, use in ((data, "training"), (validation, "validation")):
        if not domain.labelled:
            raise InputError(f"domain {domain.name!r} has no labels; {use} needs them")
    if config.steps_per_epoch:
        return config.steps_per_epoch
    if data.size is None:
        raise InputError(f"domain {data.name!r} is a stream of unknown length; set train.steps_per_epoch")
    joint = config.batch_size * world
    if data.size < joint:
        raise InputError(
            f"domain {data.name!r} has {data.size} images, fewer than one batch of {joint}; lower batch_size"
        )
    return data.size // joint


def _optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build AdamW with weight decay on matrices and convolutions alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim > 1]
    plain = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate, fused=True)


def _default_fabric() -> "Fabric":
    """Return a single-process Fabric on a GPU (CUDA) if there is one, else on the processor."""
    from lightning_fabric import Fabric

    return Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1)
