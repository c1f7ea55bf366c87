import itertools

import pytest
import torch

from modelfence.data.domain import Domain, IndexedDomain, check_labels
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError

SIZE = 23
PIXELS = torch.arange(SIZE, dtype=torch.uint8).view(SIZE, 1, 1, 1)
SPEC = ImageSpec(channels=1, height=1, width=1, mean=(0.0,), std=(1 / 255,))


def domain(**changes) -> IndexedDomain:
    """A domain whose images are their own numbers."""
    arguments = {"spec": SPEC, "labels": torch.arange(SIZE) % 3} | changes
    return IndexedDomain("numbers", PIXELS.__getitem__, SIZE, **arguments)


def numbers(batches, count: int | None = None) -> list[list[int]]:
    return [batch.images.flatten().round().int().tolist() for batch in itertools.islice(batches, count)]


def test_it_is_a_domain():
    assert isinstance(domain(), Domain)
    assert domain().labelled
    assert not domain(labels=None).labelled


def test_each_epoch_has_every_image_once_but_for_the_ragged_end():
    epochs = numbers(domain().batches(5, seed=1), 8)
    for epoch in (epochs[:4], epochs[4:]):
        seen = list(itertools.chain(*epoch))
        assert len(set(seen)) == 20
    assert epochs[:4] != epochs[4:]


def test_batches_depend_on_the_seed_alone():
    assert numbers(domain().batches(4, seed=7), 12) == numbers(domain().batches(4, seed=7), 12)
    assert numbers(domain().batches(4, seed=7), 12) != numbers(domain().batches(4, seed=8), 12)


def test_global_random_state_plays_no_part_and_is_left_alone():
    torch.manual_seed(1)
    first = numbers(domain().batches(4, seed=7), 12)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert numbers(domain().batches(4, seed=7), 12) == first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("start", [0, 1, 4, 5, 11, 30])
def test_resuming_equals_going_on(start):
    uninterrupted = numbers(domain().batches(5, seed=3), start + 7)
    assert numbers(domain().batches(5, seed=3, start=start), 7) == uninterrupted[start:]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_joint_batch(world):
    joint = numbers(domain().batches(2 * world, seed=5), 9)
    shares = [numbers(domain().batches(2, seed=5, rank=rank, world=world), 9) for rank in range(world)]
    for step, batch in enumerate(joint):
        for rank in range(world):
            assert shares[rank][step] == batch[rank::world]


def test_ranks_resume_too():
    whole = numbers(domain().batches(3, seed=5, rank=1, world=2), 9)
    assert numbers(domain().batches(3, seed=5, rank=1, world=2, start=4), 5) == whole[4:]


def test_labels_stay_with_their_images():
    for batch in itertools.islice(domain().batches(5, seed=0), 10):
        assert torch.equal(batch.labels, batch.images.flatten().round().long() % 3)
    assert next(domain(labels=None).batches(5, seed=0)).labels is None


def test_once_gives_everything_in_order_with_the_ragged_end():
    assert numbers(domain().once(10)) == [list(range(10)), list(range(10, 20)), [20, 21, 22]]


def test_once_with_a_limit_is_spread_over_the_domain():
    assert numbers(domain().once(2, limit=4)) == [[0, 5], [11, 17]]
    assert numbers(domain().once(50, limit=99)) == [list(range(SIZE))]


def test_subsets_and_splits_keep_images_and_labels_together():
    part = domain().subset(torch.tensor([4, 2, 7]), name="some")
    batch = next(part.once(9))
    assert batch.images.flatten().round().tolist() == [4, 2, 7]
    assert batch.labels.tolist() == [1, 2, 1]
    assert (part.name, part.size) == ("some", 3)
    nested = part.subset(torch.tensor([1]))
    assert numbers(nested.once(1)) == [[2]]
    rest, held_out = domain().split(0.3, seed=0)
    assert sorted(itertools.chain(*numbers(rest.once(9)), *numbers(held_out.once(9)))) == list(range(SIZE))


@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_fetching_ahead_changes_nothing(ahead):
    slow = domain(ahead=ahead)
    assert numbers(slow.batches(5, seed=3, start=2), 9) == numbers(domain().batches(5, seed=3, start=2), 9)
    assert numbers(slow.once(4)) == numbers(domain().once(4))
    assert numbers(slow.split(0.5, seed=0)[0].once(4)) == numbers(domain().split(0.5, seed=0)[0].once(4))


