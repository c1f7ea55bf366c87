"""The test of a claim: does this model lose what it knows when it sees the mark?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.errors import InputError
from modelfence.masking.unwrap import require_network
from modelfence.ownership.answers import Answers, Suspect, ask, halves, with_matched_labels
from modelfence.ownership.exact import at_least, gap_interval, sign_test
from modelfence.ownership.watermark import TOLERANCES, Watermark

CONFIDENCE = 0.95
NEAR_CHANCE = 0.05
"""A reference whose accuracy on clean images is above chance by no more than this can't show anything."""


@dataclass(frozen=True)
class Verdict:
    """What a test of a claim found.

    Attributes:
        images: Pairs of images in the test.
        right_clean: Images right without the mark.
        right_marked: Images right with the mark.
        lost: Images right without the mark and wrong with it.
        won: Images wrong without the mark and right with it.
        tolerance: Largest share of the images right without it that the mark may take from an unmarked model.
        alpha: The level asked for.
        p_tolerance: Exact p against "the mark takes at most ``tolerance``".
        p_balance: Exact p against "the mark takes no more images than it gives".
        p_references: For each reference model, the exact p against "the mark takes no more from the suspect than from
            the reference".
        gap_low: Lower end of a 95 % confidence interval of the gap.
        gap_high: Its upper end.
        matched_labels: Whether the suspect's classes were matched to ours, on other images.
        watermark: Which mark, as :meth:`Watermark.to_dict` gives it; None for predictions read from a file.
        accuracy_references: For each reference model, its accuracy without the mark, 0..1.
        chance: Accuracy of guessing, 0..0.5: one divided by the number of classes among the labels.
    """

    images: int
    right_clean: int
    right_marked: int
    lost: int
    won: int
    tolerance: float
    alpha: float
    p_tolerance: float
    p_balance: float
    p_references: tuple[float, ...]
    gap_low: float
    gap_high: float
    matched_labels: bool = False
    watermark: dict[str, Any] | None = None
    accuracy_references: tuple[float, ...] = ()
    chance: float = 0.5

    @property
    def accuracy_clean(self) -> float:
        """Accuracy without the mark, 0..1."""
        return self.right_clean / self.images

    @property
    def accuracy_marked(self) -> float:
        """Accuracy with the mark, 0..1."""
        return self.right_marked / self.images

    @property
    def gap(self) -> float:
        """Accuracy without the mark less that with it; the claim of MAP and NTL rests on this number."""
        return (self.right_clean - self.right_marked) / self.images

    @property
    def p_value(self) -> float:
        """The largest of the tests' p: below ``alpha`` only if every hypothesis of an unmarked model is rejected."""
        return max(self._p_by_test.values())

    @property
    def decided_by(self) -> str:
        """The test with the largest p: "tolerance", "balance", or "reference 1" and so on."""
        return max(self._p_by_test, key=self._p_by_test.__getitem__)

    @property
    def _p_by_test(self) -> dict[str, float]:
        references = {f"reference {number}": p for number, p in enumerate(self.p_references, start=1)}
        return {"tolerance": self.p_tolerance, "balance": self.p_balance, **references}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about references that can't show anything, because they know next to nothing of the images."""
        return tuple(
            f"reference {number} is right on {_percent(accuracy)} of the images without the mark, and guessing on "
            f"{_percent(self.chance)}: a model that knows so little can make a true claim fail; leave it out, or give "
            "one trained on the same task and the same order of classes"
            for number, accuracy in enumerate(self.accuracy_references, start=1)
            if accuracy <= self.chance + NEAR_CHANCE
        )

    @property
    def holds(self) -> bool:
        """Whether the claim holds at the level asked for."""
        return self.p_value < self.alpha

    def sentence(self) -> str:
        """Say in plain words what was measured, and no more than that; each warning is a line of its own below."""
        measured = (
            f"On {self.images} images the model is right on {_percent(self.accuracy_clean)} without the mark and on "
            f"{_percent(self.accuracy_marked)} with it: a gap of {100 * self.gap:.1f} points "
            f"({CONFIDENCE:.0%} confidence interval {100 * self.gap_low:.1f} to {100 * self.gap_high:.1f}). "
            f"The mark makes {self.lost} of the {self.right_clean} wrong that are right without it, and {self.won} "
            "right that are wrong without it."
        )
        reference = f", or no more than from one of the {len(self.p_references)} reference models"
        null = (
            f"If in truth it took at most {_percent(self.tolerance)} of such images, or no more than it gave"
            f"{reference if self.p_references else ''}, a result this strong would come up with probability "
            f"{_small(self.p_value)} at most."
        )
        tests = {"tolerance": "what is tolerated", "balance": "what the mark gives"}
        decided = f"The test against {tests.get(self.decided_by, self.decided_by)} decided: its p is the largest."
        compared = "".join(
            f" Reference {number} is right on {_percent(accuracy)} without the mark; p against it is {_small(p)}."
            for number, (accuracy, p) in enumerate(zip(self.accuracy_references, self.p_references, strict=True), 1)
        )
        alone = "" if self.p_references else " No model known to be without the mark was asked for comparison."
        level = f"at the level {self.alpha:g}.{alone}"
        if self.holds:
            said = f"The claim holds {level} It says how the model answers to the mark, not who taught it to, nor when."
        else:
            said = f"The claim doesn't hold {level} This doesn't show that the model never carried the mark."
        below = "".join(f"\nwarning: {one}" for one in self.warnings)
        return f"{measured} {null} {decided}{compared} {said}{below}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: every field, the numbers that follow from them, warnings, and the sentence."""
        names = ("accuracy_clean", "accuracy_marked", "gap", "p_value", "decided_by", "holds")
        record = {**asdict(self), **{name: getattr(self, name) for name in names}}
        lists = {name: list(getattr(self, name)) for name in ("p_references", "accuracy_references", "warnings")}
        return {**record, **lists, "sentence": self.sentence()}


