"""The learned mask as a thing to keep: apply, combine, save, load."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from modelfence.errors import InputError, MaskMismatchError
from modelfence.masking.digest import digest_of, digest_of_tensors
from modelfence.masking.mask_file import load_mask, save_mask
from modelfence.masking.selection import aliases
from modelfence.masking.unwrap import unwrap


class LayerSparsity(NamedTuple):
    """How much of one parameter is kept."""

    name: str
    kept: int
    total: int


@dataclass(frozen=True, eq=False)
class Mask:
    """Which weights of one exact network are kept.

    Attributes:
        kept: Boolean tensor by parameter name, True where the weight is kept; shapes are those of the parameters.
        base_digest: Digest of the network the mask was learned for (see :func:`modelfence.masking.digest.digest_of`).
        folded_digest: Digest of that network once the mask is folded into it.
        aliases: Further names of shared parameters.
        metadata: How it was learned: method, configuration, seeds, versions (JSON values).

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> mask = Mask.of(model, {"weight": torch.tensor([[True, False]])})
        >>> mask.apply(model).weight[0, 1].item()
        0.0
        >>> mask.sparsity()
        [LayerSparsity(name='weight', kept=1, total=2)]
    """

    kept: Mapping[str, Tensor]
    base_digest: str
    folded_digest: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, kept: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> Self:
        """Bind boolean tensors to the network they were learned for.

        Args:
            model: That network, wrapped or not.
            kept: Boolean tensor by parameter name.
            metadata: JSON values that say how the mask was learned.

        Raises:
            MaskMismatchError: A name or a shape isn't the network's.
        """
        base = unwrap(model)
        _check_fit(base, kept)
        return cls(
            kept=dict(kept),
            base_digest=digest_of(base),
            folded_digest=_folded_digest(base, kept),
            aliases=aliases(base),
            metadata=dict(metadata or {}),
        )

    @classmethod
    def combine(cls, masks: Sequence["Mask"], model: nn.Module) -> "Mask":
        """Combine masks learned for several unauthorized domains: a weight is kept if every mask keeps it.

        Args:
            masks: At least one mask, all for the same network.
            model: That network.

        Raises:
            InputError: No mask was given.
            MaskMismatchError: A mask belongs to another network.
        """
        if not masks:
            raise InputError("no mask to combine: give at least one")
        digest = digest_of(unwrap(model))
        for mask in masks:
            if mask.base_digest != digest:
                raise MaskMismatchError(_another_base(mask.base_digest, digest))
        kept = {
            name: torch.stack([mask.kept[name] for mask in masks if name in mask.kept]).all(dim=0)
            for name in sorted({name for mask in masks for name in mask.kept})
        }
        return cls.of(model, kept, {"combined": [dict(mask.metadata) for mask in masks]})

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of the network with the cut weights set to +0.0: an ordinary module, same class and keys.

        Applying the mask to a network it was already folded into gives the same network again.

        Args:
            model: The network the mask was learned for, wrapped or not; it isn't changed.

        Raises:
            MaskMismatchError: The network isn't the one the mask was learned for.
        """
        base = unwrap(model)
        self._check(base)
        result = copy.deepcopy(base)
        self._fold(result)
        return result

    def apply_(self, model: nn.Module) -> nn.Module:
        """Set the cut weights of this very network to +0.0, in place: storage, strides and wrappers stay.

        Raises:
            MaskMismatchError: The network isn't the one the mask was learned for; nothing was changed.
        """
        self._check(unwrap(model))
        self._fold(unwrap(model))
        return model

    def is_in(self, model: nn.Module) -> bool:
        """Say whether a network carries this mask: is, bit for bit, its base with the mask applied.

        Args:
            model: Any network, such as one loaded from the checkpoint that is shipped; wrapped or not.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> mask = Mask.of(model, {"weight": torch.tensor([[True, False]])})
            >>> mask.is_in(mask.apply(model)), mask.is_in(model)
            (True, False)
        """
        return digest_of(unwrap(model)) == self.folded_digest

    def sparsity(self) -> list[LayerSparsity]:
        """Return kept and total weights by parameter, in order of name."""
        return [LayerSparsity(name, int(kept.sum()), kept.numel()) for name, kept in sorted(self.kept.items())]

    def cut_share(self) -> float:
        """Return the share of the masked weights that are cut, in 0..1."""
        layers = self.sparsity()
        total = sum(layer.total for layer in layers)
        return 1.0 - sum(layer.kept for layer in layers) / total if total else 0.0

    def with_metadata(self, **values: Any) -> "Mask":
        """Return the same mask with further metadata."""
        return replace(self, metadata={**self.metadata, **values})

    def save(self, folder: str | Path) -> Path:
        """Write ``mask.safetensors`` (one bit a weight) and ``mask.json``; see docs/artifact.md.

        Raises:
            InputError: The metadata isn't JSON.
            ArtifactError: The folder can't be written.
        """
        return save_mask(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a mask back.

        Raises:
            InputError: The folder's name can't be a path.
            ArtifactError: A file is missing, truncated, altered, or of a newer format.
        """
        return cls(**load_mask(Path(folder)))

    def _check(self, base: nn.Module) -> None:
        _check_fit(base, self.kept)
        digest = digest_of(base)
        if digest not in (self.base_digest, self.folded_digest):
            raise MaskMismatchError(_another_base(self.base_digest, digest))

    @torch.no_grad()
    def _fold(self, base: nn.Module) -> None:
        parameters = dict(base.named_parameters(remove_duplicate=False))
        for name, kept in self.kept.items():
            parameters[name].data.masked_fill_(~kept.to(parameters[name].device), 0)


def _check_fit(base: nn.Module, kept: Mapping[str, Tensor]) -> None:
    parameters = dict(base.named_parameters(remove_duplicate=False))
    missing = [name for name in kept if name not in parameters]
    if missing:
        raise MaskMismatchError(
            f"the mask is for another network: it has no parameter {missing[0]!r}"
            + (f" (nor {len(missing) - 1} more of the mask)" if missing[1:] else "")
        )
    for name, bits in kept.items():
        if parameters[name].shape != bits.shape:
            raise MaskMismatchError(
                f"the mask is for another network: {name!r} has shape {tuple(parameters[name].shape)}, "
                f"the mask {tuple(bits.shape)}"
            )


def _folded_digest(base: nn.Module, kept: Mapping[str, Tensor]) -> str:
    tensors = {name: value for name, value in base.state_dict().items() if isinstance(value, Tensor)}
    names = {**{name: name for name in kept}, **aliases(base)}
    for name, canonical in names.items():
        if canonical in kept:
            cut = ~kept[canonical].to(tensors[name].device)
            tensors[name] = tensors[name].masked_fill(cut, 0)
    return digest_of_tensors(tensors)


def _another_base(expected: str, found: str) -> str:
    return (
        f"the mask was learned for another network or another state of it: digest {expected[:12]}… expected, "
        f"{found[:12]}… found; load the exact base checkpoint"
    )
