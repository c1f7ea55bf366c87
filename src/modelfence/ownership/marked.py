"""A domain seen through a watermark: the same images, each with the mark."""

from collections.abc import Callable

from torch import Tensor

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError
from modelfence.ownership.watermark import Watermark

Mark = Callable[[Tensor], Tensor]


def marked(domain: Domain, watermark: Watermark, *, image: ImageSpec | None = None) -> Domain:
    """Return a view of a domain whose images carry the mark: same order, same labels, nothing copied.

    Images are marked at the size the model eats, because that is the size domains keep them at. NTL marks at native
    size, before images are resized; the two are the same where the images aren't resized.

    Pixels (uint8) are marked as they are, before they are normalized. Floating-point images, which are normalized
    already, are turned back into the nearest pixels, marked and normalized again, so they are rounded to 256 levels.

    The owner's mark is learned with the clean domain as authorized and the marked one as unauthorized (MAP, CVPR
    2024, Eq. 7 and Algorithm 3). With the two exchanged, the mark becomes a key that the model needs.

    Args:
        domain: Images in memory or on disk, or a stream of batches.
        watermark: The mark.
        image: What the model eats, for a domain of floating-point images that doesn't know it.

    Returns:
        The marked domain, of the same class; ``subset`` and ``split`` choose the images that they choose of ``domain``.

    Raises:
        InputError: The domain doesn't know the image spec and none was given, is of another kind, or has images that
            the mark doesn't fit.

    Example:
        >>> import torch
        >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.0,), std=(1 / 255,))
        >>> pixels = torch.tensor([[[[0, 250]]]], dtype=torch.uint8)
        >>> domain = IndexedDomain("two", pixels.__getitem__, 1, spec=spec)
        >>> next(marked(domain, Watermark("digits")).once(1)).images.flatten().round().tolist()
        [20.0, 255.0]
    """
    if not isinstance(domain, IndexedDomain | StreamDomain):
        raise InputError(
            f"{type(domain).__name__} {getattr(domain, 'name', '')!r} can't be marked; make a domain of a dataset, "
            "DataLoader, name or path with modelfence.data.sources.as_domain"
        )
    spec = domain.spec or image
    if spec is None:
        raise InputError(
            f"domain {domain.name!r} doesn't say how its images are normalized; give image=ImageSpec(...) so that "
            "pixels can be marked"
        )
    _check(domain.name, watermark, spec)
    return domain.mapped(_mark(watermark, spec), f"{domain.name}, marked")


def _check(name: str, watermark: Watermark, spec: ImageSpec) -> None:
    """Refuse a mark that doesn't fit the images, before any of them is fetched."""
    if watermark.channel >= spec.channels:
        raise InputError(
            f"domain {name!r}: the watermark is on channel {watermark.channel}, the images have {spec.channels}; "
            "channels count from 0"
        )
    watermark.cells(spec.height, spec.width)


def _mark(watermark: Watermark, spec: ImageSpec) -> Mark:
    def mark(images: Tensor) -> Tensor:
        if not images.is_floating_point():
            return watermark.apply(images)
        return spec.normalize(watermark.apply(spec.denormalize(images)))

    return mark
