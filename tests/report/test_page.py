"""The page: complete, self-contained, safe against hostile names."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch

from modelfence.report.page import write_report
from modelfence.report.sheets import Sheets

HOSTILE = '"><script>alert(1)</script><img src=x onerror="x">'
VOID = {"meta", "br", "img", "wbr", "input", "hr", "link"}


class Strict(HTMLParser):
    """Checks that tags nest and remembers what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(path) -> Strict:
    parser = Strict()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def full(make_evaluation, tmp_path_factory):
    return write_report(
        tmp_path_factory.mktemp("report"),
        evaluation=make_evaluation(["mnist", "usps", HOSTILE]),
        layers=[("features.0.weight", 95, 100), (HOSTILE, 1, 2)],
        history=[
            {"step": step, "loss": 1.0, "source_accuracy": 0.9, f"target_accuracy:{HOSTILE}": 0.2} for step in (0, 9)
        ],
        samples={
            "mnist": torch.zeros(3, 1, 8, 8, dtype=torch.uint8),
            HOSTILE: torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
        },
        config={"method": {"name": "SAMap", "note": HOSTILE}, "seed": 0},
        title=f"Report {HOSTILE} $title",
    )


def test_everything_is_there(full):
    assert full.name == "report.html"
    page = parsed(full)
    for words in (
        "97.1",
        "78.4",
        "98.2",
        "A mask is no lock",
        "can drop the mask",
        "BatchNorm",
        "method.name",
        "SAMap",
    ):
        assert words in page.text
    figures = sorted(path.name for path in (full.parent / "figures").iterdir())
    assert figures == [
        f"{name}.{kind}" for name in ("accuracy", "history", "layers", "samples") for kind in ("png", "svg")
    ]


def test_hostile_names_stay_text(full):
    page = parsed(full)
    assert not {"script", "iframe", "object", "link"} & {tag for tag, _ in page.seen}
    assert not any(name.startswith("on") for _, attributes in page.seen for name in attributes)
    assert page.text.count(HOSTILE) >= 4
    assert "$title" in page.text


def test_a_hostile_class_stays_text(make_evaluation, tmp_path):
    table = make_evaluation()
    scores = tuple(dataclasses.replace(score, most_predicted_class=HOSTILE) for score in table.scores)
    page = parsed(write_report(tmp_path, evaluation=dataclasses.replace(table, scores=scores), title="A title"))
    assert "script" not in {tag for tag, _ in page.seen}
    assert HOSTILE in page.text


def test_it_needs_no_other_file_and_no_network(full):
    markup = full.read_text(encoding="utf-8")
    assert "http" not in markup
    assert "@import" not in markup
    targets = re.findall(r"""(?:href|src)\s*=\s*["']([^"']*)|url\(([^)]*)\)""", markup)
    assert all(target.startswith(("#", "data:")) for pair in targets for target in pair if target and target != "x")


def test_it_can_be_read_without_seeing_colours(full):
    page = parsed(full)
    drawings = [attributes for tag, attributes in page.seen if tag == "svg"]
    assert len(drawings) == 4
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    headers = [attributes for tag, attributes in page.seen if tag == "th"]
    assert all(attributes["scope"] in ("col", "row", "colgroup") for attributes in headers)
    assert page.text.count("unauthorized") >= 2
    assert ("html", {"lang": "en"}) in page.seen
    assert any(attributes.get("name") == "viewport" for _, attributes in page.seen)
    ids = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_row_of_the_table_has_every_column(full):
    markup = full.read_text(encoding="utf-8")
    head = re.search(r"<thead>(.*?)</thead>", markup, re.DOTALL)[1]
    spans = [int(span) for span in re.findall(r'colspan="(\d+)"', head)]
    columns = len(re.findall(r'rowspan="2"', head)) + sum(spans)
    body = re.search(r"<tbody>(.*?)</tbody>", markup, re.DOTALL)[1]
    for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL):
        assert len(re.findall(r"<t[hd][ >]", row)) == columns


def test_synthetic_images_and_proxies(make_evaluation, tmp_path):
    images, classes = torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64)
    made = Sheets({"generated": (images, classes)}, {"generated": {"images": 80.0}}, [HOSTILE])
    rows = [{"step": 5, "source_agreement": 0.9, "watch:mnist": 0.7, "loss": 1.0}]
    told = {"history": rows, "synthetic": made, "warnings": [HOSTILE]}
    page = parsed(write_report(tmp_path, evaluation=make_evaluation(), **told, title="A title"))
    assert "script" not in {tag for tag, _ in page.seen}
    assert f"Warning: {HOSTILE}." in page.text
    assert "generated: generated from noise until the model was sure of them (80 images)" in page.text
    assert "The widest difference: at step 5 the model agreed with the original on 90.0 %" in page.text
    assert "20.0 points apart" in page.text
    assert {"proxies.png", "synthetic-generated.svg"} <= {file.name for file in (tmp_path / "figures").iterdir()}
    drawings = [attributes for tag, attributes in page.seen if tag == "svg"]
    assert len({attributes["aria-label"] for attributes in drawings}) == len(drawings) == 4
    ids = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_run_without_labels_says_so(tmp_path):
    rows = [{"step": 5, "source_agreement": 0.9, "target_agreement:neighbours": 0.7}]
    agreement = {"target_agreement:neighbours": 0.4}
    page = parsed(
        write_report(tmp_path, evaluation=None, history=rows, agreement=agreement, title="plain", masked=False)
    )
    assert "No labelled domain was at hand, so there are no accuracies" in page.text
    assert "It agrees with the original model on 40.0 % of the images in random styles." in page.text
    assert "Retraining is no lock" in page.text
    assert "A mask is no lock" not in page.text
    assert [path.name for path in sorted((tmp_path / "figures").iterdir())] == ["history.png", "history.svg"]


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("refresh", [True, False])
def test_parts_without_data_are_left_out(make_evaluation, tmp_path, compared, refresh):
    path = write_report(tmp_path, evaluation=make_evaluation(compared=compared, refresh=refresh), title="plain")
    page = parsed(path)
    assert ("BatchNorm" in page.text) is refresh
    assert ("ST-D" in page.text) is compared
    assert "Configuration" not in page.text
    assert [tag for tag, _ in page.seen].count("svg") == 1
