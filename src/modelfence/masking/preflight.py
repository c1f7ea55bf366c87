"""Everything about a network that matters before a mask is learned on it, all at once."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, disable_saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from modelfence.errors import InputError, first_line
from modelfence.masking.masked_model import CHECKPOINTING_FLAGS, switch_off_checkpointing
from modelfence.masking.selection import is_weight, maskable
from modelfence.masking.unwrap import unwrap
from modelfence.models.outputs import logits_of

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing found in a network.

    Attributes:
        severity: "error": it can't be masked; "warning": it can, with a caveat; "note": for information.
        path: Module or parameter it is about; empty for the whole network.
        reason: What was found.
        remedy: What to do about it.
    """

    severity: Severity
    path: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.severity}: {where}{self.reason}; {self.remedy}"


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""


def preflight(model: nn.Module, *, image: _Shaped | None = None, sample: Tensor | None = None) -> list[Finding]:
    """List what speaks against masking a network, and what will not be masked.

    Args:
        model: The network, wrapped or not; it isn't changed.
        image: What the network eats (:class:`modelfence.ImageSpec`); with it the forward pass is tried too, on
            blank images.
        sample: A batch of images (N, C, H, W) as the network takes them, to try it on in place of blank ones.

    Returns:
        Findings, errors first. No error means that :func:`modelfence.protect` can work on it.

    Raises:
        InputError: It isn't a network.

    Example:
        >>> print(preflight(nn.LazyLinear(2))[0])
        error: weight: is lazy: its shape isn't known; run one batch through the model first
        >>> preflight(nn.Linear(2, 2, bias=False))
        []
    """
    base = unwrap(model)
    found = list(_refused(base))
    if not found:
        found = [finding for rule in _RULES for finding in rule(base)]
        if sample is None and image is not None:
            sample = torch.zeros(2, *image.shape)
        if sample is not None and not any(finding.severity == "error" for finding in found):
            found += _forward(base, sample)
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def require_maskable(model: nn.Module, *, masked: bool = True) -> list[Finding]:
    """Run :func:`preflight` and refuse a network with errors.

    Args:
        model: The network.
        masked: Whether it shall be masked; retraining all of it minds no hooks that compute a weight.

    Returns:
        The findings that aren't errors.

    Raises:
        InputError: One line with the first error and how many there are.
    """
    findings = preflight(model)
    unminded = [] if masked else list(_computed_by_hooks(unwrap(model)))
    errors = [one for one in findings if one.severity == "error" and one not in unminded]
    if errors:
        more = f" (and {len(errors) - 1} more errors: run modelfence doctor)" if errors[1:] else ""
        raise InputError(f"the model can't be masked: {str(errors[0]).removeprefix('error: ')}{more}")
    return findings


@torch.no_grad()
def classes_of(model: nn.Module, images: Tensor) -> int:
    """Try a network on some images and return its number of classes, K.

    Args:
        model: The network; it isn't changed.
        images: Shape (N, C, H, W), as the network takes them, on any device.

    Raises:
        InputError: It doesn't take the images, or doesn't return logits.
    """
    for finding in _forward(unwrap(model), images):
        if finding.severity == "error":
            raise InputError(f"{finding.reason}; {finding.remedy}")
    probe, sample = _probe(unwrap(model), images)
    return int(logits_of(probe(sample)).shape[1])


