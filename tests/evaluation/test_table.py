"""Evaluation of tiny models whose answers are known beforehand."""

import copy
import json
import math

import pytest
import torch
from tests.masking import zoo
from torch import nn

from modelfence import SAMap, protect
from modelfence.data.domain import IndexedDomain
from modelfence.errors import InputError, NonFiniteError
from modelfence.evaluation.batch_norm import refreshed
from modelfence.evaluation.table import Evaluation, evaluate
from modelfence.masking.preflight import classes_of
from modelfence.masking.unwrap import unwrap


def domain(images: torch.Tensor, labels: torch.Tensor | None, name: str = "toy") -> IndexedDomain:
    return IndexedDomain(name, images.__getitem__, len(images), labels=labels)


def one_hot(labels: list[int], classes: int = 4) -> torch.Tensor:
    """Images (N, K, 1, 1) that nn.Flatten turns into logits whose argmax is the label."""
    return nn.functional.one_hot(torch.tensor(labels), classes).float().view(-1, classes, 1, 1)


class Constant(nn.Module):
    """Answers one class whatever it sees."""

    def __init__(self, answer: int, classes: int = 4, value: float = 1.0) -> None:
        super().__init__()
        row = torch.zeros(classes)
        row[answer] = value
        self.register_buffer("row", row)

    def forward(self, images):
        return self.row.repeat(len(images), 1)


@pytest.fixture
def balanced() -> IndexedDomain:
    labels = [0, 1, 2, 3] * 10
    return domain(one_hot(labels), torch.tensor(labels))


@pytest.fixture
def skewed() -> IndexedDomain:
    labels = [0] * 28 + [1, 2, 3] * 4
    return domain(one_hot(labels), torch.tensor(labels))


def test_known_answers_give_known_numbers(balanced, skewed):
    table = evaluate(Constant(0), {"a": balanced, "b": skewed}, before=nn.Flatten(), authorized="a", batch_size=7)
    a, b = table.scores
    assert (a.role, b.role, a.images, b.images) == ("authorized", "unauthorized", 40, 40)
    assert (a.before.accuracy, a.accuracy, a.balanced_accuracy) == (1.0, 0.25, 0.25)
    assert (b.accuracy, b.balanced_accuracy, b.most_predicted_class, b.most_predicted_share) == (
        0.7,
        0.25,
        0,
        1.0,
    )
    assert b.closure == pytest.approx(0.3 / 0.75)
    assert b.closure_balanced == pytest.approx(1.0)
    assert table.st_d == pytest.approx(0.75 / 0.3)
    assert (table.classes, table.chance, table.refresh_images) == (4, 0.25, None)
    assert b.refreshed_accuracy is None
    assert math.isnan(b.closure_refreshed)


def test_several_authorized_domains_enter_by_their_mean(balanced, skewed):
    domains = {"a": balanced, "b": skewed, "c": balanced}
    table = evaluate(Constant(0), domains, before=nn.Flatten(), authorized=["a", "b"])
    assert [score.role for score in table.scores] == ["authorized", "authorized", "unauthorized"]
    assert table.st_d == pytest.approx((1 - (0.25 + 0.7) / 2) / 0.75)


def test_without_the_model_before_nothing_is_compared(balanced):
    table = evaluate(Constant(0), {"a": balanced, "b": balanced})
    assert table.scores[0].before is None
    assert math.isnan(table.st_d)
    assert math.isnan(table.scores[1].drop)
    assert "before" not in str(table)


def batch_norm_model() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    model[1].running_mean.normal_()
    return model


def test_networks_with_batch_norm_get_a_refreshed_accuracy():
    model, images, labels = batch_norm_model(), torch.randn(90, 1, 2, 2), torch.randint(0, 4, (90,))
    elsewhere = torch.randn(90, 1, 2, 2) * 5
    table = evaluate(
        model,
        {"a": domain(images, labels), "b": domain(images, labels)},
        before=nn.Sequential(nn.Flatten(), nn.Linear(4, 4)),
        refresh_on={"b": domain(elsewhere, None)},
    )

    def by_hand(statistics):
        twin = refreshed(model, [statistics])
        return float((twin(images).argmax(1) == labels).float().mean())

    assert table.scores[0].refreshed_accuracy == pytest.approx(by_hand(images))
    assert table.scores[1].refreshed_accuracy == pytest.approx(by_hand(elsewhere))
    assert table.scores[0].before.refreshed_accuracy is None
    assert table.refresh_images == 500