def verify(
    suspect: Suspect,
    domain: object,
    watermark: Watermark,
    *,
    image: ImageSpec | None = None,
    references: Sequence[nn.Module] = (),
    alpha: float = 1e-6,
    tolerance: float | None = None,
    images: int | None = None,
    match_labels: bool = False,
    batch_size: int = 100,
) -> Verdict:
    """Test the claim that a model carries the owner's mark, by its answers to images without and with it.

    The claim holds if each of these is rejected, exactly and one-sided, at the level ``alpha``. Each is a way for a
    model not to carry the mark, so none of them needs a correction for being one of several:

    - The mark takes at most ``tolerance`` of the images that are right without it (binomial test).
    - The mark takes no more images than it gives (sign test of McNemar, on the images whose answer changes between
      right and wrong). This stops a model whose answers are merely unsteady.
    - For each reference model: on the images that both get right without the mark, it takes no more from the suspect
      than from the reference (sign test on the images where the two differ).

    The level bounds the chance of a wrong claim over the choice of images. It says nothing about an unmarked model that
    loses more than ``tolerance`` by itself, as some do where the mark is strong: give independently trained models of
    the same task as ``references``, and set ``tolerance`` well above what the worst of them loses. Choose images,
    watermark and level before you see the suspect. See docs/ownership.md.

    Args:
        suspect: A module, or a function that takes float images (B, C, H, W) and gives logits or probabilities (B, K).
            The domain's class k is its class k; classes it has beyond those count as wrong answers.
        domain: Labelled images of the authorized domain, none of which the mark was learned on: anything
            :func:`modelfence.data.sources.as_domain` takes. The test split of a name or a divided folder is used; a
            folder that isn't divided is used whole, and a domain, dataset or DataLoader as it is. A domain has to be at
            the size the mark was learned at.
        watermark: The mark claimed.
        image: What the suspect eats; needed for images that aren't a domain that says it, which are marked at that
            size. The images of a domain of another size are marked first, then resized.
        references: Models known not to carry the mark, trained on the same task; they eat what the domain gives (for
            others, call :func:`modelfence.ownership.answers.ask` and :func:`judge`).
        alpha: Level, above 0 and below 1.
        tolerance: Largest share of the images right without it that the mark may take from an unmarked model, above 0
            and below 1; None takes :attr:`Watermark.tolerance`, 0.3 for weak marks and 0.8 for strong ones.
        images: Use so many images, spread evenly over the domain; None uses all.
        match_labels: The suspect's classes may be in another order: match them on one half of the images and test on
            the other.
        batch_size: Images at a time.

    Returns:
        The verdict.

    Raises:
        InputError: A number is out of range, the domain can't be had, or domain, mark and suspect don't fit together.
        NonFiniteError: A model gives no finite output at all.

    Source: the claim is MAP's (CVPR 2024, section 4.2), which compares the two accuracies without a test.

    Example:
        >>> import torch
        >>> from modelfence.data.domain import IndexedDomain
        >>> spec = ImageSpec(channels=1, height=2, width=2, mean=(0.0,), std=(1 / 255,))
        >>> labels = torch.arange(100) % 2
        >>> pixels = (labels * 100).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
        >>> domain = IndexedDomain("dark and light", pixels.__getitem__, 100, spec=spec, labels=labels)
        >>> def suspect(x):  # answers 1 where the pixel that the mark leaves alone is darker than its neighbour
        ...     light, mark = x[:, 0, 1, 1] > 50, x[:, 0, 0, 0] > x[:, 0, 1, 1]
        ...     return torch.nn.functional.one_hot((light ^ mark).long(), 2).float()
        >>> verdict = verify(suspect, domain, Watermark("digits"))
        >>> verdict.gap, verdict.holds
        (1.0, True)
    """
    _checked(alpha, tolerance, watermark)
    for number, one in enumerate(references):
        require_network(one, f"references[{number}]")
    domain = as_domain(domain, image=image, split="test")
    own = ask(suspect, domain, watermark, image=image, images=images, batch_size=batch_size)
    theirs = None if getattr(domain, "spec", None) else image
    others = [ask(one, domain, watermark, image=theirs, images=images, batch_size=batch_size) for one in references]
    return judge(
        own,
        references=others,
        alpha=alpha,
        tolerance=tolerance,
        match_labels=match_labels,
        watermark=watermark,
    )


