"""What NTL and CUTI are given in the source-free table: the pseudo-source and pseudo-labels of SF-MAP."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.methods.loop import Session
from modelfence.methods.sfmap import SFMap, assumed_labels
from modelfence.methods.synthetic import judge_of, pixels_of, pseudo_source
from modelfence.protect import default_fabric


class StandIns(NamedTuple):
    """Labelled domains for methods that need them where nothing is labelled and there is no source."""

    authorized: IndexedDomain
    unauthorized: dict[str, Domain]


def stand_ins(
    model: nn.Module,
    unauthorized: dict[str, Domain],
    image: ImageSpec,
    config: SFMap,
    *,
    cache: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> StandIns:
    """Make the domains that a method with labels is trained on in the source-free setting.

    The images are those that :class:`~modelfence.methods.sfmap.SFMap` learns from with the same configuration, found in
    the same cache: "we train NTL, CUTI, and SF-MAP with the same samples" (MAP, CVPR 2024, section 4.3). Their labels
    are what the source model takes them for.

    Args:
        model: The source model.
        unauthorized: Unauthorized domains by name; their labels aren't looked at.
        image: What the model eats.
        config: How the images are made, and the seed.
        cache: Where they are kept.
        announce: Told how it goes, and where the images look collapsed.

    Raises:
        InputError: No images would be made.
        NonFiniteError: A generator's loss became NaN or infinite.
    """
    fabric = default_fabric(config.precision)
    session = Session(fabric=fabric, unauthorized=unauthorized, image=image, cache=cache, announce=announce)
    pixels = {name: pixels_of(domain, image, config.most_images) for name, domain in unauthorized.items()}
    judge = judge_of(model, image, session)
    every = torch.cat(list(pixels.values()))
    pool = pseudo_source(model, config, session, judge, every, restyled=config.for_network(model).restyled)
    images = torch.cat(list(pool.parts.values()))
    answers = torch.cat([pool.logits[name] for name in pool.parts]).argmax(1)
    targets: dict[str, Domain] = {
        name: domain_of(name, some, assumed_labels(judge, some, config).argmax(1), image)
        for name, some in pixels.items()
    }
    return StandIns(domain_of("pseudo-source", images, answers, image), targets)


def domain_of(name: str, pixels: Tensor, labels: Tensor, image: ImageSpec) -> IndexedDomain:
    """Return a domain of images in memory.

    Args:
        name: What tables and errors call it.
        pixels: uint8 (N, C, H, W).
        labels: int64 (N,).
        image: What the model eats.

    Example:
        >>> spec = ImageSpec(channels=1, height=1, width=1, mean=(0.0,), std=(1 / 255,))
        >>> domain_of("dark", torch.zeros(3, 1, 1, 1, dtype=torch.uint8), torch.arange(3), spec).size
        3
    """
    return IndexedDomain(name, pixels.__getitem__, len(pixels), spec=image, labels=labels)
