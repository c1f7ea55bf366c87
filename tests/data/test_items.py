import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from modelfence.data.sources import as_domain
from modelfence.errors import InputError


class Listed(Dataset):
    """Items from a list, with a count of how often they are read."""

    def __init__(self, items, classes=None):
        self.items = items
        self.reads = 0
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


class Streamed(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def pictures(count: int = 10) -> list[tuple[Image.Image, int]]:
    return [(Image.fromarray(np.full((8, 8), row, dtype=np.uint8)), row % 3) for row in range(count)]


def values(domain) -> list[int]:
    return [round(value) for batch in domain.once(100) for value in batch.images[:, 0, 0, 0].tolist()]


@pytest.mark.parametrize("limit", [4.0, 0.0])
def test_map_style_datasets(rgb_spec, limit):
    domain = as_domain(Listed(pictures(), ["a", "b", "c"]), image=rgb_spec, classes=3, memory_limit_gib=limit)
    assert domain.classes == ("a", "b", "c")
    assert values(domain) == list(range(10))
    assert next(domain.once(10)).labels.tolist() == [row % 3 for row in range(10)]


def test_images_in_memory_are_read_once(rgb_spec):
    dataset = Listed(pictures())
    domain = as_domain(dataset, image=rgb_spec)
    reads = dataset.reads
    values(domain)
    assert dataset.reads == reads <= 11


@pytest.mark.parametrize("limit", [4.0, 0.0])
def test_floats_are_what_the_model_eats(limit):
    items = [(torch.full((1, 2, 2), float(row)), torch.tensor(row % 3)) for row in range(5)]
    domain = as_domain(Listed(items), memory_limit_gib=limit, classes=3)
    assert values(domain) == list(range(5))
    assert next(domain.once(5)).labels.tolist() == [0, 1, 2, 0, 1]


def test_mappings_arrays_and_lone_images(rgb_spec):
    array = np.full((4, 4, 3), 7, dtype=np.uint8)
    assert values(as_domain(Listed([{"image": array, "label": np.int64(1)}]), image=rgb_spec)) == [7]
    lone = as_domain(Listed([array, array]), image=rgb_spec)
    assert values(lone) == [7, 7]
    assert not lone.labelled


def test_size_chooses_the_same_images_each_time(rgb_spec):
    chosen = values(as_domain(Listed(pictures(50)), image=rgb_spec, size=5))
    assert len(set(chosen)) == 5
    assert values(as_domain(Listed(pictures(50)), image=rgb_spec, size=5)) == chosen
    assert values(as_domain(as_domain(Listed(pictures(50)), image=rgb_spec), size=5)) == chosen


@pytest.mark.parametrize(
    ("items", "arguments", "text"),
    [
        ([], {}, "'things' has no images"),
        ([(pictures(1)[0][0], None), pictures(1)[0]], {}, "image 0 has no label"),
        ([(pictures(1)[0][0], "cat")], {}, "image 0: label is 'cat'"),
        ([(pictures(1)[0][0], 5)], {"classes": 3}, r"label 5 of image 0 is outside 0\.\.2"),
        ([{"photo": pictures(1)[0][0]}], {}, "keys photo"),
        ([(torch.zeros(3, 9, 9), 0)], {}, r"image 0: shape \(1, 3, 9, 9\) doesn't fit"),
        ([(b"broken", 0)], {}, "image 0: image can't be decoded"),
    ],
)
@pytest.mark.parametrize("kind", [Listed, Streamed])
def test_what_does_not_fit_is_named(rgb_spec, kind, items, arguments, text):
    if kind is Streamed:
        text = text.replace("image 0 has", "some images have").replace("image 0:", "image 0 of a pass:")
    with pytest.raises(InputError, match=text):
        as_domain(kind(items), name="things", image=rgb_spec, **arguments)


def test_float_images_of_different_sizes():
    with pytest.raises(InputError, match=r"image 1: shape \(1, 3, 3\), the first has \(1, 2, 2\)"):
        as_domain(Listed([torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)]))


def test_pixels_need_a_spec():
    with pytest.raises(InputError, match=r"give image=ImageSpec"):
        as_domain(Listed(pictures()))


def test_iterable_datasets_of_single_images_and_of_batches(rgb_spec):
    single = as_domain(Streamed(pictures()), image=rgb_spec, classes=3, size=8)
    assert values(single) == list(range(8))
    assert next(single.once(8)).labels.tolist() == [row % 3 for row in range(8)]
    batched = as_domain(Streamed([(torch.ones(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64))] * 2))
    assert values(batched) == [1] * 8


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_pipelines(tmp_path, png, rgb_spec):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for row in range(9):
            writer.write({"__key__": f"{row:03}", "png": png(row), "cls": row % 3})
    pipeline = webdataset.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False).decode("pil").to_tuple("png", "cls")
    domain = as_domain(pipeline, image=rgb_spec, classes=3)
    assert values(domain) == list(range(9))
    first = [batch.labels.tolist() for batch, _ in zip(domain.batches(4, seed=0), range(4), strict=False)]
    assert first == [[0, 1, 2, 0], [1, 2, 0, 1]] * 2
    assert values(as_domain(str(tmp_path / "x.tar"), image=rgb_spec)) == list(range(9))


class Raising(Listed):
    """A data set of somebody else whose own code fails at one image."""

    def __getitem__(self, index):
        if index == 7:
            raise KeyError("lost\nbehind a line")
        return super().__getitem__(index)


class RaisingStream(Streamed):
    def __iter__(self):
        yield from self.items[:7]
        raise OSError("the disk went away")


class Unmeasured(Dataset):
    def __getitem__(self, index):
        return pictures(1)[0]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Raising(pictures()), r"domain 'ward': image 7 can't be read \(KeyError: .*lost.*line"),
        (lambda: RaisingStream(pictures()), r"domain 'ward': after image 0 of a pass can't be read .OSError: the"),
        (lambda: RaisingStream([]), r"domain 'ward': image 0 can't be read \(OSError: the disk"),
        (Unmeasured, r"domain 'ward': its length can't be had"),
    ],
    ids=["map", "stream", "first of a stream", "no length"],
)
def test_a_data_set_whose_code_raises_is_named_in_one_line(make, where, grey_spec):
    with pytest.raises(InputError, match=where) as caught:
        for _ in as_domain(make(), name="ward", image=grey_spec).once(4):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_whose_data_set_raises_is_named_in_one_line(workers):
    tensors = [(torch.zeros(1, 8, 8), 0)] * 10
    loader = torch.utils.data.DataLoader(Raising(tensors), batch_size=2, num_workers=workers)
    with pytest.raises(InputError, match=r"domain 'ward': after image 6 of a pass can't be read \(KeyError") as caught:
        for _ in as_domain(loader, name="ward").once(4):
            pass
    assert "\n" not in str(caught.value)
