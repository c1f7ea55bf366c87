"""A small source model on disk, and the command run inside this process."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from modelfence.cli.main import main
from modelfence.data.image_spec import ImageSpec
from modelfence.models.load import save_model
from modelfence.models.zoo import create_model

Invoke = Callable[..., Result]
IMAGE = ImageSpec(channels=1, height=16, width=16, mean=(0.5,), std=(0.5,))
QUICK = (
    "data.train_size=60",
    "evaluate.limit=40",
    "evaluate.refresh_images=20",
    "method.steps=4",
    "method.batch_size=8",
    "method.evaluate_every=2",
    "method.learning_rate=0.004",
    "method.precision=fp32",
)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved network for 16-pixel grey digits, not trained."""
    folder = tmp_path_factory.mktemp("source") / "sl"
    torch.manual_seed(0)
    save_model(folder, create_model("small_vgg_bn", 10, IMAGE), reference="small_vgg_bn", classes=10, image=IMAGE)
    return folder


@pytest.fixture(scope="session")
def protect_arguments(source: Path) -> list[str]:
    """Arguments of a protect run that takes about a second; without the output folder."""
    sets = [part for text in QUICK for part in ("--set", text)]
    domains = ["--authorized", "sklearn_digits", "--unauthorized", "font_digits"]
    return ["protect", "--model", str(source), *domains, *sets]


@pytest.fixture(scope="session")
def finished(protect_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of that run; tests only read it, or copy it."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    result = CliRunner().invoke(main, [*protect_arguments, "--output", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def image_folder(root: Path, classes: int = 10, each: int = 2) -> Path:
    """Write a folder of grey images with one sub-folder for each class."""
    for label in range(classes):
        folder = root / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = np.full((16, 16), 20 * label + number, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def assert_bad_input(result: Result, *fragments: str) -> None:
    """Exit code 2, one line of error that holds the fragments, and no traceback."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("modelfence: error: ")]
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0]), result.stderr
    assert "Traceback" not in result.output
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
