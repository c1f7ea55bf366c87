"""What a suspect model answers to the same images without and with the mark."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelfence.data.domain import check_labels, labels_of
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.data.splits import permutation
from modelfence.errors import InputError, NonFiniteError
from modelfence.evaluation.runner import device_of, in_float32, tried, untouched
from modelfence.masking.unwrap import require_network
from modelfence.models.outputs import logits_of
from modelfence.ownership.watermark import Watermark

NO_ANSWER = -1
Suspect = nn.Module | Callable[[Tensor], object]


@dataclass(frozen=True)
class Answers:
    """Predicted classes for pairs of images that differ in the mark alone.

    Args:
        labels: int64 (N,), the right classes.
        clean: int64 (N,), predicted without the mark; -1 where the model gave no finite answer.
        marked: int64 (N,), predicted with the mark; the same.
        matched: Whether the classes were translated by :func:`with_matched_labels`.

    Raises:
        InputError: The three differ in length, are empty, or aren't whole numbers; or a label is negative.
    """

    labels: Tensor
    clean: Tensor
    marked: Tensor
    matched: bool = False

    def __post_init__(self) -> None:
        sizes = [tuple(getattr(self, name).shape) for name in ("labels", "clean", "marked")]
        if len(set(sizes)) > 1 or len(sizes[0]) != 1 or sizes[0][0] == 0:
            raise InputError(f"answers: labels, clean and marked have shapes {sizes}; (images,) each is needed")
        check_labels(self.labels, "answers")
        for name in ("clean", "marked"):
            if getattr(self, name).is_floating_point():
                raise InputError(f"answers: {name} aren't whole numbers; give one predicted class per image")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> "Answers":
        """Return the answers to some of the images.

        Args:
            rows: int64 (M,), their numbers.
        """
        return Answers(self.labels[rows], self.clean[rows], self.marked[rows], self.matched)


@torch.no_grad()
def ask(
    suspect: Suspect,
    domain: object,
    watermark: Watermark,
    *,
    image: ImageSpec | None = None,
    images: int | None = None,
    batch_size: int = 100,
) -> Answers:
    """Show a suspect the images of a domain, each without and with the mark, and note the predicted classes.

    Images are marked as whole-number pixels at the domain's size, the size the mark was learned at. For a suspect that
    eats another size or number of channels they are then resized (PIL, bilinear) and converted, clean and marked ones
    alike, and normalized as the suspect needs it.

    Args:
        suspect: A module (its flags and buffers come back as they were; of one in half or double
            precision a copy in float32 is asked), or a function, such as a client of somebody's
            service. Takes float images (B, C, H, W) normalized by ``image``; gives logits or probabilities (B, K).
        domain: Labelled images: a domain, at the size the mark was learned at, or anything else that
            :func:`modelfence.data.sources.as_domain` takes. Of a name or a divided folder the test split is used.
        watermark: The mark.
        image: What the suspect eats; by default what the domain says. Images that aren't a domain yet are marked at
            this size.
        images: Ask about so many images, spread evenly over the domain; None asks about all.
        batch_size: Images at a time.

    Returns:
        The answers, in the domain's order.

    Raises:
        InputError: The suspect isn't a model, the domain can't be had or has no labels or images, nothing says how
            images are normalized, the mark doesn't fit the images, or the suspect can't take them.
        NonFiniteError: The suspect gives no finite output at all.
    """
    if isinstance(suspect, type) or not callable(suspect):
        require_network(suspect, "suspect")
    domain = as_domain(domain, image=image, split="test")
    spec = getattr(domain, "spec", None) or image
    if spec is None:
        raise InputError(
            f"domain {domain.name!r} doesn't say how its images are normalized; give image=ImageSpec(...) so that "
            "pixels can be marked"
        )
    eaten = image or spec
    device = torch.device("cpu")
    if isinstance(suspect, nn.Module):
        device = device_of(suspect)
        suspect = in_float32(suspect, device)
    labels: list[Tensor] = []
    clean: list[Tensor] = []
    marked: list[Tensor] = []
    with untouched(suspect) if isinstance(suspect, nn.Module) else contextlib.nullcontext():
        for batch in domain.once(batch_size, limit=images):
            labels.append(labels_of(batch, domain.name).cpu())
            pixels = spec.denormalize(batch.images.cpu())
            for found, shown in ((clean, pixels), (marked, watermark.apply(pixels))):
                found.append(_classes(suspect, fitted(shown, eaten).to(device), domain.name))
    if not labels:
        raise InputError(f"domain {domain.name!r} has no images; check its split or path")
    answers = Answers(torch.cat(labels), torch.cat(clean), torch.cat(marked))
    if bool((answers.clean == NO_ANSWER).all()):
        raise NonFiniteError(f"the suspect's output is NaN or infinite on every image of domain {domain.name!r}")
    return answers


def fitted(pixels: Tensor, spec: ImageSpec) -> Tensor:
    """Make pixels what a model eats: resized and converted where size or channels differ, then normalized.

    Args:
        pixels: uint8 (B, C, H, W) on the CPU.
        spec: What the model eats.

    Returns:
        float32 (B, C', H', W').

    Raises:
        InputError: The channels can't be converted.
    """
    from modelfence.data.images import to_pixels

    if tuple(pixels.shape[1:]) != spec.shape:
        made = [torch.tensor(to_pixels(one, spec, "a marked image")).permute(2, 0, 1) for one in pixels]
        pixels = torch.stack(made)
    return spec.normalize(pixels)


def halves(images: int) -> tuple[Tensor, Tensor]:
    """Divide images into two random halves, always the same ones: to match labels on, and to test on.

    Args:
        images: How many, at least 2.

    Returns:
        Numbers int64 of the first half and of the second, which has the odd one.

    Raises:
        InputError: There is one image only.
    """
    if images < 2:
        raise InputError("match_labels needs at least two images: one half to match on, the other to test")
    order = permutation(images, 0)
    return order[: images // 2], order[images // 2 :]


def with_matched_labels(answers: Answers) -> Answers:
    """Translate the classes of a suspect whose classes may be in another order.

    The translation is the one-to-one assignment that makes most clean images of one random half right (Hungarian
    algorithm). Only the other half is kept for the test, so that choosing the best translation can't make a claim look
    better than it is. A class of the suspect that is assigned to none of ours counts as wrong.

    Args:
        answers: At least two images.

    Returns:
        The other half, with classes translated.

    Raises:
        InputError: There is one image only.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # scipy has no types

    first, second = (answers.take(rows) for rows in halves(len(answers)))
    # classes may have any numbers
    theirs = torch.cat([answers.clean, answers.marked]).unique()  # type: ignore[no-untyped-call]  # torch's gap
    known = answers.labels.unique()  # type: ignore[no-untyped-call]  # torch's gap
    given = first.clean != NO_ANSWER
    counts = torch.zeros(len(known), len(theirs), dtype=torch.int64)
    which = torch.searchsorted(theirs, first.clean[given])
    right = torch.searchsorted(known, first.labels[given])
    counts.index_put_((right, which), torch.tensor(1), accumulate=True)
    rows, columns = (torch.from_numpy(side) for side in linear_sum_assignment(-counts.numpy()))
    seen = counts[rows, columns] > 0
    ours = torch.full((len(theirs),), NO_ANSWER)
    ours[columns[seen]] = known[rows[seen]]
    clean, marked = (ours[torch.searchsorted(theirs, some)] for some in (second.clean, second.marked))
    return Answers(second.labels, clean, marked, matched=True)


def _classes(suspect: Suspect, images: Tensor, name: str) -> Tensor:
    """Return predicted classes int64 (B,) on the CPU."""
    output = tried(lambda given: logits_of(suspect(given)), images, f"domain {name!r}: the suspect")
    if len(output) != len(images):
        raise InputError(f"domain {name!r}: the suspect gave {len(output)} answers to {len(images)} images")
    return torch.where(output.isfinite().all(dim=1), output.argmax(dim=1), NO_ANSWER).cpu()