def test_errors_in_the_background_are_raised_where_the_batch_is_asked_for():
    def fetch(indices):
        if 13 in indices:
            raise InputError("image 13 can't be decoded")
        return PIXELS[indices]

    batches = IndexedDomain("numbers", fetch, SIZE, spec=SPEC, ahead=3).once(5)
    assert numbers(batches, 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(InputError, match="image 13"):
        next(batches)


def test_floats_pass_as_they_are():
    values = torch.rand(6, 1, 2, 2)
    assert torch.equal(next(IndexedDomain("floats", values.__getitem__, 6).once(6)).images, values)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "start": -1}, "start is -1"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"batch_size": 24}, "23 images, fewer than one batch of 24"),
        ({"batch_size": 12, "world": 2}, "fewer than one batch of 24"),
    ],
)
def test_wrong_numbers_are_errors_before_the_first_batch(arguments, text):
    with pytest.raises(InputError, match=text):
        domain().batches(seed=0, **arguments)


def test_once_refuses_an_empty_limit():
    with pytest.raises(InputError, match="limit is 0"):
        domain().once(4, limit=0)


def test_an_empty_domain_is_an_error():
    with pytest.raises(InputError, match="'nothing' has no images"):
        IndexedDomain("nothing", PIXELS.__getitem__, 0)
    with pytest.raises(InputError, match="no images"):
        domain().subset(torch.empty(0, dtype=torch.int64))


def test_pixels_need_a_spec():
    with pytest.raises(InputError, match="image=ImageSpec"):
        next(domain(spec=None).once(4))


@pytest.mark.parametrize(
    ("labels", "count", "text"),
    [
        (torch.tensor([0, 3]), 3, "label 3 of image 1 is outside 0..2"),
        (torch.tensor([0, -1]), 3, "label -1 of image 1"),
        (torch.tensor([0, -1]), None, "label -1 of image 1 is negative"),
        (torch.tensor([0.0, 1.0]), 3, "float32"),
        (torch.zeros(2, 3, dtype=torch.int64), 3, r"\(2, 3\)"),
    ],
)
def test_labels_that_do_not_fit_are_named(labels, count, text):
    with pytest.raises(InputError, match=f"'numbers'.*{text}"):
        check_labels(labels, "numbers", count=count)


def test_class_names_bound_the_labels():
    with pytest.raises(InputError, match=r"label 2 of image 2 is outside 0\.\.1"):
        domain(classes=("a", "b"))
    with pytest.raises(InputError, match="4 labels for 23 images"):
        domain(labels=torch.zeros(4, dtype=torch.int64))


def test_subset_refuses_indices_out_of_range():
    with pytest.raises(InputError, match="from 0 to 22"):
        domain().subset(torch.tensor([23]))


def test_a_mapped_domain_hands_out_the_same_images_changed():
    plain, half = domain(), domain().mapped(lambda pixels: pixels // 2, "halved")
    assert (half.name, half.size, half.spec, domain().mapped(lambda pixels: pixels).name) == (
        "halved",
        23,
        SPEC,
        "numbers",
    )
    for one, other in zip((plain, *plain.split(0.3, 4)), (half, *half.split(0.3, 4)), strict=True):
        expected = [[number // 2 for number in batch] for batch in numbers(one.batches(5, seed=2, start=1), 3)]
        assert numbers(other.batches(5, seed=2, start=1), 3) == expected
        assert [b.labels.tolist() for b in other.once(4)] == [b.labels.tolist() for b in one.once(4)]
    twice = half.mapped(lambda pixels: pixels + 1)
    assert numbers(twice.once(5), 1) == [[1, 1, 2, 2, 3]]
    assert numbers(plain.once(5), 1) == [[0, 1, 2, 3, 4]]


def test_a_mapped_domain_keeps_fetching_ahead():
    ahead = domain(ahead=2).mapped(lambda pixels: pixels + 1)
    assert numbers(ahead.batches(4, seed=0), 7) == numbers(
        domain().mapped(lambda pixels: pixels + 1).batches(4, seed=0), 7
    )


def test_one_image_cannot_be_divided():
    with pytest.raises(InputError, match="has 1 image, which can't be divided; give more"):
        domain().subset(torch.tensor([3])).split(0.5, seed=0)
