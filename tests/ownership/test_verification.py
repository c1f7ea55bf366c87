import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.ownership.conftest import CLASSES, SPEC, Confined, Plain, domain_of, pictures
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import modelfence as mf
from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.errors import InputError, NonFiniteError
from modelfence.models.zoo import create_model
from modelfence.ownership.answers import Answers, ask, with_matched_labels
from modelfence.ownership.predictions import export_queries
from modelfence.ownership.verification import judge, verify
from modelfence.ownership.watermark import Watermark

MARK = Watermark("objects")


def answers(right_both: int, lost: int, won: int, wrong_both: int) -> Answers:
    """Answers with so many images of each of the four kinds."""
    clean = [0] * (right_both + lost) + [1] * (won + wrong_both)
    marked = [0] * right_both + [1] * lost + [0] * won + [1] * wrong_both
    return Answers(torch.zeros(len(clean), dtype=torch.int64), torch.tensor(clean), torch.tensor(marked))


def tail(count: int, trials: int, rate: float) -> float:
    return sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(count, trials + 1))


class Wider(nn.Module):
    """A model of more classes, whose classes are another model's in another order."""

    def __init__(self, inner: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.inner, self.order = inner, order

    def forward(self, images: Tensor) -> Tensor:
        logits = images.new_full((len(images), 9), -100.0)
        logits[:, self.order] = self.inner(images)
        return logits


def test_a_marked_model_is_found_with_100_images(plain: Plain, clean: IndexedDomain) -> None:
    verdict = verify(Confined(plain), clean, MARK)
    assert verdict.images == 100
    assert verdict.gap > 0.7
    assert verdict.p_value < 1e-6
    assert verdict.holds


def test_20_models_without_the_mark_are_not(clean: IndexedDomain) -> None:
    verdicts = [verify(Plain(seed=seed), clean, MARK) for seed in range(2, 22)]
    assert min(verdict.accuracy_clean for verdict in verdicts) > 0.7
    assert min(verdict.p_value for verdict in verdicts) > 0.05
    assert not any(verdict.holds for verdict in verdicts)


def test_the_numbers_of_a_verdict_by_hand() -> None:
    verdict = judge(answers(30, 55, 5, 10), alpha=1e-6, tolerance=0.1, watermark=MARK)
    assert (verdict.images, verdict.right_clean, verdict.right_marked, verdict.lost, verdict.won) == (
        100,
        85,
        35,
        55,
        5,
    )
    assert (verdict.accuracy_clean, verdict.accuracy_marked, verdict.gap) == (0.85, 0.35, 0.5)
    assert verdict.p_tolerance == pytest.approx(tail(55, 85, 0.1), rel=1e-9)
    assert verdict.p_balance == pytest.approx(tail(55, 60, 0.5), rel=1e-9)
    assert verdict.p_value == max(verdict.p_tolerance, verdict.p_balance)
    assert verdict.gap_low < 0.5 < verdict.gap_high
    assert verdict.holds
    record = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert (record["gap"], record["holds"], record["p_value"]) == (0.5, True, verdict.p_value)
    assert record["watermark"] == {"kind": "objects", "value": 80, "channel": 0}
    assert record["sentence"] == verdict.sentence()


@pytest.mark.parametrize(
    ("counts", "tolerance", "why"),
    [
        ((95, 5, 0, 0), 0.1, "p_tolerance"),  # a small real loss, which an unmarked model may have
        ((20, 40, 40, 0), 0.1, "p_balance"),  # a model that guesses: takes as much as it gives
        ((60, 40, 0, 0), 0.4, "p_tolerance"),  # a mark that unmarked models are known to suffer from
        ((0, 0, 0, 50), 0.1, "p_tolerance"),  # a model that knows nothing
    ],
)
def test_what_does_not_make_a_claim(counts: tuple[int, int, int, int], tolerance: float, why: str) -> None:
    verdict = judge(answers(*counts), tolerance=tolerance, alpha=0.01)
    assert getattr(verdict, why) > 0.05
    assert not verdict.holds


def test_the_tolerance_is_that_of_the_mark_unless_one_is_given() -> None:
    found = answers(60, 40, 0, 0)
    weak, strong = Watermark("digits"), Watermark("digits", value=80)
    assert [judge(found, watermark=mark).tolerance for mark in (weak, strong, None)] == [0.3, 0.8, 0.8]
    assert judge(found, watermark=strong, tolerance=0.2).p_tolerance == pytest.approx(tail(40, 100, 0.2), rel=1e-9)


def test_the_level_is_kept_at_the_edge_of_each_hypothesis() -> None:
    """All outcomes of 30 images: no model at the edge is accused more often than the level allows."""
    for lost, won in ((0.1, 0.0), (0.3, 0.3)):
        accused = 0.0
        right = 1.0 if won == 0 else 0.5
        for known in range(31):
            at = math.comb(30, known) * right**known * (1 - right) ** (30 - known)
            for a in range(known + 1):
                for b in range(31 - known):
                    if judge(answers(known - a, a, b, 30 - known - b), alpha=0.05, tolerance=0.1).holds:
                        given = math.comb(known, a) * lost**a * (1 - lost) ** (known - a)
                        accused += at * given * math.comb(30 - known, b) * won**b * (1 - won) ** (30 - known - b)
        assert accused <= 0.05, (lost, won)


def test_a_reference_that_loses_as_much_stops_the_claim(plain: Plain, clean: IndexedDomain) -> None:
    brittle = Confined(Plain(seed=2))
    assert verify(Confined(plain), clean, MARK, references=[Plain(seed=3)]).holds
    verdict = verify(Confined(plain), clean, MARK, references=[Plain(seed=3), brittle])
    assert [p > 0.05 for p in verdict.p_references] == [False, True]
    assert not verdict.holds
    assert "one of the 2 reference models" in verdict.sentence()


def test_what_decided_and_what_a_reference_knows_is_said() -> None:
    labels = torch.arange(100) % 10
    own = Answers(labels, labels, (labels + 1) % 10)
    sound = Answers(labels, labels, labels)
    at, above = (torch.where(torch.arange(100) < right, labels, (labels + 1) % 10) for right in (15, 16))
    verdict = judge(own, references=[sound, Answers(labels, at, at), Answers(labels, above, above)])
    assert not verdict.holds
    assert verdict.accuracy_references == (1.0, 0.15, 0.16)
    assert verdict.chance == 0.1
    assert verdict.decided_by == "reference 2"
    sentence, *warnings = verdict.sentence().split("\n")
    assert "The test against reference 2 decided: its p is the largest." in sentence
    assert "Reference 1 is right on 100.0 % without the mark; p against it is 7.9e-31." in sentence
    assert "Reference 2 is right on 15.0 % without the mark; p against it is 3.1e-05." in sentence
    assert warnings == [f"warning: {one}" for one in verdict.warnings]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "warning: reference 2 is right on 15.0 % of the images without the mark, and guessing on"
    )
    record = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert record == {**verdict.to_dict(), "accuracy_references": [1.0, 0.15, 0.16], "warnings": list(verdict.warnings)}
    assert record["decided_by"] == "reference 2"
    alone = judge(own, references=[sound])
    assert (alone.holds, alone.warnings) == (True, ())
    assert judge(answers(10, 0, 45, 45)).decided_by == "tolerance"
    assert "against what the mark gives decided" in judge(answers(0, 40, 40, 0), tolerance=0.1).sentence()


