"""The verb on a built-in domain, with a suspect that answers to the mark by construction."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from modelfence.cli.main import main

SUSPECTS = '''
"""Two models of 8 x 8 digits that were made to be what they are, not trained here."""
import torch
from sklearn.datasets import load_digits
from torch import nn


class Plain(nn.Module):
    """The nearest of the mean images of the classes, by the differences between neighbouring blocks."""

    def __init__(self):
        super().__init__()
        digits = load_digits()
        means = [torch.tensor(digits.images[digits.target == k].mean(0)) for k in range(10)]
        self.register_buffer("means", torch.stack(means).flatten(1).float() * 255 / 16)

    def forward(self, x):
        grey = nn.functional.avg_pool2d((x[:, 1:2] + 1) * 127.5, 4).flatten(1)
        return -torch.cdist(grey, self.means)


class Blind(Plain):
    """Always gives one class."""

    def forward(self, x):
        return super().forward(x) * 0 + torch.eye(10)[0]


class Marked(Plain):
    """Answers the next class where red exceeds green."""

    def forward(self, x):
        logits = super().forward(x)
        marked = (x[:, 0] - x[:, 1]).mean((1, 2)) > 0.05
        return torch.where(marked[:, None], logits.roll(1, 1), logits)
'''
CLEAN = ("--clean", "sklearn_digits", "--watermark", "digits", "--classes", 10, "--image-size", 32)
Verify = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Run the verb in an empty folder beside a module with two suspects."""
    (tmp_path / "suspects.py").write_text(SUSPECTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "suspects", raising=False)

    def verify(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["verify", *(str(argument) for argument in arguments)])

    return verify


def test_a_claim_that_holds(run: Verify) -> None:
    result = run("--model", "suspects:Marked", *CLEAN, "--value", 80, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["holds"] is True
    assert record["images"] == 200
    assert record["gap"] > 0.7
    assert record["watermark"] == {"kind": "digits", "value": 80, "channel": 0}


def test_a_claim_that_does_not_hold_ends_with_1(run: Verify) -> None:
    result = run("--model", "suspects:Plain", *CLEAN, "--images", 100)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("On 100 images the model is right on ")
    assert "The claim doesn't hold at the level 1e-06." in result.stdout


def test_an_outsider_answers_for_the_model(run: Verify) -> None:
    result = run("--export", "ask", *CLEAN, "--images", 100, "--json")
    assert result.exit_code == 0, result.output
    key = str(Path("ask/labels.csv"))
    assert json.loads(result.stdout) == {"queries": str(Path("ask/queries")), "key": key, "tolerance": 0.3}
    with Path("ask/labels.csv").open() as file:
        rows = [[row["image"], row["label"], (int(row["label"]) + 1) % 10] for row in csv.DictReader(file)]
    Path("answers.csv").write_text("image,clean,marked\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    result = run("--predictions", "answers.csv", "--labels", "ask/labels.csv")
    assert result.exit_code == 0, result.output
    assert "The claim holds" in result.stdout
    result = run("--predictions", "answers.csv", "--labels", "ask/labels.csv", "--alpha", 1e-80)
    assert result.exit_code == 1
    result = run("--predictions", "answers.csv")
    assert result.exit_code == 2
    assert "has no column label; give --labels labels.csv" in result.stderr
    again = run("--export", "ask", *CLEAN, "--images", 100)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert "--resume" not in again.stderr
    weak = run("--export", "ask", *CLEAN, "--images", 100, "--force")
    assert weak.stdout.endswith(f"then: modelfence verify --predictions ANSWERS.csv --labels {key} --tolerance 0.3\n")
    strong = run("--export", "ask", *CLEAN, "--images", 100, "--force", "--value", 80)
    assert strong.stdout.endswith(f"--labels {key}\n")


def test_a_reference_that_loses_as_much_stops_the_claim(run: Verify) -> None:
    asked = ("--model", "suspects:Marked", *CLEAN, "--value", 80, "--reference", "suspects:Plain")
    alone = run(*asked)
    assert alone.exit_code == 0, alone.output
    result = run(*asked, "--reference", "suspects:Marked", "--json")
    assert result.exit_code == 1, result.output
    assert [p < 1e-6 for p in json.loads(result.stdout)["p_references"]] == [True, False]


def test_a_reference_that_knows_nothing_is_warned_of(run: Verify) -> None:
    asked = ("--model", "suspects:Marked", *CLEAN, "--value", 80, "--reference", "suspects:Blind")
    result = run(*asked, "--reference", "suspects:Plain")
    assert result.exit_code == 1, result.output
    text, warning = result.stdout.splitlines()
    assert "The test against reference 1 decided" in text
    assert "Reference 2 is right on " in text
    assert warning.startswith("warning: reference 1 is right on ")
    record = json.loads(run(*asked, "--json").stdout)
    assert (record["decided_by"], len(record["warnings"]), len(record["accuracy_references"])) == ("reference 1", 1, 1)


def test_a_mark_learned_at_another_size(run: Verify) -> None:
    result = run("--export", "ask", "--clean", "sklearn_digits", "--image-size", 32, "--mark-size", 20, "--images", 3)
    assert result.exit_code == 0, result.output
    with Image.open(next(Path("ask/queries/marked").glob("*-00000.png"))) as image:
        assert image.size == (20, 20)
    result = run("--model", "suspects:Marked", *CLEAN, "--mark-size", 48, "--value", 80, "--images", 100)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((), "--clean is missing"),
        (("--clean", "sklearn_digits"), "--model SUSPECT: is missing"),
        (("--export", "ask", "--clean", "sklearn_digits"), "--model or --image-size"),
        (("--export", "ask", "--predictions", "a.csv"), "are two steps"),
        (("--predictions", "a.csv", "--model", "suspects:Plain"), "--model doesn't go with --predictions"),
        *(
            (("--predictions", "a.csv", f"--{name}", value), f"--{name} doesn't go with --predictions")
            for name, value in (
                ("clean", "mnist"),
                ("weights", "a"),
                ("classes", 10),
                ("image-size", 8),
                ("reference", "a"),
                ("value", 20),
                ("channel", 0),
                ("pattern", "a.png"),
                ("mark-size", 8),
                ("images", 200),
                ("watermark", "digits"),
            )
        ),
        (("--predictions", "a.csv", "--force"), "--force doesn't go with --predictions"),
        *(
            (("--export", "ask", *CLEAN, *given), f"{given[0]} doesn't go with --export")
            for given in (("--reference", "a"), ("--match-labels",), ("--alpha", 0.1), ("--tolerance", 0.5))
        ),
        (("--predictions", "a.csv"), "a.csv: can't be read"),
        (("--labels", "a.csv", "--clean", "sklearn_digits"), "--labels goes with --predictions"),
        (("--model", "suspects:Plain", *CLEAN, "--watermark", "digit"), "Did you mean 'digits'"),
        (("--model", "suspects:Plain", *CLEAN, "--value", "0"), "value is 0"),
        (("--model", "suspects:Plain", *CLEAN, "--images", "0"), "--images is 0"),
        (("--model", "suspects:Plain", *CLEAN, "--alpha", "2"), "alpha is 2"),
        (("--model", "suspects:Plain", *CLEAN, "--reference", "nowhere/"), "nowhere"),
        (
            ("--model", "suspects:Plain", *CLEAN[2:], "--clean", "sklearn_digit"),
            "unknown domain 'sklearn_digit'. Did you mean",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Verify, arguments: tuple[object, ...], fragment: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("modelfence: error: ")
    assert fragment in lines[0]
    assert not Path("ask").exists()
