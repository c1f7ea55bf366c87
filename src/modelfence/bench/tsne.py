"""Features of test images in two dimensions, for the panels of the paper's t-SNE figure."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelfence.data.domain import Domain
from modelfence.errors import InputError
from modelfence.methods.features import features_of

SHOWN = 300
"""Images of each domain in a panel."""
_SAME = 1e-6
"""Difference between features, relative to the largest, that is taken for rounding."""


@torch.no_grad()
def points_of(model: nn.Module, domains: Mapping[str, Domain], *, seed: int, images: int = SHOWN) -> dict[str, Any]:
    """Embed what a classifier decides by; where that is the same for all images, they are scattered at random.

    Args:
        model: In eval mode; where it is, the images go.
        domains: Labelled, by name.
        seed: Of the embedding.
        images: Of each domain, at most; spread evenly over it.

    Returns:
        By domain: "x", "y" (in no unit) and "labels", lists of one length.

    Raises:
        InputError: What it decides by isn't finite.
    """
    from sklearn.manifold import TSNE

    model.eval()
    device = next(model.parameters()).device
    features, labels, names = [], [], []
    for name, domain in domains.items():
        for batch in domain.once(100, limit=images, device=device):
            features.append(features_of(model, batch.images)[1].cpu())
            known = batch.labels if batch.labels is not None else torch.full((len(batch.images),), -1)
            labels += known.tolist()
            names += [name] * len(batch.images)
    table = torch.cat(features).float()
    if not bool(table.isfinite().all()):
        raise InputError("the network's features aren't finite, so they can't be embedded")
    if float((table - table[0]).abs().max()) <= _SAME * float(table.abs().max()):
        # the embedding would divide by their spread, and end the process
        flat = torch.randn(len(table), 2, generator=torch.Generator().manual_seed(seed)).numpy()
    else:
        perplexity = min(30.0, (len(table) - 1) / 3)
        flat = TSNE(2, perplexity=perplexity, init="pca", random_state=seed % 2**32).fit_transform(table.numpy())
    found: dict[str, Any] = {}
    for name in domains:
        rows = [row for row, owner in enumerate(names) if owner == name]
        found[name] = {
            "x": [round(float(flat[row, 0]), 3) for row in rows],
            "y": [round(float(flat[row, 1]), 3) for row in rows],
            "labels": [labels[row] for row in rows],
        }
    return found