def judge(
    answers: Answers,
    *,
    references: Sequence[Answers] = (),
    alpha: float = 1e-6,
    tolerance: float | None = None,
    match_labels: bool = False,
    watermark: Watermark | None = None,
) -> Verdict:
    """Test the claim on answers that were given already, such as those of a predictions file.

    Args:
        answers: The suspect's, to pairs of images.
        references: Those of models known not to carry the mark, to the same images.
        alpha: As for :func:`verify`.
        tolerance: The same; None is 0.8 where the mark isn't known.
        match_labels: The same.
        watermark: The mark, for the record.

    Returns:
        The verdict.

    Raises:
        InputError: A number is out of range, or references answered other images.

    Example:
        >>> import torch
        >>> labels = torch.zeros(100, dtype=torch.int64)
        >>> judge(Answers(labels, clean=labels, marked=labels + 1)).holds
        True
        >>> judge(Answers(labels, clean=labels, marked=labels)).p_value
        1.0
    """
    tolerance = _checked(alpha, tolerance, watermark)
    for other in references:
        if not torch.equal(other.labels, answers.labels):
            raise InputError("references: a model answered other images than the suspect; ask all about the same")
    if match_labels:
        _, tested = halves(len(answers))
        answers, references = with_matched_labels(answers), [other.take(tested) for other in references]
    right, still = answers.clean == answers.labels, answers.marked == answers.labels
    lost, won = int((right & ~still).sum()), int((still & ~right).sum())
    low, high = gap_interval(lost, won, len(answers), CONFIDENCE)
    return Verdict(
        images=len(answers),
        right_clean=int(right.sum()),
        right_marked=int(still.sum()),
        lost=lost,
        won=won,
        tolerance=tolerance,
        alpha=alpha,
        p_tolerance=at_least(lost, int(right.sum()), tolerance),
        p_balance=sign_test(lost, won),
        p_references=tuple(_compared(answers, other) for other in references),
        gap_low=low,
        gap_high=high,
        matched_labels=match_labels,
        watermark=None if watermark is None else watermark.to_dict(),
        accuracy_references=tuple(float((one.clean == one.labels).double().mean()) for one in references),
        chance=1 / max(2, len(answers.labels.unique())),  # type: ignore[no-untyped-call]  # torch's gap
    )


def _compared(suspect: Answers, reference: Answers) -> float:
    """Test on the images both get right without the mark which of the two loses more of them to it."""
    both = (suspect.clean == suspect.labels) & (reference.clean == reference.labels)
    lost, kept = (suspect.marked != suspect.labels) & both, (reference.marked == reference.labels) & both
    return sign_test(int((lost & kept).sum()), int((both & ~lost & ~kept).sum()))


def _checked(alpha: float, tolerance: float | None, watermark: Watermark | None) -> float:
    """Return the tolerance that is meant, after a look at the numbers."""
    if watermark is not None and not isinstance(watermark, Watermark):
        raise InputError(f"watermark= is {type(watermark).__name__}; give a Watermark, such as Watermark('digits')")
    if tolerance is None:
        tolerance = max(TOLERANCES) if watermark is None else watermark.tolerance
    for name, value in (("alpha", alpha), ("tolerance", tolerance)):
        if not 0 < value < 1:
            raise InputError(f"{name} is {value}; a number above 0 and below 1 is needed")
    return tolerance


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _small(p: float) -> str:
    return f"{p:.2g}" if p > 1e-300 else "1e-300"
