"""Translation of unauthorized images into the style of the source, learned from the network alone."""

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.fitting import Announce, Terms, fit, in_parts
from modelfence.synthesis.generation import objective
from modelfence.synthesis.judge import Judge

_BALANCE, _FADED = 2.0, 10.0
_SHARE = 0.8  # of its contrast among the others that an image must keep


class Translator(nn.Module):
    """A small residual network from images to images; at first it changes nothing.

    It works on the logit of the pixels, so that its output always is an image, and sees every image at two
    resolutions, so that it can change strokes as well as backgrounds.

    Args:
        image: What the classifier eats.
        width: Channels of the hidden layers.

    Example:
        >>> spec = ImageSpec(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
        >>> images = torch.rand(2, 1, 8, 8) * 1.8 - 0.9
        >>> bool(torch.allclose(Translator(spec)(images), images, atol=1e-5))
        True
    """

    def __init__(self, image: ImageSpec, width: int = 32) -> None:
        super().__init__()
        self.image = image
        self.fine = nn.Sequential(_block(image.channels, width), _block(width, width))
        self.coarse = nn.Sequential(nn.AvgPool2d(2), _block(width, 2 * width), _block(2 * width, width))
        self.last = nn.Sequential(
            _block(2 * width, width), nn.Conv2d(width, image.channels, 3, padding=1, padding_mode="reflect")
        )
        for parameter in self.last[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        """Translate images (N, C, H, W), normalized as the classifier takes them; the result is too."""
        fine = self.fine(images)
        coarse = nn.functional.interpolate(self.coarse(fine), size=fine.shape[-2:], mode="nearest")
        change = self.last(torch.cat([fine, coarse], dim=1))
        start = torch.logit(self.image.to_unit(images).float(), eps=0.02)
        return self.image.from_unit(torch.sigmoid(start + 4 * change.float()))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(8, outputs), nn.SiLU()
    )


def translate(
    judge: Judge,
    pixels: Tensor,
    count: int,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    announce: Announce | None = None,
) -> Tensor:
    """Fit a translator to a classifier with BatchNorm and translate images with it: their content, the source's style.

    Classifiers fall back to one class on images of nothing; without a term against it, the content of that class fades
    away, and a mask learned on such images forgets the class.

    Args:
        judge: The classifier; without BatchNorm there is nothing that tells the source's style.
        pixels: Unlabelled images, uint8 (M, C, H, W).
        count: How many to translate; the first ones, again from the start where there are fewer.
        steps: Of the fit.
        batch_size: Images a step.
        seed: Of weights and order.
        announce: Told how the fit stands.

    Returns:
        uint8 (count, C, H, W), on the CPU.

    Raises:
        NonFiniteError: The fit broke.
    """
    order = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        translator = Translator(judge.image).to(judge.device)

    def terms(_: int) -> Terms:
        chosen = torch.randint(len(pixels), (batch_size,), generator=order)
        originals = judge.normalized(pixels[chosen])
        with judge.autocast():
            images = translator(originals).float()
        found = objective(judge, images, balance_weight=_BALANCE)
        return {**found, "faded": _FADED * faded(originals, images)}

    fit(translator, terms, steps=steps, learning_rate=2e-3, title="translated images", announce=announce)
    rows = torch.arange(count) % len(pixels)

    def make(first: int, last: int) -> Tensor:
        images: Tensor = translator(judge.normalized(pixels[rows[first:last]]))
        return images.float()

    return in_parts(make, count, judge)


def faded(originals: Tensor, images: Tensor) -> Tensor:
    """Return how much of their contrast images lost in a translation, beyond what all of them lost: 0 to 1, a scalar.

    The contrast of an image is the standard deviation of its values. An image is expected to keep its contrast in
    proportion to that of the others of the batch; what is missing to 80 % of that counts, as a share of it.

    Args:
        originals: (N, C, H, W).
        images: Their translations, same shape; differentiable in them.

    Example:
        >>> before = torch.tensor([0.0, 1.0]).expand(2, 1, 1, 2)
        >>> after = torch.stack([before[0], 0 * before[1]])
        >>> faded(before, before).item(), faded(before, after).item()
        (0.0, 0.5)
    """
    before, after = originals.flatten(1).std(1), images.flatten(1).std(1)
    expected = _SHARE * before / before.mean().clamp_min(1e-6) * after.detach().mean()
    return (1 - after / expected.clamp_min(1e-6)).clamp_min(0).mean()