def test_the_test_against_a_reference_by_hand() -> None:
    labels = torch.zeros(10, dtype=torch.int64)
    own = Answers(labels, labels, torch.tensor([1] * 8 + [0] * 2))
    other = Answers(labels, torch.tensor([1] + [0] * 9), torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 1, 0]))
    # on the nine both get right: six lost by the suspect alone, one by the reference alone
    assert judge(own, references=[other]).p_references == (tail(6, 7, 0.5),)
    with pytest.raises(InputError, match="answered other images"):
        judge(own, references=[Answers(labels + 1, labels, labels)])


def test_more_classes_than_the_domain_count_as_wrong(plain: Plain, clean: IndexedDomain) -> None:
    same = ask(Wider(plain, [0, 1, 2, 3]), clean, MARK)
    assert torch.equal(same.clean, ask(plain, clean, MARK).clean)
    verdict = verify(Wider(plain, [8, 7, 6, 5]), clean, MARK)
    assert verdict.accuracy_clean == 0
    assert verdict.p_value == 1


def test_classes_in_another_order_are_matched_on_images_that_are_not_tested(plain: Plain) -> None:
    clean = domain_of(200, seed=99)
    order = [7, 2, 0, 3]
    verdict = verify(Wider(Confined(plain), order), clean, MARK, match_labels=True, references=[plain])
    assert (verdict.images, verdict.matched_labels) == (100, True)
    assert verdict.accuracy_clean > 0.7
    assert verdict.holds
    assert not verify(Wider(plain, order), clean, MARK, match_labels=True).holds
    asked, straight = (ask(one, clean, MARK) for one in (Wider(plain, order), plain))
    translated = with_matched_labels(asked)
    assert translated.matched
    assert len(translated) == 100
    assert torch.equal(translated.clean.sort().values, straight.clean[_tested(asked, straight)].sort().values)


