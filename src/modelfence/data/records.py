"""Images that can be read by number, and the step from them to a domain."""

from dataclasses import dataclass

from torch import Tensor

from modelfence.data.domain import IndexedDomain, check_labels
from modelfence.data.image_spec import ImageSpec
from modelfence.data.images import ImageSource, fits, from_memory, on_demand
from modelfence.data.splits import sample
from modelfence.errors import InputError

_AHEAD = 2


@dataclass(frozen=True)
class Records:
    """Images that can be read by number, with their labels.

    Attributes:
        source: Reads the images.
        size: How many there are.
        labels: int64 (size,), or None.
        classes: Class names in label order, or None.
    """

    source: ImageSource
    size: int
    labels: Tensor | None = None
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Request:
    """What a domain is asked for; the fields are the arguments of :func:`modelfence.data.sources.as_domain`.

    Attributes:
        labelled: Whether labels are wanted; else they are neither looked at nor needed, and a folder may hold images
            without class folders.
    """

    name: str
    image: ImageSpec | None = None
    split: str = "train"
    size: int | None = None
    classes: int | None = None
    memory_limit_gib: float = 4.0
    image_column: str | None = None
    label_column: str | None = None
    labelled: bool = True

    def spec(self) -> ImageSpec:
        """Return the image spec, which pixels can't do without.

        Returns:
            The spec.

        Raises:
            InputError: None was given.
        """
        if self.image is None:
            raise InputError(
                f"domain {self.name!r} has pixels; give image=ImageSpec(...) so that they can be resized and "
                "normalized as the model was trained"
            )
        return self.image


def domain_of(records: Records, request: Request) -> IndexedDomain:
    """Make a domain of records: in memory if the decoded images fit, else decoded on demand.

    Args:
        records: The images.
        request: What is asked for.

    Returns:
        The domain, at most ``request.size`` images of it.

    Raises:
        InputError: There are no images, an image that is decoded now can't be, or labels don't fit.
    """
    if records.size == 0:
        raise InputError(
            f"domain {request.name!r}: split {request.split!r} has no images; check the path and the split"
        )
    spec = request.spec()
    chosen = sample(records.size, request.size or records.size)
    rows = chosen.tolist()
    labels = None if records.labels is None else records.labels[chosen]
    if labels is not None:  # before the images are decoded, which may take long
        count = request.classes or (len(records.classes) if records.classes else None)
        check_labels(labels, request.name, count=count)
    keep = fits(len(rows), spec, request.memory_limit_gib)
    return IndexedDomain(
        request.name,
        (from_memory if keep else on_demand)(records.source, rows, spec),
        len(rows),
        classes=records.classes,
        spec=spec,
        labels=labels,
        ahead=0 if keep else _AHEAD,
    )
