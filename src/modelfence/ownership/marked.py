"""A domain seen through a mark: the same images, each with it; and the domains of a watermark and of a key."""

from collections.abc import Callable, Mapping

from torch import Tensor

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError
from modelfence.ownership.watermark import Watermark

Mark = Callable[[Tensor], Tensor]

WATERMARK, NO_KEY, KEYED = "watermark", "no_key", "+key"
"""Unauthorized domains made of the authorized one: with the owner's mark, without the key; and what is added to the
name of a domain with the key."""


def marked(domain: Domain, watermark: Watermark, *, image: ImageSpec | None = None) -> Domain:
    """Return a view of a domain whose images carry the mark: same order, same labels, nothing copied.

    Images are marked at the size the model eats, because that is the size domains keep them at. NTL marks at native
    size, before images are resized; the two are the same where the images aren't resized.

    Pixels (uint8) are marked as they are, before they are normalized. Floating-point images, which are normalized
    already, are turned back into the nearest pixels, marked and normalized again, so they are rounded to 256 levels.

    The owner's mark is learned with the clean domain as authorized and the marked one as unauthorized (MAP, CVPR
    2024, Eq. 7 and Algorithm 3): :func:`with_watermark`. With the two exchanged, the mark becomes a key that the model
    needs: :func:`with_key`.

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


def with_watermark(
    source: Domain, targets: Mapping[str, Domain], watermark: Watermark, *, image: ImageSpec | None = None
) -> dict[str, Domain]:
    """Return unauthorized domains with one more, "watermark": the authorized images with the owner's mark (Eq. 7).

    Args:
        source: The authorized domain.
        targets: Unauthorized domains by name.
        watermark: The mark.
        image: As for :func:`marked`.

    Raises:
        InputError: As :func:`marked`, or a domain has the name.
    """
    return {**_free(targets, WATERMARK), WATERMARK: marked(source, watermark, image=image)}


def with_key(
    source: Domain, targets: Mapping[str, Domain], key: Watermark, *, image: ImageSpec | None = None
) -> tuple[Domain, dict[str, Domain]]:
    """Return the domains for a model that works on authorized images with a key, and on nothing else that is given.

    NTL's second use (ICLR 2022), which there has augmented images in place of unauthorized domains.

    Args:
        source: The authorized domain, without the key.
        targets: Unauthorized domains by name, without it.
        key: The mark that is the key.
        image: As for :func:`marked`.

    Returns:
        The authorized domain with the key; unauthorized are the given ones, without it and as "<name>+key" with it,
        and "no_key", the authorized images without it.

    Raises:
        InputError: As :func:`marked`, or a domain has one of those names.

    Example:
        >>> import torch
        >>> spec = ImageSpec(channels=1, height=1, width=2, mean=(0.0,), std=(1 / 255,))
        >>> pixels = torch.tensor([[[[0, 250]]]], dtype=torch.uint8)
        >>> domain = IndexedDomain("two", pixels.__getitem__, 1, spec=spec)
        >>> with_key(domain, {"other": domain}, Watermark("digits"))[1].keys()
        dict_keys(['other', 'other+key', 'no_key'])
    """
    found: dict[str, Domain] = {}
    for name, domain in targets.items():
        found |= {name: domain, f"{name}{KEYED}": marked(domain, key, image=image)}
    if len(found) < 2 * len(targets):
        raise InputError(f"two unauthorized domains are named as one is with the key ('<name>{KEYED}'); rename one")
    return marked(source, key, image=image), {**_free(found, NO_KEY), NO_KEY: source}


def _free(targets: Mapping[str, Domain], name: str) -> Mapping[str, Domain]:
    if name in targets:
        raise InputError(f"an unauthorized domain is named {name!r}, which images of the authorized one get; rename it")
    return targets


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