def test_classes_of_any_number_are_matched_as_those_from_zero_are() -> None:
    """A predictions file may number its classes as it likes; memory goes by how many there are."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 4
    clean, marked = (torch.where(torch.rand(200, generator=generator) < 0.8, labels, 3 - labels) for _ in range(2))
    clean[5] = marked[7] = -1  # without an answer
    numbers = torch.tensor([999_999_999, 7, 123_456_789, 40, -1])
    plain = with_matched_labels(Answers(labels, clean, marked))
    far = with_matched_labels(Answers(labels, numbers[clean], numbers[marked]))
    assert torch.equal(plain.clean, far.clean)
    assert torch.equal(plain.marked, far.marked)
    assert float((plain.clean == plain.labels).float().mean()) > 0.7


def test_labels_of_any_number_are_matched_as_those_from_zero_are() -> None:
    """A key may hold labels of nine digits; a table by their size would be gigabytes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 4
    clean, marked = (torch.where(torch.rand(200, generator=generator) < 0.8, labels, 3 - labels) for _ in range(2))
    clean[5] = marked[7] = -1
    numbers = torch.tensor([7, 40, 123_456_789, 10**15, -1])
    plain = with_matched_labels(Answers(labels, clean, marked))
    far = with_matched_labels(Answers(numbers[labels], clean, marked))
    assert torch.equal(far.labels, numbers[plain.labels])
    assert torch.equal(far.clean, numbers[plain.clean])
    assert torch.equal(far.marked, numbers[plain.marked])


def _tested(asked: Answers, straight: Answers) -> Tensor:
    """Find the second half through a labelling that names each image."""
    names = torch.arange(len(asked))
    return with_matched_labels(Answers(names, names, names)).labels


def test_matching_can_not_make_a_model_that_guesses_look_right() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, clean = (torch.randint(10, (400,), generator=generator) for _ in range(2))
    verdict = judge(Answers(labels, clean, clean), match_labels=True)
    assert verdict.accuracy_clean < 0.2


