"""Translation of unauthorized images into the style of the source, learned from the network alone."""

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.synthesis.fitting import Announce, Terms, fit, in_parts
from modelfence.synthesis.generation import objective
from modelfence.synthesis.judge import Judge

_BALANCE = 2.0


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
        with judge.autocast():
            images = translator(judge.normalized(pixels[chosen]))
        return objective(judge, images.float(), balance_weight=_BALANCE)

    fit(translator, terms, steps=steps, learning_rate=2e-3, title="translated images", announce=announce)
    rows = torch.arange(count) % len(pixels)

    def make(first: int, last: int) -> Tensor:
        images: Tensor = translator(judge.normalized(pixels[rows[first:last]]))
        return images.float()

    return judge.image.denormalize(in_parts(make, count, judge.autocast))