def _probe(base: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a copy in eval mode, and the images where it is and in its dtype."""
    first = next(base.parameters())
    return copy.deepcopy(base).eval(), images.to(first.device, first.dtype if images.is_floating_point() else None)


def _refused(base: nn.Module) -> Iterator[Finding]:
    for path, module in base.named_modules():
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            yield Finding("error", path, "is TorchScript", "give the Python module it was made from")
            return
        if ".quantized" in kind.__module__:
            yield Finding(
                "error",
                path,
                f"is quantized ({kind.__name__}) and has no float weights",
                "mask the float model, then quantize the result",
            )
        if "FullyShardedDataParallel" in kind.__name__:
            yield Finding("error", path, "is sharded (FSDP)", "give the network before it is wrapped")
    for name, parameter in base.named_parameters():
        if is_lazy(parameter):
            yield Finding("error", name, "is lazy: its shape isn't known", "run one batch through the model first")
        elif parameter.is_meta:
            yield Finding("error", name, "is on the meta device: it has no values", "load the weights first")


def _copies(base: nn.Module) -> Iterator[Finding]:
    try:
        copy.deepcopy(base)
    except Exception as error:
        yield Finding(
            "error",
            "",
            f"can't be copied ({first_line(error)})",
            "give a network of parameters and buffers alone",
        )


_COMPUTED: tuple[tuple[type, str, str, str], ...] = (
    (BasePruningMethod, "_tensor_name", "is pruned", "prune.remove"),
    (SpectralNorm, "name", "has a spectral norm", "remove_spectral_norm"),
    (WeightNorm, "name", "has a weight norm", "remove_weight_norm"),
)
"""The hooks of torch.nn.utils that compute a parameter: where they name it, what it is then, and what undoes it."""


def _computed_by_hooks(base: nn.Module) -> Iterator[Finding]:
    for path, module in base.named_modules():
        for hook in module._forward_pre_hooks.values():
            for kind, naming, what, undo in _COMPUTED:
                name = getattr(hook, naming, "") if isinstance(hook, kind) else ""
                if is_weight(module, name):
                    where, remedy = f"{path}.{name}" if path else name, f"call torch.nn.utils.{undo} first"
                    yield Finding("error", where, f"{what} and would not be masked", remedy)


def _finite(base: nn.Module) -> Iterator[Finding]:
    for name, value in base.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            count = int((~value.isfinite()).sum())
            yield Finding("error", name, f"has {count} values that are NaN or infinite", "load a sound checkpoint")


def _has_weights(base: nn.Module) -> Iterator[Finding]:
    if not maskable(base):
        yield Finding("error", "", "has no convolution, linear or attention weight", "there is nothing to mask")


def _not_masked(base: nn.Module) -> Iterator[Finding]:
    masked = {id(parameter) for parameter in maskable(base).values()}
    for name, parameter in base.named_parameters():
        if id(parameter) in masked or parameter.ndim < 2 or "parametrizations" in name.split("."):
            continue
        remedy = "only weights of convolution, linear, attention and recurrent layers are"
        yield Finding("note", name, f"is not masked ({parameter.numel()} values)", remedy)


def _parametrized(base: nn.Module) -> Iterator[Finding]:
    for path, module in base.named_modules():
        for name in module.parametrizations if is_parametrized(module) else ():
            if is_weight(module, name):
                remedy = "remove the parametrization first if it shall be masked"
                yield Finding("warning", f"{path}.{name}" if path else name, "is parametrized and not masked", remedy)


def _checkpointing(base: nn.Module) -> Iterator[Finding]:
    for path, module in base.named_modules():
        if any(getattr(module, flag, None) is True for flag in CHECKPOINTING_FLAGS):
            yield Finding(
                "note",
                path,
                "uses activation checkpointing",
                "it is switched off in the working copy, which needs more memory for a step",
            )


def _forward(base: nn.Module, sample: Tensor) -> Iterator[Finding]:
    with torch.inference_mode(False):
        probe, sample = _probe(base, sample)
    switch_off_checkpointing(probe)
    for parameter in probe.parameters():  # as the masked weights that take their place
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        logits = _with_gradients(probe, sample)
    except InputError as error:
        yield Finding("error", "", str(error), "see the model's forward")
        return
    except Exception as error:
        if _RECOMPUTES in str(error):
            yield Finding(
                "error",
                "",
                f"{_RECOMPUTES} in the backward pass (torch.utils.checkpoint), where the mask no longer applies",
                "switch activation checkpointing off in the model",
            )
            return
        yield Finding(
            "error",
            "",
            f"fails on images of shape {tuple(sample.shape)} ({first_line(error)})",
            "check channels, size and device of the images against what the model takes",
        )
        return
    if not logits.requires_grad:
        remedy = "take torch.no_grad, torch.inference_mode and detach out of its forward"
        yield Finding("error", "", "computes its logits without gradients", remedy)
    if logits.shape[0] != sample.shape[0]:
        yield Finding("error", "", f"gives {logits.shape[0]} rows for {sample.shape[0]} images", "one row an image")
    if not bool(logits.isfinite().all()):
        yield Finding("error", "", "gives logits that are NaN or infinite", "check weights and normalization")
    elif are_probabilities(logits):
        yield Finding("warning", "", f"gives {PROBABILITIES}", "return what softmax is applied to")


PROBABILITIES = "probabilities, not logits, from which a mask learns little"


def are_probabilities(logits: Tensor) -> bool:
    """Say whether logits (N, K) look like probabilities: none below 0, and each row's sum is 1.

    Example:
        >>> are_probabilities(torch.tensor([[0.2, 0.8]])), are_probabilities(torch.tensor([[-1.0, 2.0]]))
        (True, False)
    """
    sums = logits.detach().float().sum(dim=1)
    return bool((logits >= 0).all()) and bool(((sums - 1).abs() < 0.01).all())


_RECOMPUTES = "recomputes activations"


def _with_gradients(probe: nn.Module, sample: Tensor) -> Tensor:
    """Return the logits of a pass that keeps what a backward pass needs, as each learning step does.

    Activation checkpointing that no flag switches off gives wrong gradients of the scores without any error, so it
    is made to show: its new form saves tensors through hooks, its old form leaves a node in the graph.
    """
    with torch.inference_mode(False), torch.enable_grad(), disable_saved_tensors_hooks(_RECOMPUTES):
        logits = logits_of(probe(sample.clone().requires_grad_(sample.is_floating_point())))
    pending: list[Node | None] = [logits.grad_fn]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            raise RuntimeError(_RECOMPUTES)
        seen.add(node)
        pending += [parent for parent, _ in node.next_functions]
    return logits


_RULES: tuple[Callable[[nn.Module], Iterator[Finding]], ...] = (
    _computed_by_hooks,
    _copies,
    _finite,
    _has_weights,
    _not_masked,
    _parametrized,
    _checkpointing,
)