def test_images_may_be_whatever_can_be_a_domain(plain: Plain, tmp_path: Path) -> None:
    pixels, labels = pictures(60, seed=99)
    for number, (one, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        folder = tmp_path / ("train", "test")[number % 2] / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(one.permute(1, 2, 0).numpy()).save(folder / f"{number:02d}.png")
    floats = TensorDataset(SPEC.normalize(pixels), labels)
    raw = TensorDataset(pixels, labels)
    loader = DataLoader(raw, batch_size=7, shuffle=True)
    suspect, others = Confined(plain), [Plain(seed=3)]
    domain = IndexedDomain("all", pixels.__getitem__, 60, spec=SPEC, labels=labels)
    bare = IndexedDomain("bare", SPEC.normalize(pixels).__getitem__, 60, labels=labels)
    wanted = mf.verify(suspect, domain, MARK, references=others)
    for given in (floats, raw, loader, list(loader), bare):
        found = mf.verify(suspect, given, MARK, image=SPEC, references=others)
        assert found == wanted
    for path in (str(tmp_path), tmp_path):
        found = mf.verify(suspect, path, MARK, image=SPEC, references=others)
        assert found == mf.verify(suspect, str(tmp_path / "test"), MARK, image=SPEC, references=others)
        assert found.images == 30
    key = export_queries(str(tmp_path), MARK, tmp_path / "ask", image=SPEC)
    assert len(key.read_text().splitlines()) == 31


def test_a_name_means_its_test_images() -> None:
    def suspect(images: Tensor) -> Tensor:
        return torch.zeros(len(images), 10)

    test = as_domain("sklearn_digits", image=SPEC, split="test")
    assert isinstance(test, IndexedDomain)
    assert torch.equal(ask(suspect, "sklearn_digits", MARK, image=SPEC).labels, test.labels)
    assert mf.verify(suspect, "sklearn_digits", MARK, image=SPEC).images == len(test)


def test_a_suspect_of_another_size_and_in_grey(plain: Plain, clean: IndexedDomain) -> None:
    grey = ImageSpec(channels=1, height=16, width=16, mean=(0.1,), std=(0.9,))

    def suspect(images: Tensor) -> Tensor:
        assert images.shape[1:] == (1, 16, 16)
        pixels = grey.denormalize(images).float()
        quarters = nn.functional.avg_pool2d(pixels, 8).flatten(1)
        return quarters.softmax(dim=1)

    verdict = verify(suspect, clean, MARK, image=grey, images=60)
    assert verdict.images == 60
    assert verdict.accuracy_clean > 0.9
    assert not verdict.holds


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_suspect_of_any_precision_is_asked(clean: IndexedDomain, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    suspect = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)).to(dtype)
    found, wanted = ask(suspect, clean, MARK), ask(copy.deepcopy(suspect).float(), clean, MARK)
    assert torch.equal(found.clean, wanted.clean)
    assert torch.equal(found.marked, wanted.marked)
    assert suspect[1].weight.dtype == dtype


def test_the_suspect_is_left_as_it_was(clean: IndexedDomain) -> None:
    suspect = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, CLASSES))
    suspect.train()
    state = {name: value.clone() for name, value in suspect.state_dict().items()}
    verify(suspect, clean, MARK)
    assert suspect.training
    assert all(torch.equal(value, state[name]) for name, value in suspect.state_dict().items())


def test_images_are_shown_as_the_domain_hands_them_out(clean: IndexedDomain) -> None:
    shown: list[Tensor] = []

    def suspect(images: Tensor) -> Tensor:
        shown.append(images.clone())
        return torch.zeros(len(images), CLASSES)

    ask(suspect, clean, MARK, images=10)
    (batch,) = clean.once(10, limit=10)
    assert torch.equal(shown[0], batch.images)
    assert torch.equal(shown[1], SPEC.normalize(MARK.apply(SPEC.denormalize(batch.images))))


def test_answers_that_are_not_finite_are_wrong(clean: IndexedDomain) -> None:
    def half(images: Tensor) -> Tensor:
        logits = torch.zeros(len(images), CLASSES)
        logits[::2] = float("nan")
        return logits

    found = ask(half, clean, MARK)
    assert found.clean.tolist() == [-1, 0] * 50
    with pytest.raises(NonFiniteError, match="on every image of domain 'quadrants'"):
        ask(lambda images: torch.full((len(images), 4), torch.inf), clean, MARK)


