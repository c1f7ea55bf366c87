"""A domain whose labels must not be looked at."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from modelfence.data.domain import Batch
from modelfence.data.image_spec import ImageSpec


class Untouchable:
    """Labels that must not be looked at in any way."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"labels were touched: {name}")


class Blind:
    """A domain whose images may be seen and whose labels may not."""

    name, classes, labelled = "blind", None, True

    def __init__(self, images: Tensor, spec: ImageSpec) -> None:
        self.images, self.spec, self.size = images, spec, len(images)

    @property
    def labels(self) -> Any:
        raise AssertionError("labels were touched")

    def once(self, batch_size: int, *, limit: int | None = None, device: Any = "cpu") -> Iterator[Batch]:
        for part in self.images[:limit].to(device).split(batch_size):
            yield Batch(part, Untouchable())  # type: ignore[arg-type]

    def batches(self, batch_size: int, **_: Any) -> Iterator[Batch]:
        raise AssertionError("images are taken into memory, so nothing else is read")
