"""A frozen classifier that tells how much generated images look like its source."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.losses.batch_norm import BatchNormDistance
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.unwrap import unwrap
from modelfence.models.outputs import logits_of

Autocast = Callable[[], AbstractContextManager[object]]

_BATCH = 250
_PIXELS = 4096 * 1000  # of the images looked at together, so that memory stays bounded: 1,000 images of 64 x 64


class Judgement(NamedTuple):
    """What a classifier says of images.

    Attributes:
        logits: Shape (N, K), float32.
        distance: How far the batch is from the running BatchNorm statistics (see :class:`BatchNormDistance`), a
            scalar; None for a network without them.
    """

    logits: Tensor
    distance: Tensor | None


class Judge:
    """A private frozen copy of a classifier, differentiable in the images alone.

    Args:
        model: The classifier; it isn't changed.
        image: What it eats.
        autocast: Returns the context that the forward pass runs in; None computes as the model is.
        device: Where to compute.

    Attributes:
        image: As given.
        autocast: As given.
        device: As given.
        batch_norm: Whether judgements have a distance.

    Example:
        >>> spec = ImageSpec(channels=1, height=2, width=2, mean=(0.5,), std=(0.5,))
        >>> judge = Judge(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), spec)
        >>> judge(torch.zeros(5, 1, 2, 2)).logits.shape, judge.batch_norm
        (torch.Size([5, 3]), False)
    """

    def __init__(
        self,
        model: nn.Module,
        image: ImageSpec,
        *,
        autocast: Autocast | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        with torch.inference_mode(False):
            own = copy.deepcopy(unwrap(model)).float().to(device)
            self._model = own.to(memory_format=torch.channels_last)
        self._model.requires_grad_(False).eval()
        self.image = image
        self.autocast: Autocast = autocast or nullcontext
        self.device = torch.device(device)
        self.batch_norm = has_batch_norm(self._model)

    def __call__(self, images: Tensor) -> Judgement:
        """Judge images (N, C, H, W), normalized as the classifier takes them."""
        images = images.contiguous(memory_format=torch.channels_last)
        with self.autocast():
            if not self.batch_norm:
                return Judgement(logits_of(self._model(images)).float(), None)
            with BatchNormDistance() as found:
                logits = logits_of(self._model(images)).float()
        return Judgement(logits, found.total())

    def at_once(self, most: int) -> int:
        """Return how many images to look at together: ``most``, but fewer where they are large.

        Example:
            >>> large = ImageSpec(channels=1, height=224, width=224, mean=(0.5,), std=(0.5,))
            >>> Judge(nn.Flatten(), large).at_once(1000)
            81
        """
        return max(1, min(most, _PIXELS // (self.image.height * self.image.width)))

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return the logits (N, K) of many images.

        Args:
            pixels: uint8 (N, C, H, W), on the CPU.
        """
        parts = [self(self.normalized(part)).logits.cpu() for part in torch.split(pixels, self.at_once(_BATCH))]
        return torch.cat(parts)

    @torch.no_grad()
    def distance(self, pixels: Tensor) -> float | None:
        """Return the BatchNorm distance of images (N, C, H, W), uint8, as a batch.

        At most 1,000 are looked at, spread evenly: images are often sorted by class, and a few classes are farther from
        the statistics than all.
        """
        if not self.batch_norm:
            return None
        count = min(len(pixels), self.at_once(1000))
        found = self(self.normalized(pixels[torch.arange(count) * len(pixels) // count])).distance
        return None if found is None else float(found)

    def distances(self, pixels: Tensor, group: int) -> Tensor | None:
        """Return the BatchNorm distance of every ``group`` images in a row, each as a batch: (N // group,), or None.

        Args:
            pixels: uint8 (N, C, H, W); what is beyond the last whole group is left out.
            group: Images in a group.
        """
        whole = torch.split(pixels[: len(pixels) // group * group], group)
        found = [self.distance(part) for part in whole]
        return torch.tensor(found) if self.batch_norm else None

    def normalized(self, pixels: Tensor) -> Tensor:
        """Move uint8 pixels (N, C, H, W) to the device and make them what the classifier eats."""
        return self.image.normalize(pixels.to(self.device))
