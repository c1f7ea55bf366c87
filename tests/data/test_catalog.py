import re

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value

from modelfence.data import catalog
from modelfence.data.sources import as_domain
from modelfence.errors import InputError

EXPECTED = {
    "mnist",
    "usps",
    "svhn",
    "mnist_m",
    "syn_digits",
    "cifar10",
    "stl10",
    "cinic10",
    "cinic10_imagenet",
    "visda_t",
    "visda_v",
    "office_home_art",
    "office_home_clipart",
    "office_home_product",
    "office_home_real",
    "pacs_photo",
    "pacs_art_painting",
    "pacs_cartoon",
    "pacs_sketch",
    "domainnet_clipart",
    "domainnet_infograph",
    "domainnet_painting",
    "domainnet_quickdraw",
    "domainnet_real",
    "domainnet_sketch",
    "sklearn_digits",
    "photo_digits",
    "font_digits",
}


def hub_table(png, label_names, **columns):
    count = len(next(iter(columns.values())))
    features = {"image": Image(), "label": ClassLabel(names=label_names)}
    features |= {name: Value("string") for name in columns if name not in features}
    images = [{"bytes": png(row), "path": None} for row in range(count)]
    return Dataset.from_dict({"image": images, **columns}, features=Features(features))


@pytest.fixture
def hub(monkeypatch):
    """Put a table in place of the hub."""

    def put(dataset):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_kwargs: dataset)

    return put


def test_every_domain_is_listed_and_complete():
    assert set(catalog.names()) == EXPECTED
    for name in catalog.names():
        entry = catalog.lookup(name)
        assert entry.title
        assert entry.licence
        assert (entry.hub is not None) == (entry.source == "hub")
        assert entry.hub is None or re.fullmatch(r"[\w.-]+/[\w.-]+", entry.hub)
        assert not entry.label_map or sorted(entry.label_map) == list(range(len(entry.classes)))


def test_families_share_their_number_of_classes():
    sizes = {}
    for name in catalog.names():
        entry = catalog.lookup(name)
        sizes.setdefault(entry.family, set()).add(len(entry.classes))
    assert sizes == {
        "digits": {10},
        "objects": {10},
        "visda": {12},
        "office_home": {65},
        "pacs": {7},
        "domainnet": {0},
    }


def test_stl10s_label_map_leads_from_its_order_to_cifar10s():
    entry = catalog.lookup("stl10")
    names = ["airplane", "bird", "automobile", "cat", "deer", "dog", "horse", "frog/monkey", "ship", "truck"]
    assert [entry.classes[entry.label_map[index]] for index in range(10)] == names


def test_unknown_names_get_the_nearest(rgb_spec):
    with pytest.raises(InputError, match=r"unknown domain 'mnits'\. Did you mean 'mnist'"):
        as_domain("mnits", image=rgb_spec)
    with pytest.raises(InputError, match="no such file or folder"):
        as_domain("./mnits", image=rgb_spec)


def test_unknown_splits_are_errors(rgb_spec):
    with pytest.raises(InputError, match=r"no split 'tset'\. Did you mean 'test'"):
        as_domain("mnist", image=rgb_spec, split="tset")


def test_local_files_go_before_the_hub(tmp_path, monkeypatch, png, rgb_spec, hub):
    hub(None)
    monkeypatch.setenv("MODELFENCE_DATA", str(tmp_path))
    (tmp_path / "pacs_photo").mkdir()
    names = list(catalog.lookup("pacs_photo").classes)
    hub_table(png, names, label=[6, 0]).to_parquet(tmp_path / "pacs_photo" / "train.parquet")
    domain = as_domain("pacs_photo", image=rgb_spec, classes=7)
    assert next(domain.once(2)).labels.tolist() == [6, 0]
    with pytest.raises(InputError, match=r"pacs_photo/test\.parquet is missing"):
        as_domain("pacs_photo", image=rgb_spec, split="test")


def test_the_hubs_stl10_is_put_into_cifar10s_order(png, rgb_spec, hub):
    hub(hub_table(png, [str(n) for n in range(10)], label=list(range(10))))
    domain = as_domain("stl10", image=rgb_spec, classes=10)
    assert next(domain.once(10)).labels.tolist() == [0, 2, 1, 3, 4, 5, 7, 6, 8, 9]
    assert domain.classes == catalog.lookup("stl10").classes


def test_rows_of_a_domain_are_chosen_and_split_the_same_each_time(png, rgb_spec, hub):
    names = list(catalog.lookup("pacs_photo").classes)
    hub(hub_table(png, names, label=[row % 7 for row in range(40)], domain=["photo", "sketch"] * 20))

    def numbers(name: str, split: str) -> set[int]:
        images = next(as_domain(name, image=rgb_spec, split=split).once(40)).images[:, 0, 0, 0]
        return {round(value) for value in images.tolist()}

    train, test = numbers("pacs_photo", "train"), numbers("pacs_photo", "test")
    assert (len(train), len(test)) == (16, 4)
    assert train | test == set(range(0, 40, 2))
    assert numbers("pacs_photo", "test") == test
    assert numbers("pacs_sketch", "train") <= set(range(1, 40, 2))
    with pytest.raises(InputError, match="no rows with domain = 'cartoon'"):
        as_domain("pacs_cartoon", image=rgb_spec)


def test_rows_can_be_chosen_by_class_name(png, rgb_spec, hub):
    table = hub_table(png, ["x", "y"], label=[0, 1, 0], domain=["real", "clipart", "real"])
    hub(table.cast_column("domain", ClassLabel(names=["clipart", "real"])))
    domain = as_domain("domainnet_real", image=rgb_spec)
    assert domain.size == 2
    assert domain.classes == ("x", "y")


def test_domains_without_a_hub_copy_say_what_to_do(rgb_spec):
    with pytest.raises(InputError, match=r"put its train\.parquet and test\.parquet into a folder syn_digits"):
        as_domain("syn_digits", image=rgb_spec)


def test_real_domains_load(data_root, monkeypatch, rgb_spec):
    monkeypatch.setenv("MODELFENCE_DATA", str(data_root))
    domain = as_domain("usps", image=rgb_spec, split="test", classes=10)
    assert domain.size == 1007
    batch = next(domain.batches(64, seed=0))
    assert batch.images.shape == (64, 3, 4, 4)
    assert torch.equal(batch.images[:, 0], batch.images[:, 1])
    assert set(as_domain("stl10", image=rgb_spec, size=50).classes) >= {"frog/monkey"}
