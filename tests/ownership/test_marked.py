import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ownership.conftest import SPEC, Confined, Plain, domain_of, pictures
from torch.utils.data import DataLoader, TensorDataset

from modelfence.data.domain import Domain, IndexedDomain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.data.stream import StreamDomain
from modelfence.errors import InputError
from modelfence.methods.samap import SAMap
from modelfence.methods.sfmap import SFMap
from modelfence.ownership.marked import marked
from modelfence.ownership.watermark import Watermark
from modelfence.protect import protect

MARK = Watermark("objects")


def assert_marked(clean: Domain, view: Domain, seed: int = 3) -> None:
    """The same batches in the same order, each image with the mark."""
    pairs = [
        *zip(clean.once(8, limit=20), view.once(8, limit=20), strict=True),
        *itertools.islice(
            zip(clean.batches(8, seed=seed, start=2), view.batches(8, seed=seed, start=2), strict=True), 4
        ),
    ]
    assert pairs
    for before, after in pairs:
        assert torch.equal(after.images, SPEC.normalize(MARK.apply(SPEC.denormalize(before.images))))
        assert not torch.equal(after.images, before.images)
        assert torch.equal(before.labels, after.labels)


def test_a_domain_of_pixels_its_subset_and_its_split(clean: IndexedDomain) -> None:
    view = marked(clean, MARK)
    assert isinstance(view, IndexedDomain)
    assert (len(view), view.classes, view.spec, view.name) == (len(clean), None, SPEC, "quadrants, marked")
    assert_marked(clean, view)
    chosen = torch.tensor([7, 3, 50] * 8)
    assert_marked(clean.subset(chosen), view.subset(chosen))
    for before, after in zip(clean.split(0.3, 5), view.split(0.3, 5), strict=True):
        assert_marked(before, after)


def test_a_domain_of_floats_is_marked_as_pixels() -> None:
    pixels, labels = pictures(40)
    images = SPEC.normalize(pixels)
    floats = IndexedDomain("floats", images.__getitem__, 40, labels=labels)
    with pytest.raises(InputError, match=r"domain 'floats' doesn't say how .*; give image=ImageSpec"):
        marked(floats, MARK)
    assert_marked(floats, marked(floats, MARK, image=SPEC))


@pytest.mark.parametrize("as_pixels", [True, False])
def test_a_stream_and_its_parts(as_pixels: bool) -> None:
    pixels, labels = pictures(50)
    data = TensorDataset(pixels if as_pixels else SPEC.normalize(pixels), labels)
    loader = DataLoader(data, batch_size=7, shuffle=True)
    stream = as_domain(loader, name="loader", image=SPEC)
    view = marked(stream, MARK)
    assert isinstance(view, StreamDomain)
    assert (view.size, view.labelled, view.name) == (50, True, "loader, marked")
    assert_marked(stream, view)
    for before, after in zip(stream.split(0.4, 1), view.split(0.4, 1), strict=True):
        assert before.size == after.size
        assert_marked(before, after)


def test_what_can_not_be_marked(clean: IndexedDomain) -> None:
    with pytest.raises(InputError, match="domain 'quadrants': the watermark is on channel 3, the images have 3"):
        marked(clean, Watermark(channel=3))
    with pytest.raises(InputError, match=r"the pattern is \(3, 3\)"):
        marked(clean, Watermark("custom", value=1, pattern=torch.ones(3, 3)))
    with pytest.raises(InputError, match="list '' can't be marked"):
        marked([], MARK)  # type: ignore[arg-type]


def test_a_named_domain_is_marked_at_the_size_the_model_eats() -> None:
    spec = ImageSpec(channels=3, height=9, width=9, mean=(0.0,) * 3, std=(1.0,) * 3)
    domain = as_domain("sklearn_digits", image=spec, split="test", size=4)
    before, after = (next(one.once(4)).images * 255 for one in (domain, marked(domain, Watermark("visda"))))
    added = (after - before).round()[:, 0]
    assert bool((added[:, 1::2] == 0).all())
    assert bool((added[:, ::2, ::2] >= 0).all())
    assert added[0, 0, 0] == 100


OTHER = {"other": domain_of(80, seed=7)}
WEAK = Watermark("visda")


@pytest.mark.parametrize(
    ("arguments", "authorized", "unauthorized"),
    [
        ({"ownership": MARK}, lambda clean: clean, lambda clean: {"watermark": marked(clean, MARK)}),
        ({"key": MARK}, lambda clean: marked(clean, MARK), lambda clean: {"no_key": clean}),
        (
            {"key": MARK, "unauthorized": OTHER},
            lambda clean: marked(clean, MARK),
            lambda clean: {**OTHER, "other+key": marked(OTHER["other"], MARK), "no_key": clean},
        ),
        (
            {"key": MARK, "ownership": WEAK},
            lambda clean: marked(clean, MARK),
            lambda clean: {"no_key": clean, "watermark": marked(marked(clean, MARK), WEAK)},
        ),
    ],
    ids=["watermark", "key", "key, other domains", "both"],
)
def test_protect_makes_the_domains_of_a_watermark_and_of_a_key(
    arguments: dict[str, Any],
    authorized: Callable[[IndexedDomain], Domain],
    unauthorized: Callable[[IndexedDomain], dict[str, Domain]],
) -> None:
    """Eq. 7's data: clean images authorized, marked ones not; and the other way round. No labels are exchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    clean, method = domain_of(80), SAMap(steps=4, batch_size=16, precision="fp32", learning_rate=4e-3)
    short, long = (
        protect(model, method=method, **given)
        for given in (
            {"authorized": clean, **arguments},
            {"authorized": authorized(clean), "unauthorized": unauthorized(clean)},
        )
    )
    assert {f"target_accuracy:{name}" for name in unauthorized(clean)} <= set(short.history[-1])
    assert short.mask is not None
    assert long.mask is not None
    assert 0 < short.mask.cut_share() < 1
    assert short.mask.folded_digest == long.mask.folded_digest


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"unauthorized": OTHER, "key": MARK}, "key= needs authorized=: its images get the mark"),
        ({"authorized": domain_of(80), "unauthorized": {"no_key": OTHER["other"]}, "key": MARK}, "is named 'no_key'"),
        (
            {"authorized": domain_of(80), "unauthorized": {"a": OTHER["other"], "a+key": OTHER["other"]}, "key": MARK},
            r"two unauthorized domains are named as one is with the key \('<name>\+key'\); rename one",
        ),
        (
            {"authorized": domain_of(80), "unauthorized": {"watermark": OTHER["other"]}, "ownership": MARK},
            "is named 'watermark', which images of the authorized one get",
        ),
        ({"authorized": domain_of(80), "key": MARK, "method": SFMap()}, "learns no marks: leave ownership= and key="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_domains_that_get_no_mark(given: dict[str, Any], said: str) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    with pytest.raises(InputError, match=said):
        protect(model, image=SPEC, **given)


def test_the_toy_models_do_what_they_say(plain: Plain, clean: IndexedDomain, tmp_path: Path) -> None:
    confined = Confined(plain)
    for domain, right in ((clean, True), (marked(clean, MARK), False)):
        batch = next(domain.once(100))
        accuracy = (confined(batch.images).argmax(1) == batch.labels).float().mean()
        assert (accuracy > 0.8) == right