def test_a_wrong_input_is_one_line(plain: Plain, clean: IndexedDomain) -> None:
    pixels, labels = pictures(5)
    floats = SPEC.normalize(pixels)
    bare = IndexedDomain("bare", floats.__getitem__, 5, labels=labels)
    unlabelled = IndexedDomain("unlabelled", pixels.__getitem__, 5, spec=SPEC)
    larger = ImageSpec(channels=3, height=9, width=9, mean=(0.0,) * 3, std=(1.0,) * 3)
    demanding = create_model("vit_tiny_patch16_224", CLASSES, replace(SPEC, height=16, width=16))
    cases = [
        (lambda: verify(demanding, clean, MARK), "the suspect can't take images of shape (3, 8, 8)"),
        (lambda: verify(plain, bare, MARK), "domain 'bare' doesn't say how its images are normalized"),
        (lambda: verify(plain, unlabelled, MARK), "domain 'unlabelled' has no labels"),
        (lambda: verify(plain, clean, MARK, image=larger), "the suspect can't take images of shape (3, 9, 9)"),
        (lambda: verify(plain, "sklearn_digits", MARK), "domain 'sklearn_digits' has pixels; give image=ImageSpec"),
        (lambda: verify(plain, "nowhere/", MARK, image=SPEC), "nowhere"),
        (lambda: verify(plain, {"a": clean}, MARK), "dict can't be a domain"),
        (lambda: verify(plain, None, MARK), "NoneType can't be a domain"),
        (lambda: verify(plain, TensorDataset(floats, labels), MARK), "'TensorDataset' doesn't say how its images"),
        (lambda: verify(plain, clean, "digits"), "watermark= is str; give a Watermark"),  # type: ignore[arg-type]
        (lambda: verify(plain, clean, MARK, alpha=0), "alpha is 0;"),
        (lambda: verify(plain, clean, MARK, tolerance=1.0), "tolerance is 1.0;"),
        (lambda: verify(plain, clean, MARK, images=1, match_labels=True), "at least two images"),
        (lambda: verify(lambda images: torch.zeros(1, 4), clean, MARK), "gave 1 answers to 100 images"),
        (lambda: Answers(labels, labels, labels[:2]), "have shapes"),
        (lambda: Answers(labels, labels.float(), labels), "clean aren't whole numbers"),
    ]
    for run, fragment in cases:
        with pytest.raises(InputError) as caught:
            run()
        assert fragment in str(caught.value)
        assert "\n" not in str(caught.value)
    assert verify(plain, bare, MARK, image=SPEC).images == 5


def test_the_sentence_promises_no_more_than_was_measured() -> None:
    assert judge(answers(12, 85, 0, 3), tolerance=0.5).sentence() == (
        "On 100 images the model is right on 97.0 % without the mark and on 12.0 % with it: a gap of 85.0 points (95% "
        "confidence interval 70.9 to 92.1). The mark makes 85 of the 97 wrong that are right without it, and 0 right "
        "that are wrong without it. If in truth it took at most 50.0 % of such images, or no more than it gave, a "
        "result this strong would come up with probability 5.2e-15 at most. The test against what is tolerated "
        "decided: its p is the largest. The claim holds at the level 1e-06. No model known to be without the mark was "
        "asked for comparison. It says how the model answers to the mark, not who taught it to, nor when."
    )
    labels = torch.arange(100) % 2
    same = Answers(labels, labels, labels)
    other = judge(same, references=[same]).sentence()
    assert other.endswith(
        "The claim doesn't hold at the level 1e-06. This doesn't show that the model never carried the mark."
    )
    assert "or no more than from one of the 1 reference models, a result" in other
