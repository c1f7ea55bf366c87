"""Images that a classifier is sure of, generated from noise alone."""

import torch
from torch import Tensor

from modelfence.losses.generation import balance, confidence
from modelfence.synthesis.fitting import Announce, Terms, fit, in_parts
from modelfence.synthesis.fresh import FreshGenerator
from modelfence.synthesis.judge import Judge

_LATENT, _WIDTH = 100, 64
_BALANCE, _DISTANCE, _ROUGHNESS = 5.0, 10.0, 1.0


def generate(
    judge: Judge, count: int, *, steps: int, batch_size: int, seed: int, announce: Announce | None = None
) -> Tensor:
    """Fit a fresh generator to a classifier and draw images from it.

    The generator minimizes Eq. 2 of MAP (CVPR 2024) without its student term: the classifier shall be sure of every
    image and see all classes equally often. Where it has BatchNorm, the images shall also match its running
    statistics; where not, neighbouring pixels shall be alike, which is all that is known of images then.

    Args:
        judge: The classifier.
        count: How many images.
        steps: Of the fit.
        batch_size: Images a step; the classes are balanced within it.
        seed: Of weights and noise.
        announce: Told how the fit stands.

    Returns:
        uint8 (count, C, H, W), on the CPU.

    Raises:
        NonFiniteError: The fit broke.
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        fresh = FreshGenerator(judge.image, latent=_LATENT, width=_WIDTH).to(judge.device)

    def terms(_: int) -> Terms:
        with judge.autocast():
            images = fresh.sample(batch_size, noise)
        return objective(judge, images.float(), balance_weight=_BALANCE)

    fit(fresh, terms, steps=steps, learning_rate=2e-3, title="generated images", announce=announce)
    codes = fresh.codes(count, noise)
    return in_parts(lambda first, last: fresh(codes[first:last]).float(), count, judge)


def objective(judge: Judge, images: Tensor, *, balance_weight: float) -> Terms:
    """Return what makes images look like the source to a classifier.

    Args:
        judge: The classifier.
        images: (N, C, H, W), normalized.
        balance_weight: Weight of the balance of classes.
    """
    judged = judge(images)
    terms = {"unsure": confidence(judged.logits), "unbalanced": balance_weight * balance(judged.logits)}
    if judged.distance is not None:
        terms["distance"] = _DISTANCE * judged.distance
    else:
        terms["rough"] = _ROUGHNESS * roughness(images)
    return terms


def roughness(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, a scalar: anisotropic total variation.

    Args:
        images: (N, C, H, W), at least 2 x 2.

    Example:
        >>> roughness(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).item()
        0.5
    """
    down, right = images.diff(dim=2).abs().mean(), images.diff(dim=3).abs().mean()
    return (down + right) / 2
