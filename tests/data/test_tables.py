import dataclasses

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

from modelfence.data import tables
from modelfence.data.sources import as_domain
from modelfence.errors import InputError

CLASSES = ("ant", "bee", "cat")


def table(png, labels=(0, 1, 2, 1), feature=None, image="image", label="label") -> Dataset:
    features = Features({image: Image(), label: feature or ClassLabel(names=list(CLASSES))})
    images = [{"bytes": png(10 * row), "path": f"{row}.png"} for row in range(len(labels))]
    return Dataset.from_dict({image: images, label: list(labels)}, features=features)


def values(domain) -> list[int]:
    return [round(value) for batch in domain.once(100) for value in batch.images[:, 0, 0, 0].tolist()]


def labels(domain) -> list[int]:
    return torch.cat([batch.labels for batch in domain.once(100)]).tolist()


@pytest.fixture
def folder(tmp_path, png):
    table(png).to_parquet(tmp_path / "train.parquet")
    table(png, labels=(2, 0)).to_parquet(tmp_path / "test.parquet")
    return tmp_path


@pytest.mark.parametrize("limit", [4.0, 0.0])
def test_parquet_by_folder_and_by_file(folder, rgb_spec, limit, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    domain = as_domain(str(folder), image=rgb_spec, classes=3, memory_limit_gib=limit)
    assert domain.classes == CLASSES
    assert values(domain) == [0, 10, 20, 30]
    assert labels(domain) == [0, 1, 2, 1]
    assert labels(as_domain(str(folder), image=rgb_spec, split="test", memory_limit_gib=limit)) == [2, 0]
    assert labels(as_domain(folder / "test.parquet", image=rgb_spec, memory_limit_gib=limit)) == [2, 0]


def test_parquet_parts_are_joined(tmp_path, png, rgb_spec):
    (tmp_path / "data").mkdir()
    table(png, labels=(0, 1)).to_parquet(tmp_path / "data" / "train-00000-of-00002.parquet")
    table(png, labels=(2,)).to_parquet(tmp_path / "data" / "train-00001-of-00002.parquet")
    assert labels(as_domain(str(tmp_path), image=rgb_spec)) == [0, 1, 2]


def test_a_dataset_and_a_dictionary_of_them(png, rgb_spec):
    splits = DatasetDict({"train": table(png), "test": table(png, labels=(2, 0))})
    assert labels(as_domain(splits, image=rgb_spec, split="test")) == [2, 0]
    assert labels(as_domain(table(png).select([2, 0]), image=rgb_spec)) == [2, 0]
    assert values(as_domain(table(png).with_format("torch"), image=rgb_spec)) == [0, 10, 20, 30]
    with pytest.raises(InputError, match="no split 'val'; it has train, test"):
        as_domain(splits, image=rgb_spec, split="val")


def test_columns_are_found_by_type_and_name_or_named(png, rgb_spec):
    odd = table(png, image="picture", label="kind")
    assert labels(as_domain(odd, image=rgb_spec)) == [0, 1, 2, 1]
    two = odd.add_column("label", [1, 1, 1, 1])
    assert labels(as_domain(two, image=rgb_spec)) == [1, 1, 1, 1]
    assert labels(as_domain(two, image=rgb_spec, label_column="kind", image_column="picture")) == [0, 1, 2, 1]
    with pytest.raises(InputError, match="no column 'sort'; there are picture, kind"):
        as_domain(odd, image=rgb_spec, label_column="sort")
    with pytest.raises(InputError, match="no image column among label"):
        as_domain(two.remove_columns(["picture", "kind"]), image=rgb_spec)
    assert not as_domain(odd.remove_columns("kind"), image=rgb_spec).labelled


def test_several_class_columns_need_a_choice(png, rgb_spec):
    both = table(png, label="kind").add_column("shape", [0, 0, 0, 0]).cast_column("shape", ClassLabel(names=["x"]))
    with pytest.raises(InputError, match="several class columns"):
        as_domain(both, image=rgb_spec)


@pytest.mark.parametrize(
    ("given", "feature", "text"),
    [
        ((0, None), Value("int64"), "row 1 has no label"),
        ((0, -1), Value("int64"), "label -1 of image 1 is negative"),
        ((0, 3), Value("int64"), r"label 3 of image 1 is outside 0\.\.2"),
        (("a", "b"), Value("string"), "holds string"),
    ],
)
def test_labels_that_do_not_fit(png, rgb_spec, given, feature, text):
    with pytest.raises(InputError, match=f"'bugs'.*{text}"):
        as_domain(table(png, labels=given, feature=feature), name="bugs", image=rgb_spec, classes=3)


def test_an_undecodable_row_is_named(tmp_path, png, rgb_spec):
    rows = table(png).to_list()
    rows[2]["image"]["bytes"] = b"broken"
    Dataset.from_list(rows, features=table(png).features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"train\.parquet: row 2: image can't be decoded"):
        as_domain(str(tmp_path), image=rgb_spec)


def test_a_broken_file_and_an_empty_one(tmp_path, png, rgb_spec):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 but not for long")
    with pytest.raises(InputError, match=r"train\.parquet: can't be read as parquet"):
        as_domain(str(tmp_path), image=rgb_spec)
    table(png).select([]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match="split 'train' has no images"):
        as_domain(str(tmp_path), image=rgb_spec)


def test_another_number_of_classes_is_refused(png, rgb_spec):
    with pytest.raises(InputError, match=r"'bugs' has 3 classes \(ant, bee, cat\), the model 4"):
        as_domain(table(png), name="bugs", image=rgb_spec, classes=4)


def test_a_transform_is_applied(png):
    def half(batch):
        return {"pixel_values": [torch.full((1, 2, 2), 0.5)] * len(batch["label"]), "label": batch["label"]}

    domain = as_domain(table(png).with_transform(half))
    assert next(domain.once(4)).images.unique().tolist() == [0.5]
    assert labels(domain) == [0, 1, 2, 1]


def test_streamed_datasets_shuffle_anew_each_pass_and_repeat(png, rgb_spec):
    def stream():
        return table(png, labels=[0, 1, 2] * 8).to_iterable_dataset(num_shards=3)

    def order(seed: int) -> list[int]:
        batches = as_domain(stream(), image=rgb_spec, classes=3).batches(8, seed=seed)
        return [round(v) for _ in range(6) for v in next(batches).images[:, 0, 0, 0].tolist()]

    domain = as_domain(stream(), image=rgb_spec, classes=3)
    assert domain.classes == CLASSES
    assert domain.size is None
    assert order(0) == order(0)
    assert sorted(order(0)[:24]) == sorted(order(0)[24:]) == [10 * row for row in range(24)]
    assert order(0)[:24] != order(0)[24:]
    assert order(0) != order(1)
    for batch in domain.once(24):
        assert torch.equal(batch.labels, (batch.images[:, 0, 0, 0] / 10).round().long() % 3)


def test_a_streamed_image_that_cannot_be_decoded(png, rgb_spec):
    rows = table(png).to_list()
    rows[3]["image"]["bytes"] = b"broken"
    broken = Dataset.from_list(rows, features=table(png).features).to_iterable_dataset()
    with pytest.raises(InputError, match=r"'bugs': image \d of a pass: image can't be decoded"):
        as_domain(broken, name="bugs", image=rgb_spec)


def test_size_takes_the_same_images_of_a_stream_in_each_pass(png, rgb_spec):
    batches = as_domain(table(png, labels=[0] * 20).to_iterable_dataset(), image=rgb_spec, size=6).batches(6, seed=0)
    seen = [sorted(round(value) for value in next(batches).images[:, 0, 0, 0].tolist()) for _ in range(3)]
    assert seen == [[0, 10, 20, 30, 40, 50]] * 3


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError("no network"), "no network"),
        (ValueError('Unknown split "test".\nShould be one of ["train"].'), "Unknown split"),
        (datasets.exceptions.DatasetNotFoundError("doesn't exist"), "doesn't exist"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch, rgb_spec, error, text):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=text) as caught:
        as_domain("hub:owner/bugs", image=rgb_spec, split="test")
    assert "\n" not in str(caught.value)
    assert "'owner/bugs'" in str(caught.value)


