"""A frozen network whose selected weights pass through a learned binary mask."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from modelfence.masking.batch_mode import BatchStatistics
from modelfence.masking.selection import maskable, places
from modelfence.masking.straight_through import masked_weight
from modelfence.masking.unwrap import unwrap
from modelfence.models.outputs import logits_of

CHECKPOINTING_FLAGS = ("grad_checkpointing", "gradient_checkpointing", "memory_efficient")
"""Attributes by which timm, Hugging Face and torchvision modules turn activation checkpointing on."""


class MaskedModel(nn.Module):
    """A private frozen copy of a network (the teacher) and one real score per selected weight (the student).

    Teacher and student share the weights: ``masked.base(x)`` is the network as it was, ``masked(x)`` runs it with
    ``W where s > threshold, else 0`` through :func:`torch.func.functional_call` (docs/decisions/0001). The copy
    is always in eval mode. Not safe to call from several threads at once.

    Args:
        model: The trained network, wrapped or not; it is copied and never changed.
        score_init: Value of every score at the start.
        threshold: A weight is kept where its score is above it; below ``score_init``.
        dtype: Keep the selected weights in this dtype (bfloat16 under autocast saves the cast of each step);
            None keeps theirs.
        channels_last: Lay out convolution weights channels last, which is faster on most processors.

    Attributes:
        base: The frozen network in eval mode.
        names: Name of each masked parameter.
        scores: One parameter a masked weight, in the order of ``names``, float32.

    Example:
        >>> masked = MaskedModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        >>> masked(torch.zeros(3, 1, 2, 2)).shape
        torch.Size([3, 2])
        >>> masked.names
        ('1.weight',)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        score_init: float = 1e-2,
        threshold: float = 5e-3,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.base = _working_copy(unwrap(model), dtype, channels_last)
        self.input_dtype = torch.float32 if dtype is not None else _float_dtype(self.base)
        self.threshold = threshold
        self.world = 1
        selected = maskable(self.base)
        self.names = tuple(selected)
        self._places = places(self.base)
        self.scores = nn.ParameterList(
            nn.Parameter(torch.full_like(weight, score_init, dtype=torch.float32)) for weight in selected.values()
        )

    def forward(self, images: Tensor, batch_mode: Sequence[Tensor] | None = None) -> Tensor | list[Tensor]:
        """Run the student.

        Args:
            images: Shape (N, C, H, W); normalized by the running statistics, as the shipped model does.
            batch_mode: Groups of images, each run with the statistics of its own group (see
                :class:`BatchStatistics`).

        Returns:
            Logits (N, K); with ``batch_mode`` a list: the logits of ``images``, then of each group. The masked
            weights are computed once for all.
        """
        weights = self.weights()
        logits = self._run(weights, images)
        if self.world > 1:
            logits = self._with_all_scores(logits)
        if batch_mode is None:
            return logits
        with BatchStatistics(self.world):
            return [logits, *(self._run(weights, group) for group in batch_mode)]

    def _run(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        # the places are complete; if torch looked for ties, it would leave a module registered twice masked for good
        return logits_of(functional_call(self.base, weights, (self._cast(images),), tie_weights=False))

    def _with_all_scores(self, logits: Tensor) -> Tensor:
        """Give scores that the logits don't depend on a gradient of 0: DDP waits for one of every parameter."""
        nothing = 0 * torch.stack([score.flatten()[:1].sum() for score in self.scores]).sum()
        return logits + nothing.to(logits.dtype)

    def _cast(self, images: Tensor) -> Tensor:
        """A float network in half precision takes images in half precision."""
        return images.to(self.input_dtype) if images.is_floating_point() else images

    @torch.no_grad()
    def teacher(self, images: Tensor) -> Tensor:
        """Return the logits (N, K) of the frozen network on images (N, C, H, W)."""
        return logits_of(self.base(self._cast(images)))

    def weights(self) -> dict[str, Tensor]:
        """Return the masked weight for every place that holds one, differentiable in the scores."""
        frozen = maskable(self.base)
        masked = {
            name: masked_weight(score, frozen[name], self.threshold)
            for name, score in zip(self.names, self.scores, strict=True)
        }
        return {place: masked[name] for place, name in self._places.items()}

    @torch.no_grad()
    def kept(self) -> dict[str, Tensor]:
        """Return True where a weight is kept, by parameter name, on the CPU in row-major order."""
        return {
            name: (score > self.threshold).cpu().contiguous()
            for name, score in zip(self.names, self.scores, strict=True)
        }

    @torch.no_grad()
    def kept_share(self) -> float:
        """Return the share of masked weights that are kept, in 0..1."""
        bits = self.kept().values()
        return sum(int(bit.sum()) for bit in bits) / max(sum(bit.numel() for bit in bits), 1)

    def train(self, mode: bool = True) -> Self:
        """Set the training flag of the wrapper alone: the base stays in eval mode."""
        self.training = mode
        return self


def _working_copy(model: nn.Module, dtype: torch.dtype | None, channels_last: bool) -> nn.Module:
    with torch.inference_mode(False):
        base = copy.deepcopy(model)
    base.requires_grad_(False).eval()
    switch_off_checkpointing(base)
    if dtype is not None:
        base.float()  # autocast mixes float32 with its own dtype, but neither float16 nor float64
    for value in base.parameters():
        if channels_last and value.ndim == 4:
            value.data = value.data.contiguous(memory_format=torch.channels_last)
    if dtype is not None:
        for parameter in maskable(base).values():
            parameter.data = parameter.data.to(dtype)
    return base


def _float_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter: that of the images the network takes."""
    return next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)


def switch_off_checkpointing(model: nn.Module) -> None:
    """Switch off activation checkpointing where a well-known flag does it, in place.

    The backward pass would recompute activations after the call, with the unmasked weights.
    """
    for module in model.modules():
        for flag in CHECKPOINTING_FLAGS:
            if getattr(module, flag, None) is True:
                setattr(module, flag, False)
