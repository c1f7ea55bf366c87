"""The fresh generator: images that a classifier is sure of, from noise (Eq. 2)."""

from modelfence.synthesis.decoder import Decoder


class FreshGenerator(Decoder):
    """The generator G_f of MAP (CVPR 2024), trained with :mod:`modelfence.losses.generation`.

    Args:
        image: What the classifier eats.
        latent: Length of a code.
        width: Channels of the first map.

    Raises:
        InputError: ``latent`` or ``width`` is below 1.

    Example:
        >>> import torch
        >>> from modelfence.data.image_spec import ImageSpec
        >>> spec = ImageSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> fresh = FreshGenerator(spec, width=16).eval()
        >>> fresh.sample(2, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """
