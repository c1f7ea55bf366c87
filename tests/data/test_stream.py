import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from modelfence.data.domain import Domain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError

SIZE = 23
VALUES = torch.arange(SIZE, dtype=torch.float32).view(SIZE, 1, 1, 1)
LABELS = torch.arange(SIZE) % 3
PAIRS = TensorDataset(VALUES, LABELS)


def loader(**arguments) -> DataLoader:
    return DataLoader(PAIRS, **({"batch_size": 4, "shuffle": True} | arguments))


def numbers(batches, count: int | None = None) -> list[list[int]]:
    return [batch.images.flatten().int().tolist() for batch in itertools.islice(batches, count)]


class Augmented(Dataset):
    """Adds noise from each of the three global generators."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        noise = torch.rand(()) + np.random.rand() * 10 + random.random() * 100
        return VALUES[index] * 0 + float(noise), LABELS[index]


class Sized(IterableDataset):
    """Gives single-image batches and doesn't know how many."""

    def __iter__(self):
        return iter([(VALUES[i : i + 1], LABELS[i : i + 1]) for i in range(SIZE)])


def test_it_is_a_domain():
    domain = StreamDomain(loader(), "loader")
    assert isinstance(domain, Domain)
    assert domain.labelled
    assert domain.size == SIZE
    assert StreamDomain(loader(drop_last=True), "loader").size == 20
    assert StreamDomain(Sized(), "unsized").size is None


def test_batches_are_regrouped_and_keep_their_labels():
    batches = list(itertools.islice(StreamDomain(loader(), "loader").batches(5, seed=0), 4))
    assert [len(batch.images) for batch in batches] == [5, 5, 5, 5]
    for batch in batches:
        assert torch.equal(batch.labels, batch.images.flatten().long() % 3)
    assert len(set(itertools.chain(*numbers(batches)))) == 20


def test_passes_differ_but_depend_on_the_seed_alone():
    first = numbers(StreamDomain(loader(), "loader").batches(5, seed=1), 12)
    torch.manual_seed(99)
    assert numbers(StreamDomain(loader(), "loader").batches(5, seed=1), 12) == first
    assert numbers(StreamDomain(loader(), "loader").batches(5, seed=2), 12) != first
    assert first[:4] != first[4:8]


@pytest.mark.parametrize("make", [loader, Sized, lambda: loader(generator=torch.Generator())])
@pytest.mark.parametrize("start", [0, 3, 4, 10])
def test_resuming_equals_going_on(make, start):
    uninterrupted = numbers(StreamDomain(make(), "stream").batches(5, seed=3), start + 6)
    assert numbers(StreamDomain(make(), "stream").batches(5, seed=3, start=start), 6) == uninterrupted[start:]


def test_augmentation_is_repeated_exactly_and_nobody_elses_state_is_touched():
    def first_images(seed: int) -> list[float]:
        batches = StreamDomain(DataLoader(Augmented(), batch_size=4), "noisy").batches(5, seed=seed)
        return torch.cat([batch.images for batch in itertools.islice(batches, 6)]).flatten().tolist()

    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    once = first_images(0)
    after = torch.rand(1), np.random.rand(), random.random()
    assert after == expected
    assert first_images(0) == once
    assert first_images(1) != once
    assert len(set(once)) == len(once)


def test_loader_workers_change_nothing():
    plain = numbers(StreamDomain(loader(), "loader").batches(5, seed=1), 6)
    assert numbers(StreamDomain(loader(num_workers=1), "loader").batches(5, seed=1), 6) == plain


def test_a_loader_whose_passes_are_one_and_the_same_is_refused():
    with pytest.raises(InputError, match=r"'kept': a loader with persistent_workers .*persistent_workers=False"):
        StreamDomain(loader(num_workers=1, persistent_workers=True), "kept")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_joint_batch(world):
    joint = numbers(StreamDomain(loader(), "loader").batches(2 * world, seed=5), 7)
    for rank in range(world):
        share = numbers(StreamDomain(loader(), "loader").batches(2, seed=5, rank=rank, world=world), 7)
        assert share == [batch[rank::world] for batch in joint]


def test_a_loader_that_shares_already_is_refused():
    sharing = DataLoader(PAIRS, batch_size=4, sampler=DistributedSampler(PAIRS, num_replicas=2, rank=0))
    with pytest.raises(InputError, match="DistributedSampler"):
        StreamDomain(sharing, "shared").batches(2, seed=0, rank=0, world=2)


def test_once_is_one_pass_with_the_ragged_end_and_a_limit():
    ordered = StreamDomain(loader(shuffle=False), "loader")
    assert numbers(ordered.once(10)) == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
    assert numbers(ordered.once(10, limit=13)) == [[0, 1, 3, 5, 7, 8, 10, 12, 14, 15], [17, 19, 21]]
    assert numbers(ordered.once(10)) == numbers(ordered.once(10))


def test_size_cuts_every_pass():
    domain = StreamDomain(loader(shuffle=False), "loader", size=10)
    assert domain.size == 10
    assert numbers(domain.batches(5, seed=0), 4) == [list(range(5)), list(range(5, 10))] * 2


@pytest.mark.parametrize("make", [loader, Sized])
def test_the_first_images_of_a_stream_are_a_stream(make):
    arguments = {"shuffle": False} if make is loader else {}
    whole = StreamDomain(make(**arguments), "whole")
    assert numbers(whole.first(10).batches(5, seed=0), 3) == [list(range(5)), list(range(5, 10)), list(range(5))]
    assert numbers(whole.first(10).first(20).once(30)) == [list(range(10))]
    assert numbers(whole.once(30)) == [list(range(SIZE))]
    with pytest.raises(InputError, match="part of a stream; take its first images"):
        whole.split(0.25)[0].first(3)


def test_split_parts_are_disjoint_in_every_pass_though_the_loader_shuffles():
    rest, held_out = StreamDomain(loader(), "loader").split(0.25, seed=1)
    ours = list(itertools.chain(*numbers(rest.batches(1, seed=8), 51)))
    theirs = list(itertools.chain(*numbers(held_out.batches(1, seed=9), 18)))
    assert set(ours) | set(theirs) == set(range(SIZE))
    assert not set(ours) & set(theirs)
    assert (rest.size, held_out.size) == (len(set(ours)), len(set(theirs)))
    with pytest.raises(InputError, match="can't be split again"):
        rest.split(0.5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("known", [True, False])
def test_a_few_images_are_split_so_that_both_parts_have_some_or_it_is_said(seed, known):
    images, labels = VALUES[:20], LABELS[:20]
    source = DataLoader(TensorDataset(images, labels), batch_size=4) if known else [(images, labels)]
    domain = StreamDomain(source, "few")
    if known:
        for part in domain.split(0.02, seed=seed):
            assert sum(len(batch.images) for batch in part.once(8)) == part.size > 0
        return
    try:
        parts = domain.split(0.02, seed=seed)
    except InputError as error:
        assert str(error).startswith("domain 'few' has too few images for one in 50 to be held out")
    else:
        assert all(sum(len(batch.images) for batch in part.once(8)) > 0 for part in parts)


def test_mappings_lone_tensors_and_pixels():
    spec = ImageSpec(channels=1, height=1, width=1, mean=(0.0,), std=(1 / 255,))
    pixels = VALUES.to(torch.uint8)
    domain = StreamDomain([{"pixel_values": pixels, "labels": LABELS}], "mapping", spec=spec)
    batch = next(domain.once(SIZE))
    assert torch.allclose(batch.images, VALUES)
    assert torch.equal(batch.labels, LABELS)
    assert next(StreamDomain([VALUES], "lone").once(2)).labels is None


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        (iter([VALUES]), {}, "iterator, which is used up"),
        ([], {}, "no images"),
        ([VALUES.to(torch.uint8)], {}, "image=ImageSpec"),
        ([(VALUES[0], LABELS)], {}, r"\(1, 1, 1\)"),
        ([{"pictures": VALUES}], {}, "images"),
        ([(VALUES, LABELS[:3])], {}, "3 labels for 23 images"),
        ([(VALUES, LABELS)], {"count": 2}, r"label 2 of image 2 is outside 0\.\.1"),
        ([(VALUES, LABELS - 1)], {}, "label -1 of image 0"),
        (
            [(VALUES, LABELS)],
            {"spec": ImageSpec(channels=3, height=1, width=1, mean=(0,) * 3, std=(1,) * 3)},
            r"\(N, 3, 1, 1\)",
        ),
    ],
)
def test_what_cannot_be_a_domain_is_refused_at_once(source, arguments, text):
    with pytest.raises(InputError, match=text):
        StreamDomain(source, "stream", **arguments)


def test_too_few_images_for_a_batch():
    with pytest.raises(InputError, match="23 images, fewer than one batch of 24"):
        StreamDomain(loader(), "loader").batches(24, seed=0)
    with pytest.raises(InputError, match="fewer images in a pass than one batch of 24"):
        next(StreamDomain(Sized(), "unsized").batches(24, seed=0))


def test_a_limit_spreads_over_a_pass_that_is_sorted_by_class() -> None:
    images, labels = torch.zeros(100, 1, 2, 2), torch.arange(100) // 20
    loader = DataLoader(TensorDataset(images, labels), batch_size=7)
    (batch,) = StreamDomain(loader, "sorted").once(50, limit=20)
    assert batch.labels is not None
    assert batch.labels.tolist() == [(index * 100 // 20) // 20 for index in range(20)]


def test_a_mapped_stream_hands_out_the_same_images_changed():
    plain = StreamDomain(loader(), "loader")
    double = plain.mapped(lambda images: 2 * images, "doubled")
    assert (double.name, double.size, double.labelled, plain.name) == ("doubled", SIZE, True, "loader")
    for one, other in zip((plain, *plain.split(0.25, 4)), (double, *double.split(0.25, 4)), strict=True):
        expected = [[2 * number for number in batch] for batch in numbers(one.batches(3, seed=2, start=2), 4)]
        assert numbers(other.batches(3, seed=2, start=2), 4) == expected
        assert numbers(one.once(3), 1) == numbers(one.once(3), 1)
    assert numbers(double.mapped(lambda images: images + 1).once(2), 1) == [
        [2 * number + 1 for number in numbers(plain.once(2), 1)[0]]
    ]


def test_a_part_of_a_stream_is_not_split_again():
    rest, _ = StreamDomain(loader(), "hall").split(0.25)
    with pytest.raises(InputError, match="domain 'hall.*' is a part of a stream and can't be split again"):
        rest.split(0.25)
