from pathlib import Path

import pytest
import torch
from tests.cli.conftest import image_folder

from modelfence.bench.budgets import Scale
from modelfence.bench.domains import domains, folder_of, is_here, parts_of, require_domains
from modelfence.data import catalog
from modelfence.data.domain import IndexedDomain
from modelfence.errors import InputError


def folders(root: Path, names: tuple[str, ...], each: int = 6) -> None:
    """Write image folders with the given class names."""
    image_folder(root, classes=len(names), each=each)
    for label, name in enumerate(names):
        (root / f"class_{label}").rename(root / name)


def pixels(domain: IndexedDomain) -> torch.Tensor:
    return torch.cat([batch.images for batch in domain.once(50)])


def test_parts_are_disjoint_and_follow_the_protocol() -> None:
    parts = domains("sklearn_digits", 16, 0, train_size=300, validation_size=50, test_size=40)
    assert [len(part) for part in parts] == [300, 50, 40]
    learned = {image.numpy().tobytes() for image in pixels(parts.train)}
    assert not any(image.numpy().tobytes() in learned for image in pixels(parts.validation))


def test_a_small_domain_gives_a_sixth_to_validation() -> None:
    parts = domains("sklearn_digits", 16, 0)
    assert [len(part) for part in parts] == [674, 134, 269]


def test_parts_of_a_scale_are_kept() -> None:
    scale = Scale(train_images=20, validation_images=10, test_images=5)
    assert parts_of("sklearn_digits", 16, scale) is parts_of("sklearn_digits", 16, scale)


def test_visda_is_read_from_its_published_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its classes is called train, as is one of its splits."""
    names = catalog.lookup("visda_t").classes
    for split, each in (("train", 5), ("validation", 10)):
        folders(tmp_path / "visda" / split, names, each)
        (tmp_path / "visda" / split / "image_list.txt").write_text("aeroplane/0.png 0\n")
    monkeypatch.setenv(catalog.DATA_VARIABLE, str(tmp_path))
    assert is_here("visda_t")
    source, target = domains("visda_t", 32, 0), domains("visda_v", 32, 0, test_size=7)
    assert [len(part) for part in source] == [40, 8, 12]
    assert [len(part) for part in target] == [80, 16, 7]
    assert source.train.classes == names
    assert "train" in names


def test_office_home_is_read_from_its_published_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path / "office_home" / "Real World", ("Alarm_Clock", "Backpack", "Batteries"))
    monkeypatch.setenv(catalog.DATA_VARIABLE, str(tmp_path))
    assert folder_of("office_home_real") == (tmp_path / "office_home" / "Real World", "train")
    parts = domains("office_home_real", 16, 0)
    assert [len(part) for part in parts] == [12, 2, 4]
    assert parts.train.classes == ("Alarm_Clock", "Backpack", "Batteries")


def test_missing_domains_are_one_line_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.DATA_VARIABLE, str(tmp_path))
    require_domains(["sklearn_digits"])
    with pytest.raises(InputError) as caught:
        require_domains(["visda_t", "visda_v", "sklearn_digits"])
    assert str(caught.value) == (
        f"domains visda_t, visda_v can't be found: expected in $MODELFENCE_DATA ({tmp_path}) as visda_t/train.parquet "
        "and test.parquet, visda_v/train.parquet and test.parquet, or as published: visda/train/<class>/, "
        "visda/validation/<class>/"
    )