def test_a_refresh_is_not_misled_by_images_sorted_by_class():
    # 128 dark images, then 128 bright ones: batches in this order would see a variance of 0.
    images = torch.cat([torch.zeros(128, 1, 1, 1), torch.ones(128, 1, 1, 1)])
    labels = images.flatten().long()
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[-1.0], [1.0]]))
        model[2].bias.copy_(torch.tensor([1.5, -1.5]))  # bright means above 1.5 standard deviations
    table = evaluate(model, {"sorted": domain(images, labels)})
    assert table.scores[0].refreshed_accuracy == 0.5  # a bright pixel is one standard deviation above the mean


def test_models_come_back_as_they_were():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = batch_norm_model()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, images):
            self.calls += 1
            return self.inner(images)

    after, before = Counting().train(), Counting().train()
    after.inner[1].eval()
    states = [copy.deepcopy(model.state_dict()) for model in (after, before)]
    flags = [[module.training for module in model.modules()] for model in (after, before)]
    data = domain(torch.randn(20, 1, 2, 2), torch.randint(0, 4, (20,)))
    evaluate(after, {"a": data, "b": data}, before=before)
    assert flags == [[module.training for module in model.modules()] for model in (after, before)]
    for model, state in zip((after, before), states, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_flags_come_back_after_an_error(balanced):
    model = Constant(0, classes=2).train()
    with pytest.raises(InputError):
        evaluate(model, {"a": balanced})
    assert model.training


def test_a_buffer_that_wants_a_gradient_is_measured_too(balanced):
    model = Constant(0)
    model.register_buffer("scale", torch.ones(2, requires_grad=True))
    evaluate(model, {"a": balanced})
    assert model.scale.requires_grad
    assert torch.equal(model.scale.detach(), torch.ones(2))


def test_limit_spreads_over_the_domain():
    """Of 40 images of which every fourth is answered rightly, ten spread evenly are taken, not the first."""
    answers = [0, 1, 1, 1] * 10
    data = domain(one_hot(answers), torch.zeros(40, dtype=torch.int64))
    assert evaluate(nn.Flatten(), {"a": data}, limit=40).scores[0].accuracy == 0.25
    table = evaluate(nn.Flatten(), {"a": data}, limit=10)
    assert (table.scores[0].images, table.scores[0].accuracy) == (10, 1.0)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", sorted(zoo.ZOO.keys() - zoo.NEEDS_PROCESS_GROUP))
def test_every_kind_of_network_is_confined_and_measured(name):
    case = zoo.ZOO[name]()
    images = case.images.float().repeat(8, 1, 1, 1)
    data = domain(images, torch.arange(len(images)) % classes_of(case.model, case.images))
    confined = protect(case.model, authorized=data, unauthorized=data, method=SAMap(steps=1, batch_size=4, held_out=0))
    table = evaluate(confined.model, {"a": data, "b": data}, before=case.model, authorized="a")
    assert [score.images for score in table.scores] == [len(images)] * 2
    assert all(score.before is not None and score.non_finite == 0 for score in table.scores)
    assert confined.mask.is_in(confined.model)
    kept = {name: (value.shape, value.dtype) for name, value in unwrap(case.model).state_dict().items()}
    assert {name: (value.shape, value.dtype) for name, value in confined.model.state_dict().items()} == kept


def test_bf16_runs_and_gives_the_same_answers(balanced):
    assert evaluate(nn.Flatten(), {"a": balanced}, precision="bf16").scores[0].accuracy == 1.0


def test_some_non_finite_outputs_count_as_wrong_and_are_flagged(balanced):
    class Partly(nn.Module):
        def forward(self, images):
            logits = images.flatten(1).clone()
            logits[logits.argmax(1) == 3] = math.nan
            return logits

    score = evaluate(Partly(), {"a": balanced}).scores[0]
    assert (score.accuracy, score.non_finite) == (0.75, 10)
    assert score.flags == ("10 images got a non-finite output and count as wrong",)


def test_a_model_without_any_finite_output_is_an_error(balanced):
    with pytest.raises(NonFiniteError, match="every image of domain 'a'"):
        evaluate(Constant(0, value=math.nan), {"a": balanced})


def test_labels_of_all_domains_are_checked_before_any_is_evaluated(balanced):
    seen = []

    class Watched(nn.Module):
        def forward(self, images):
            seen.append(len(images))
            return images.flatten(1)

    late = domain(one_hot([0, 1, 2]), torch.tensor([0, 1, 4]))
    with pytest.raises(InputError, match="domain 'late' has label 4"):
        evaluate(Watched(), {"a": balanced, "late": late})
    assert seen == [1, 1]


@pytest.mark.parametrize(
    ("domains", "options", "message"),
    [
        ({}, {}, "domains is empty"),
        ({"usps": [3]}, {"authorized": "upsp"}, "authorized: 'upsp' isn't among.*Did you mean 'usps'"),
        ({"usps": [3]}, {"refresh_on": {"x": 0}}, "refresh_on: 'x' isn't among"),
        ({"usps": [3]}, {"precision": "fp16"}, "precision is 'fp16'"),
        ({"usps": [3]}, {"refresh_images": 1}, "refresh_images is 1"),
        ({"mnist": [0, 1], "usps": [3, 4]}, {}, "domain 'usps' has label 4, but the model knows 0..3"),
        ({"mnist": [0, 1], "usps": None}, {}, "domain 'usps' has no labels"),
    ],
)
def test_bad_input_is_named(domains, options, message):
    made = {
        name: domain(torch.zeros(2, 4, 1, 1)[: len(labels or [0])], None if labels is None else torch.tensor(labels))
        for name, labels in domains.items()
    }
    with pytest.raises(InputError, match=message):
        evaluate(nn.Flatten(), made, **options)


def test_images_that_do_not_fit_the_model_are_named(balanced):
    with pytest.raises(InputError, match=r"domain 'a': the model can't take images of shape \(4, 1, 1\).*ImageSpec"):
        evaluate(nn.Sequential(nn.Flatten(), nn.Linear(5, 4)), {"a": balanced})


class Demanding(nn.Module):
    """Raises an error of its own, as networks of timm do."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images):
        raise self.error


@pytest.mark.parametrize("error", [AssertionError("height"), ValueError(), TypeError("a\nb"), KeyError("x")])
def test_whatever_a_model_raises_names_the_images(balanced, error):
    with pytest.raises(InputError, match=r"^domain 'a': the model can't take images of shape \(4, 1, 1\) \(.+\)"):
        evaluate(Demanding(error), {"a": balanced})


@pytest.mark.parametrize(
    "error",
    [MemoryError("full"), torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_too_little_memory_is_not_called_a_matter_of_shape(balanced, error):
    with pytest.raises(type(error)):
        evaluate(Demanding(error), {"a": balanced})


def test_images_for_the_refresh_need_no_labels(balanced):
    pictures = torch.randn(40, 1, 2, 2)
    plain, bare = domain(pictures, torch.randint(0, 4, (40,))), domain(pictures, None)
    unread = [{"images": pictures, "labels": torch.full((40,), -1)}]
    model = batch_norm_model()
    wanted = evaluate(model, {"a": plain}).scores[0].refreshed_accuracy
    for images in (bare, unread):
        assert evaluate(model, {"a": plain}, refresh_on={"a": images}).scores[0].refreshed_accuracy == wanted


def test_one_image_alone_has_no_refreshed_accuracy():
    pictures, labels = torch.randn(40, 1, 2, 2), torch.randint(0, 4, (40,))
    many, one = domain(pictures, labels), domain(pictures[:1], labels[:1])
    table = evaluate(batch_norm_model(), {"many": many, "one": one}, before=batch_norm_model())
    assert [score.refreshed_accuracy is None for score in table.scores] == [False, True]
    assert math.isnan(table.scores[1].closure_refreshed)
    assert "one" in str(table)
    assert Evaluation.from_dict(json.loads(json.dumps(table.to_dict(), allow_nan=False))).scores == table.scores
    with pytest.raises(InputError, match="at least two images, not 1"):
        evaluate(batch_norm_model(), {"many": many}, refresh_on={"many": one})


def test_classes_that_do_not_fit_together_are_refused():
    domains = {
        name: IndexedDomain(name, torch.zeros(4, 4, 1, 1).__getitem__, 4, labels=torch.arange(4), classes=classes)
        for name, classes in (("a", tuple("wxyz")), ("b", tuple("wxzy")))
    }
    with pytest.raises(InputError, match="domain 'b': class 2 is 'z', for domain 'a' it is 'y'"):
        evaluate(nn.Flatten(), domains)


def test_two_models_must_have_the_same_classes(balanced):
    with pytest.raises(InputError, match="5 classes, the one before it 4"):
        evaluate(Constant(0, classes=5), {"a": balanced}, before=nn.Flatten())


def test_round_trip_through_json(balanced, skewed):
    table = evaluate(Constant(0), {"a": balanced, "b": skewed}, before=nn.Flatten())
    record = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert Evaluation.from_dict(record) == table
    assert record["scores"][1]["closure_refreshed"] is None
    assert record["st_d"] == pytest.approx(table.st_d)
    alone = evaluate(Constant(0), {"a": balanced})
    assert Evaluation.from_dict(json.loads(json.dumps(alone.to_dict(), allow_nan=False))) == alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_of_any_precision_is_measured_and_stays_as_it_was(dtype, precision):
    torch.manual_seed(0)
    model = batch_norm_model().to(dtype).train()
    before = copy.deepcopy(model.state_dict())
    data = domain(torch.randn(40, 1, 2, 2), torch.randint(0, 4, (40,)))
    table = evaluate(model, {"a": data}, before=copy.deepcopy(model).float(), precision=precision)
    assert table.scores[0].accuracy == table.scores[0].before.accuracy
    assert table.scores[0].refreshed_accuracy == table.scores[0].before.refreshed_accuracy
    assert model.training
    for key, value in model.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "x"}, "model= is str; a torch.nn.Module is needed"),
        ({"model": None}, "model= is NoneType"),
        ({"before": "sl"}, "before= is str; a torch.nn.Module is needed"),
        ({"domains": "mnist"}, "domains= is str; a dictionary of domains by name is needed"),
        ({"domains": [1]}, "domains= is list"),
        ({"domains": {"a": 3}}, "int can't be a domain"),
        ({"refresh_on": [1]}, "refresh_on= is list"),
        ({"device": "gpu7"}, "device is 'gpu7'; a device of torch"),
        ({"image": "rgb"}, "image= is str; an ImageSpec is needed"),
        ({"authorized": 3}, "authorized= is int; a name or a list of names is needed"),
        ({"batch_size": "many"}, "batch_size is 'many'; a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"refresh_images": True}, "refresh_images is True; a whole number of at least 2"),
        ({"precision": ["fp32"]}, "precision is .'fp32'.; 'fp32' or 'bf16' is needed"),
    ],
)
def test_arguments_of_another_kind_are_named(balanced, options, message):
    given = {"model": nn.Flatten(), "domains": {"a": balanced}, **options}
    with pytest.raises(InputError, match=message):
        evaluate(given.pop("model"), given.pop("domains"), **given)


@pytest.mark.parametrize("broken", [{}, {"classes": 4, "scores": [{}], "refresh_images": None}, {"scores": 3}])
def test_a_broken_record_is_refused(broken):
    with pytest.raises(InputError, match="evaluation record"):
        Evaluation.from_dict(broken)


def test_rows_are_flat_records(balanced):
    rows = evaluate(Constant(0), {"a": balanced}, before=nn.Flatten()).rows()
    assert rows[0]["name"] == "a"
    assert rows[0]["before_accuracy"] == 1.0
    assert not any(isinstance(value, dict) for value in rows[0].values())
