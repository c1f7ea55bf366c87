import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.ownership.conftest import SPEC, Confined, Plain

from modelfence.data.domain import IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.ownership.predictions import export_queries, read_predictions
from modelfence.ownership.verification import judge, verify
from modelfence.ownership.watermark import Watermark

MARK = Watermark("objects")
KEY = "image,label\na,0\nb,1\nc,2\n"
ANSWERS = "image,clean,marked\nc,2,0\na,0,3\nb,1,1\n"


def pixels_of(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def test_an_outsider_s_answers_give_the_verdict_of_the_weights(
    plain: Plain, clean: IndexedDomain, tmp_path: Path
) -> None:
    key = export_queries(clean, MARK, tmp_path / "ask", images=80)
    handed = tmp_path / "ask" / "queries"
    assert key == tmp_path / "ask" / "labels.csv"
    assert sorted(path.name for path in handed.iterdir()) == ["clean", "marked", "queries.csv"]
    with (handed / "queries.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (len(rows), list(rows[0])) == (80, ["image", "clean", "marked"])
    suspect = Confined(plain)
    for row in rows:
        before, after = pixels_of(handed / row["clean"]), pixels_of(handed / row["marked"])
        assert torch.equal(MARK.apply(before[None])[0], after)
        for kind, pixels in (("clean", before), ("marked", after)):
            row[kind] = str(int(suspect(SPEC.normalize(pixels[None])).argmax()))
    with (tmp_path / "answers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["marked", "image", "clean"])
        writer.writeheader()
        writer.writerows(reversed(rows))
    verdict = judge(read_predictions(tmp_path / "answers.csv", key))
    direct = verify(suspect, clean, MARK, images=80)
    assert (verdict.lost, verdict.won, verdict.right_clean) == (direct.lost, direct.won, direct.right_clean)
    assert verdict.holds


def assert_named(folder: Path, count: int) -> None:
    """Names of one export, numbered."""
    names = sorted(path.stem for path in folder.iterdir())
    export = names[0].partition("-")[0]
    assert re.fullmatch("[0-9a-f]{8}", export)
    assert names == [f"{export}-{number:05d}" for number in range(count)]


@pytest.mark.parametrize("other", [{"seed": 1}, {"images": 40}, {"watermark": Watermark("visda")}])
def test_answers_to_another_export_are_refused(tmp_path: Path, clean: IndexedDomain, other: dict[str, Any]) -> None:
    key, another = (
        export_queries(clean, folder=tmp_path / name, **{"watermark": MARK, "images": 60, **given})
        for name, given in (("one", {}), ("two", other))
    )
    names = [line.split(",")[0] for line in key.read_text().splitlines()[1:]]
    answers = tmp_path / "answers.csv"
    answers.write_text("image,clean,marked\n" + "".join(f"{name},0,0\n" for name in names))
    assert len(read_predictions(answers, key)) == 60
    with pytest.raises(InputError, match=f"image {names[0]!r} isn't in .*labels.csv; answer the images"):
        read_predictions(answers, another)


def test_names_and_order_of_the_queries_don_t_give_labels_away(tmp_path: Path, clean: IndexedDomain) -> None:
    assert clean.labels is not None
    by_class = clean.subset(clean.labels.argsort())
    key = export_queries(by_class, MARK, tmp_path, images=60)
    labels = [int(line.split(",")[1]) for line in key.read_text().splitlines()[1:]]
    assert labels != sorted(labels)
    assert_named(tmp_path / "queries/clean", 60)
    assert "label" not in (tmp_path / "queries/queries.csv").read_text()


def test_queries_that_can_not_be_written(tmp_path: Path, clean: IndexedDomain) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="isn't empty; replace queries in it with --force") as caught:
        export_queries(clean, MARK, tmp_path)
    assert "--resume" not in str(caught.value)
    pixels = torch.zeros(3, 2, 4, 4, dtype=torch.uint8)
    spec = ImageSpec(channels=2, height=4, width=4, mean=(0.0,) * 2, std=(1.0,) * 2)
    two = IndexedDomain("two", pixels.__getitem__, 3, spec=spec, labels=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match="domain 'two' has 2 channels"):
        export_queries(two, MARK, tmp_path / "new")
    unlabelled = IndexedDomain("bare", pixels.__getitem__, 3, spec=spec)
    with pytest.raises(InputError, match="domain 'bare' has 2 channels"):
        export_queries(unlabelled, MARK, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_new_queries_leave_nothing_of_earlier_ones(tmp_path: Path, clean: IndexedDomain) -> None:
    export_queries(clean, MARK, tmp_path, images=60)
    (tmp_path / "queries/read me.txt").write_text("kept")
    (tmp_path / "labels.csv").unlink()  # as if the earlier one had been killed
    (tmp_path / "queries/clean/00007.png").write_bytes(b"named as images once were")
    key = export_queries(clean, MARK, tmp_path, images=20, force=True)
    for kind in ("clean", "marked"):
        assert_named(tmp_path / "queries" / kind, 20)
    assert len(key.read_text().splitlines()) == 21
    assert (tmp_path / "queries/read me.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "name", ["labels.csv", "queries/queries.csv", "queries/clean/00003.png", "queries/marked/123456.png", "queries"]
)
def test_files_of_others_are_not_replaced_even_by_force(tmp_path: Path, clean: IndexedDomain, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("image,label,remark\nmine,1,x\n")
    with pytest.raises(InputError, match=f"{name}: wasn't written by modelfence; move it away") as caught:
        export_queries(clean, MARK, tmp_path, images=20, force=True)
    assert "\n" not in str(caught.value)
    assert file.read_text() == "image,label,remark\nmine,1,x\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_folder_in_the_place_of_the_key(tmp_path: Path, clean: IndexedDomain) -> None:
    (tmp_path / "labels.csv").mkdir()
    with pytest.raises(InputError, match=r"labels\.csv: wasn't written by modelfence"):
        export_queries(clean, MARK, tmp_path, images=20, force=True)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_a_text_that_can_be_no_path(clean: IndexedDomain, name: str) -> None:
    for use in (
        lambda: export_queries(clean, MARK, name),
        lambda: read_predictions(name),
        lambda: read_predictions(__file__, name),
    ):
        with pytest.raises(InputError) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_rows_and_columns_come_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "key.csv").write_text(KEY)
    (tmp_path / "answers.csv").write_text(
        "\ufeffmarked, image ,clean\r\n0,c,2\r\n\r\n3,a,0\r\n1,b,1\r\n", encoding="utf-8"
    )
    found = read_predictions(tmp_path / "answers.csv", tmp_path / "key.csv")
    assert (found.labels.tolist(), found.clean.tolist(), found.marked.tolist()) == ([0, 1, 2], [0, 1, 2], [3, 1, 0])


def test_a_file_with_its_own_labels(tmp_path: Path) -> None:
    (tmp_path / "answers.csv").write_text("image,label,clean,marked\nx,4,4,1\ny,0,0,0\n")
    found = read_predictions(tmp_path / "answers.csv")
    assert (found.labels.tolist(), found.marked.tolist()) == ([4, 0], [1, 0])


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "line 1: has the columns none; image, clean, marked are needed"),
        ("image,clean\na,0\n", "line 1: has the columns image, clean;"),
        (ANSWERS.replace("marked", "label"), "has the columns image, clean, label"),
        ("image,clean,marked,label\na,0,0,0\n", "has the columns image, clean, marked, label"),
        ("image,clean,clean\na,0,0\n", "has the columns image, clean, clean"),
        ("image,clean,marked\n", "has no rows"),
        (ANSWERS.replace("b,1,1\n", ""), "no row for image 'b'; every image of"),
        ("image,clean,marked\nc,2,0\n", "no row for image 'a' and 1 more"),
        (ANSWERS + "a,0,0\n", "line 5: image 'a' is there twice"),
        (ANSWERS + "d,0,0\n", "image 'd' isn't in"),
        (ANSWERS.replace("b,1,1", "b,1"), "line 4: has 2 values; 3 are needed"),
        (ANSWERS.replace("b,1,1", "b,1.0,1"), "line 4: clean is '1.0'; a class, a whole number from 0"),
        (ANSWERS.replace("b,1,1", "b,1,cat"), "line 4: marked is 'cat'"),
        (ANSWERS.replace("b,1,1", "b,-1,1"), "line 4: clean is '-1'"),
        (ANSWERS.replace("b,1,1", "b,,1"), "line 4: clean is ''"),
        (ANSWERS.replace("b,1,1", "b,²,1"), "line 4: clean is '²'"),
        (ANSWERS.replace("b,1,1", "b,99999999999999999999,1"), "line 4: clean is '9999"),
        (ANSWERS.replace("b,1,1", 'b,"1,1'), "isn't a CSV file"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(text: str, fragment: str, tmp_path: Path) -> None:
    (tmp_path / "key.csv").write_text(KEY)
    (tmp_path / "answers.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_predictions(tmp_path / "answers.csv", tmp_path / "key.csv")
    assert str(caught.value).startswith(f"{tmp_path / 'answers.csv'}: ")
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_labels_asks_for_the_key(tmp_path: Path) -> None:
    (tmp_path / "answers.csv").write_text(ANSWERS)
    with pytest.raises(
        InputError, match=r"answers\.csv: line 1: has no column label; give --labels labels\.csv"
    ) as caught:
        read_predictions(tmp_path / "answers.csv")
    assert "\n" not in str(caught.value)
    (tmp_path / "answers.csv").write_text("image,clean\na,0\n")
    with pytest.raises(InputError, match="has the columns image, clean; image, clean, marked, label are needed"):
        read_predictions(tmp_path / "answers.csv")


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.csv: can't be read \(No such file"):
        read_predictions(tmp_path / "nowhere.csv")
    (tmp_path / "bytes.csv").write_bytes(b"image,clean,marked,label\n\xff\xfe,0,0,0\n")
    with pytest.raises(InputError, match="bytes.csv: isn't a CSV file in UTF-8"):
        read_predictions(tmp_path / "bytes.csv")
    (tmp_path / "answers.csv").write_text(ANSWERS)
    (tmp_path / "key.csv").write_text(ANSWERS)
    with pytest.raises(InputError, match="key.csv: line 1: has the columns image, clean, marked; image, label"):
        read_predictions(tmp_path / "answers.csv", tmp_path / "key.csv")
