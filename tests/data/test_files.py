import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from modelfence.data.files import folder_records, local_path, loose_records, tar_records
from modelfence.data.named import from_text
from modelfence.data.records import Request
from modelfence.data.sources import as_domain
from modelfence.errors import InputError


def write_tree(root: Path, png, classes: dict[str, list[int]]) -> None:
    for name, values in classes.items():
        (root / name).mkdir(parents=True)
        for number, value in enumerate(values):
            (root / name / f"{number}.png").write_bytes(png(value))


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def first_values(domain) -> list[int]:
    return [round(value) for batch in domain.once(100) for value in batch.images[:, 0, 0, 0].tolist()]


def test_a_tree_of_classes_by_split(tmp_path, png, rgb_spec):
    write_tree(tmp_path / "train", png, {"cat": [1, 2], "ant": [3]})
    write_tree(tmp_path / "test", png, {"cat": [9], "ant": [8]})
    domain = as_domain(str(tmp_path), image=rgb_spec, classes=2)
    assert domain.classes == ("ant", "cat")
    assert first_values(domain) == [3, 1, 2]
    assert next(domain.once(9)).labels.tolist() == [0, 1, 1]
    assert first_values(as_domain(tmp_path, image=rgb_spec, split="test")) == [8, 9]


def test_a_tree_without_splits_is_used_whole(tmp_path, png, rgb_spec):
    write_tree(tmp_path, png, {"cat": [1], "ant": [3]})
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    assert first_values(as_domain(str(tmp_path), image=rgb_spec, split="test")) == [3, 1]


@pytest.mark.parametrize("name", ["train", "test", "val", "dev"])
def test_a_class_may_have_the_name_of_a_split(tmp_path, png, rgb_spec, name):
    write_tree(tmp_path, png, {"bus": [1], "car": [2], name: [3]})
    for split in ("train", "test"):
        assert local_path(tmp_path, split) == ("folder", [tmp_path])
    assert as_domain(str(tmp_path), image=rgb_spec).classes == ("bus", "car", name)
    assert len(first_values(as_domain(str(tmp_path), image=rgb_spec, labelled=False))) == 3


def test_splits_beside_other_folders_are_known_by_the_classes_in_them(tmp_path, png):
    write_tree(tmp_path / "train", png, {"cat": [1]})
    write_tree(tmp_path / "test", png, {"cat": [1]})
    (tmp_path / "notes").mkdir()
    assert local_path(tmp_path, "train") == ("folder", [tmp_path / "train"])
    (tmp_path / "notes").rename(tmp_path / "train.old")
    assert local_path(tmp_path, "test") == ("folder", [tmp_path / "test"])


def test_splits_that_can_not_be_told_from_classes_are_refused(tmp_path, png):
    write_tree(tmp_path, png, {"train": [1], "test": [2], "more": [3]})
    with pytest.raises(InputError, match="test, train can be splits or classes"):
        local_path(tmp_path, "train")


def test_loose_images_may_have_the_name_of_a_split(tmp_path, png, rgb_spec):
    (tmp_path / "test-0001.png").write_bytes(png(4))
    assert first_values(as_domain(str(tmp_path), image=rgb_spec, labelled=False)) == [4]


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path, png, rgb_spec):
    write_tree(tmp_path / "scans [v2]*", png, {"cat": [6]})
    assert first_values(as_domain(str(tmp_path / "scans [v2]*"), image=rgb_spec)) == [6]


def test_a_missing_split_lists_those_there_are(tmp_path, png):
    write_tree(tmp_path / "train", png, {"cat": [1]})
    write_tree(tmp_path / "val", png, {"cat": [1]})
    with pytest.raises(InputError, match="has no split 'test'; it has train, val"):
        local_path(tmp_path, "test")


def test_empty_trees_and_empty_classes(tmp_path, png):
    with pytest.raises(InputError, match="no class folders"):
        folder_records(tmp_path)
    write_tree(tmp_path, png, {"cat": [], "dog": []})
    with pytest.raises(InputError, match="no images in its 2 class folders"):
        folder_records(tmp_path)
    write_tree(tmp_path, png, {"eel": [2, 3], "yak": [1]})
    records = folder_records(tmp_path)
    assert (records.classes, records.labels.tolist()) == (("cat", "dog", "eel", "yak"), [2, 2, 3])


@pytest.mark.parametrize("where", ["", "train", "train/deep"])
def test_images_without_labels_need_no_class_folders(tmp_path, png, rgb_spec, where):
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    for number, value in enumerate([5, 3]):
        (tmp_path / where / f"{number}.png").write_bytes(png(value))
    (tmp_path / where / "notes.txt").write_text("no image")
    domain = from_text(str(tmp_path), Request("scans", rgb_spec, labelled=False))
    assert first_values(domain) == [5, 3]
    assert (domain.labelled, domain.classes) == (False, None)


def test_labels_that_are_not_wanted_are_not_looked_at(tmp_path, png, rgb_spec):
    request = Request("scans", rgb_spec, labelled=False)
    write_tar(tmp_path / "x.tar", {"a.png": png(7), "a.cls": b"no number", "b.png": png(4)})
    domain = from_text(str(tmp_path / "x.tar"), request)
    assert (first_values(domain), domain.labelled) == ([7, 4], False)
    table = pa.table({"image": [{"bytes": png(value)} for value in (6, 2)], "label": ["yes", None]})
    pq.write_table(table, tmp_path / "x.parquet")
    domain = from_text(str(tmp_path / "x.parquet"), request)
    assert (first_values(domain), domain.labelled) == ([6, 2], False)
    domain = from_text("sklearn_digits", request)
    assert (domain.labelled, domain.classes) == (False, None)


