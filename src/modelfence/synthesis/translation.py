"""Translation of unauthorized images into the style of the source, learned from the network alone."""

import torch
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec


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
