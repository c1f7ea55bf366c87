"""Forward passes over domains: predictions of several networks in one pass, plain and refreshed."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelfence.data.domain import Domain
from modelfence.errors import InputError, NonFiniteError, first_line, is_shortage
from modelfence.evaluation import metrics
from modelfence.evaluation.batch_norm import copied, refreshed
from modelfence.evaluation.scores import ModelScore
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.models.autocast import Resolved, autocast
from modelfence.models.outputs import logits_of

_NO_ANSWER = -1


@dataclass(frozen=True)
class Runner:
    """How the forward passes are made.

    Attributes:
        batch_size: Images per forward pass.
        refresh_images: Unlabelled images per domain for the BatchNorm refresh.
        limit: Images evaluated per domain, None for all.
        precision: ``"fp32"``, or ``"bf16"`` for autocast.
        device: Where networks and images are.
    """

    batch_size: int
    refresh_images: int
    limit: int | None
    precision: Resolved
    device: torch.device

    def predict(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return predicted classes int64 (B,) on the CPU, -1 where an output isn't finite."""
        logits = self.forward(network, images)
        answers = torch.where(logits.isfinite().all(dim=1), logits.argmax(dim=1), _NO_ANSWER)
        return answers.cpu()

    def forward(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return logits (B, K)."""
        with autocast(self.device, self.precision):
            return logits_of(network(_fast_layout(images)))

    def measure(
        self, networks: list[nn.Module], domain: Domain, unlabelled: Domain, name: str, classes: int
    ) -> tuple[list[ModelScore], Tensor]:
        """Score every network, plain and refreshed, in one pass over a domain.

        Args:
            networks: In eval mode, on the device.
            domain: Labelled images.
            unlabelled: Where the images for the BatchNorm refresh come from; where that is the domain itself and it
                has one image, there is no refreshed accuracy.
            name: The domain's name, for errors.
            classes: Number of classes K.

        Returns:
            One score per network, and the labels int64 (N,).

        Raises:
            InputError: A label is missing or out of range, or there are too few images.
            NonFiniteError: A network gives no finite output at all.
        """
        twins = self._twins(networks, unlabelled, name, own=unlabelled is domain)
        runners = [*networks, *(twin for twin in twins if twin is not None)]
        answers: list[list[Tensor]] = [[] for _ in runners]
        seen: list[Tensor] = []
        for images, labels in domain.once(self.batch_size, limit=self.limit, device=self.device):
            seen.append(checked_labels(labels, classes, name))
            for runner, collected in zip(runners, answers, strict=True):
                collected.append(self.predict(runner, images))
        if not seen:
            raise InputError(f"domain {name!r} has no images; check its split or path")
        labels = torch.cat(seen)
        joined = [torch.cat(collected) for collected in answers]
        again = iter(joined[len(networks) :])
        scores = []
        for predictions, twin in zip(joined[: len(networks)], twins, strict=True):
            refresh = None if twin is None else metrics.accuracy(next(again), labels)
            scores.append(_model_score(predictions, labels, classes, refresh, name))
        return scores, labels

    def _twins(self, networks: list[nn.Module], unlabelled: Domain, name: str, *, own: bool) -> list[nn.Module | None]:
        """Return each network with statistics of the domain, None for one without BatchNorm."""
        if not any(has_batch_norm(network) for network in networks):
            return [None] * len(networks)
        batches = unlabelled.once(self.batch_size, limit=self.refresh_images, device=self.device)
        images = torch.cat([batch.images for batch in batches])
        if len(images) < 2 and own:
            return [None] * len(networks)
        if len(images) < 2:
            raise InputError(f"domain {name!r}: a BatchNorm refresh needs at least two images, not {len(images)}")
        # Files are often sorted by class: a batch of one class has no usable statistics.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        shuffled = _fast_layout(images[order.to(images.device)])
        with autocast(self.device, self.precision):
            return [refreshed(network, [shuffled]) if has_batch_norm(network) else None for network in networks]


def device_of(model: nn.Module) -> torch.device:
    """Return where a network is: where its first tensor is, or the CPU."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def in_float32(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a network on a device in float32: itself where it is so already, else a copy.

    Raises:
        InputError: It would have to be copied and can't be.
    """
    here = device_of(network)
    same = here.type == device.type and (device.index is None or here.index == device.index)
    if same and all(value.dtype == torch.float32 for value in network.parameters() if value.is_floating_point()):
        return network
    return copied(network).to(device).float()


def tried(forward: Callable[[Tensor], Tensor], images: Tensor, who: str) -> Tensor:
    """Return what a network gives for images; whatever its own code raises says who can't take them.

    Args:
        forward: The network, or what runs it.
        images: float (B, C, H, W).
        who: Start of the error's text.

    Raises:
        InputError: It can't take them. Having too little memory is another matter, and is raised as it is.
    """
    try:
        return forward(images)
    except InputError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise InputError(
            f"{who} can't take images of shape {tuple(images.shape[1:])} ({first_line(error)}); give "
            "image=ImageSpec(...) with what it eats"
        ) from error


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Put a network into eval mode and leave every flag and buffer as it was."""
    flags = {module: module.training for module in network.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    network.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training
        for buffer, kept in buffers:
            # nowhere else may such a buffer be written to; leaving inference mode switches gradients on
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(kept)


def checked_labels(labels: Tensor | None, classes: int, name: str) -> Tensor:
    """Return labels on the CPU if every one is a class of the model.

    Raises:
        InputError: There are none, or one is outside 0..classes-1; the text names the domain.
    """
    if labels is None:
        raise InputError(f"domain {name!r} has no labels; evaluation needs them")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(
            f"domain {name!r} has label {int(wrong[0])}, but the model knows 0..{classes - 1}; "
            "map the labels or leave these images out"
        )
    return labels.cpu()


def _model_score(
    predictions: Tensor, labels: Tensor, classes: int, refreshed_accuracy: float | None, name: str
) -> ModelScore:
    missing = int((predictions == _NO_ANSWER).sum())
    if missing == len(predictions):
        raise NonFiniteError(
            f"the model's output is NaN or infinite on every image of domain {name!r}; check its weights"
        )
    top, share = metrics.most_predicted_share(predictions, classes)
    return ModelScore(
        accuracy=metrics.accuracy(predictions, labels),
        balanced_accuracy=metrics.balanced_accuracy(predictions, labels, classes),
        most_predicted_class=top,
        most_predicted_share=share,
        non_finite=missing,
        refreshed_accuracy=refreshed_accuracy,
    )


def _fast_layout(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images