def test_without_labels_a_folder_of_classes_has_the_same_images_in_the_same_order(tmp_path, png):
    write_tree(tmp_path, png, {"cat": [1, 2], "a dog": [3], ".hidden": [4]})
    (tmp_path / "preview.png").write_bytes(png(9))
    (tmp_path / "cat" / "folder.png").mkdir()
    labelled, loose = folder_records(tmp_path), loose_records(tmp_path)
    places = [[records.source.where(row) for row in range(records.size)] for records in (labelled, loose)]
    assert places[0] == places[1]
    assert labelled.size == 3


def test_an_empty_folder_has_no_images(tmp_path):
    with pytest.raises(InputError, match="no images; add some"):
        loose_records(tmp_path)


def test_an_undecodable_file_is_named(tmp_path, png, rgb_spec):
    write_tree(tmp_path, png, {"cat": [1, 2]})
    (tmp_path / "cat" / "1.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"cat/1\.png: image can't be decoded"):
        as_domain(str(tmp_path), image=rgb_spec)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        local_path(tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="no such files"):
        local_path(tmp_path / "*.tar", "train")
    (tmp_path / "list.csv").write_text("")
    with pytest.raises(InputError, match="neither"):
        local_path(tmp_path / "list.csv", "train")


def test_shards_are_read_in_place(tmp_path, png, rgb_spec):
    write_tar(tmp_path / "train-000.tar", {"a/1.png": png(5), "a/1.cls": b"1", "a/2.cls": b"0\n", "a/2.png": png(6)})
    write_tar(tmp_path / "train-001.tar", {"3.json": json.dumps({"label": 2}).encode(), "3.png": png(7)})
    write_tar(tmp_path / "test-000.tar", {"4.png": png(8), "4.cls": b"0"})
    domain = as_domain(str(tmp_path), image=rgb_spec, classes=3)
    assert first_values(domain) == [5, 6, 7]
    assert next(domain.once(9)).labels.tolist() == [1, 0, 2]
    on_disk = as_domain(str(tmp_path), image=rgb_spec, memory_limit_gib=0.0)
    for mine, theirs in zip(domain.once(2), on_disk.once(2), strict=True):
        assert torch.equal(mine.images, theirs.images)
    assert first_values(as_domain(str(tmp_path / "*.tar"), image=rgb_spec)) == [8, 5, 6, 7]
    assert first_values(as_domain(str(tmp_path / "test-000.tar"), image=rgb_spec)) == [8]


def test_a_label_beside_other_facts_is_kept(tmp_path, png, rgb_spec):
    facts = b'{"width": 4}'
    first, second = {"1.png": png(5), "1.cls": b"1", "1.json": facts}, {"2.json": facts, "2.cls": b"0", "2.png": png(6)}
    write_tar(tmp_path / "x.tar", first | second)
    assert next(as_domain(str(tmp_path / "x.tar"), image=rgb_spec, classes=3).once(9)).labels.tolist() == [1, 0]


@pytest.mark.parametrize(("name", "content"), [("cls", b"+3"), ("cls", b" 3\n"), ("json", b'{"label": 3.0}')])
def test_every_way_to_write_a_whole_number_is_a_label(tmp_path, png, name, content):
    write_tar(tmp_path / "x.tar", {"1.png": png(5), f"1.{name}": content})
    assert tar_records([tmp_path / "x.tar"]).labels.tolist() == [3]


def test_shards_without_labels_are_unlabelled(tmp_path, png, rgb_spec):
    write_tar(tmp_path / "x.tar", {"1.png": png(5)})
    assert not as_domain(str(tmp_path / "x.tar"), image=rgb_spec).labelled


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"1.png": b"", "1.cls": b"0", "2.png": b""}, r"2\.png has no label"),
        ({"1.png": b"", "1.cls": b"cat"}, r"1\.cls has no whole number"),
        ({"1.png": b"", "1.json": b"{"}, r"1\.json has no whole number"),
        ({"1.png": b"", "1.cls": b"9" * 30}, r"1\.cls has no whole number \(of 64 bits\)"),
        ({"1.png": b"", "1.json": b'{"label": 9223372036854775808}'}, r"1\.json has no whole number"),
        ({"1.png": b"", "1.cls": b"3", "1.json": b'{"label": 5}'}, r"1 has two labels, 3 and 5; keep one"),
        ({"1.png": b"", "1.json": b'{"label": 2.7}'}, r"1\.json has no whole number"),
        ({"1.png": b"", "1.json": b'{"label": true}'}, r"1\.json has no whole number"),
        ({"1.png": b"", "1.json": b'{"label": "1.0"}'}, r"1\.json has no whole number"),
        ({"1.png": b"", "1.cls": b"1_0"}, r"1\.cls has no whole number"),
        ({"1.png": b"", "1.cls": b"\xff"}, r"1\.cls has no whole number"),
        ({"readme.txt": b"hello"}, "no images in 1 shards"),
    ],
)
def test_wrong_shards_name_the_sample(tmp_path, members, text):
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(InputError, match=rf"x\.tar: .*{text}"):
        tar_records([tmp_path / "x.tar"])


def test_truncated_and_compressed_shards(tmp_path, png):
    write_tar(tmp_path / "cut.tar", {f"{n}.png": png(n) * 20 for n in range(9)})
    whole = (tmp_path / "cut.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:3000])
    with pytest.raises(InputError, match=r"cut\.tar: can't be read"):
        tar_records([tmp_path / "cut.tar"])
    write_tar(tmp_path / "packed.tar", {"1.png": png(1)}, mode="w:gz")
    with pytest.raises(InputError, match=r"packed\.tar: can't be read as an uncompressed tar"):
        tar_records([tmp_path / "packed.tar"])