def test_hub_names_are_passed_on(monkeypatch, png, rgb_spec):
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or table(png))
    assert as_domain("hub:owner/bugs:small", image=rgb_spec).size == 4
    assert calls == [(("owner/bugs", "small"), {"split": "train"})]
    with pytest.raises(InputError, match="hub:owner/name"):
        as_domain("hub:bugs", image=rgb_spec)


def test_encoded_takes_bytes_before_paths():
    assert tables.encoded({"bytes": b"x", "path": "y"}, "row 0") == b"x"
    assert tables.encoded({"bytes": None, "path": "y"}, "row 0") == "y"


@pytest.mark.parametrize("pixels", [[[0.0, 0.5]], [[0, 256]], [[-1, 0]], [[1, 2], [3]], [], [["a"]]])
def test_pixels_in_lists_are_whole_numbers_of_a_byte(pixels):
    with pytest.raises(InputError, match=r"^here: row 3: pixels in lists have to be whole numbers 0\.\.255"):
        tables.encoded(pixels, "here: row 3")


def test_pixels_in_lists_are_taken_as_they_are(rgb_spec):
    dataset = Dataset.from_dict({"image": [[[0, 255], [7, 8]]] * 2, "label": [0, 1]})
    grey = dataclasses.replace(rgb_spec, height=2, width=2)
    assert values(as_domain(dataset, image=grey)) == [0, 0]
    assert tables.encoded([[0, 255], [7, 8]], "x").tolist() == [[0, 255], [7, 8]]
    with pytest.raises(InputError, match="row 0: pixels in lists"):
        as_domain(Dataset.from_dict({"image": [[[0.5]]], "label": [0]}), image=rgb_spec)
