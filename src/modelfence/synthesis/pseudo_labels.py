"""What a classifier takes unlabelled images for: the labels that unlearning starts from (Eq. 4)."""

import torch
from torch import Tensor

from modelfence.synthesis.judge import Judge
from modelfence.synthesis.warp import warp

_PART = 250  # images warped at a time, fewer of large ones


def pseudo_labels(judge: Judge, pixels: Tensor, *, threshold: float, augmentations: int, seed: int) -> Tensor:
    """Return class probabilities for unlabelled images.

    An image that the classifier is at least ``threshold`` sure of gets its class; any other the mean prediction over
    augmented copies (small turns, zooms and shifts; MAP, CVPR 2024, leaves them open).

    Args:
        judge: The classifier.
        pixels: uint8 (N, C, H, W).
        threshold: The confidence Delta, in 0..1; 0 takes the class of every image.
        augmentations: Copies of each image that the classifier isn't sure of.
        seed: Of the augmentations.

    Returns:
        float32 (N, K), rows sum to 1, on the CPU.
    """
    probabilities = judge.logits(pixels).softmax(1)
    sure = probabilities.amax(1) >= threshold
    labels = torch.nn.functional.one_hot(probabilities.argmax(1), probabilities.shape[1]).float()
    if augmentations and not bool(sure.all()):
        generator = torch.Generator().manual_seed(seed)
        for rows in torch.split((~sure).nonzero().flatten(), judge.at_once(_PART)):
            doubtful = pixels[rows].float() / 255
            total = torch.zeros(len(rows), labels.shape[1])
            for _ in range(augmentations):
                copies = warp(doubtful, generator, turn=10, zoom=(0.9, 1.1), shift=0.06)
                total += judge.logits((copies * 255).round().to(torch.uint8)).softmax(1)
            labels[rows] = total / augmentations
    return labels
