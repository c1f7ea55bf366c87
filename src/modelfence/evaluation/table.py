"""Evaluate a model, and the model it was made from, on named domains."""

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from modelfence.data.class_names import check_class_names
from modelfence.data.domain import Domain
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.errors import InputError, nearest
from modelfence.evaluation.result import Evaluation
from modelfence.evaluation.runner import Runner, checked_labels, device_of, in_float32, tried, untouched
from modelfence.evaluation.scores import DomainScore, ModelScore, Role
from modelfence.masking.batch_mode import has_batch_norm
from modelfence.masking.unwrap import require_network, unwrap
from modelfence.models.autocast import Resolved

__all__ = ["DomainScore", "Evaluation", "ModelScore", "evaluate"]


def evaluate(
    model: nn.Module,
    domains: Mapping[str, object],
    *,
    before: nn.Module | None = None,
    authorized: str | Sequence[str] | None = None,
    image: ImageSpec | None = None,
    batch_size: int = 250,
    refresh_images: int = 500,
    refresh_on: Mapping[str, object] | None = None,
    limit: int | None = None,
    precision: Resolved = "fp32",
    device: torch.device | str | None = None,
) -> Evaluation:
    """Measure accuracies, drops, ST-D and closure of a model on named domains.

    Networks with BatchNorm also get the accuracy after their running statistics are re-estimated on
    unlabelled images of each domain, because that alone can undo a mask.

    Args:
        model: The classifier under test, masked or not; its flags, weights and buffers come back as they
            were. Of one in half or double precision a copy in float32 is run.
        domains: Name to labelled domain: anything :func:`modelfence.data.sources.as_domain` takes. The test
            split of a catalog name is used.
        before: The model it was made from; without it there are no drops.
        authorized: Name or names of the authorized domains; by default the first.
        image: What the model eats; needed for domains that aren't normalized tensors already.
        batch_size: Images per forward pass.
        refresh_images: Unlabelled images per domain for the BatchNorm refresh, spread evenly over the domain.
        refresh_on: Name to the domain whose images (the training split of a catalog name) are used for its
            refresh; by default the domain itself.
        limit: Evaluate so many images of each domain, spread evenly over it (the first ones of a stream of unknown
            length).
        precision: ``"bf16"`` runs the networks under autocast; metrics are the same.
        device: Where to run; by default where the model is. A copy is run when the model is elsewhere.

    Returns:
        The table.

    Raises:
        InputError: A name is unknown, a domain has no labels or labels beyond the model's classes, images
            don't fit the model, class names don't fit together, or the two models differ in classes. Everything that
            can be seen from one image and the labels is checked on all domains first.
        NonFiniteError: The model gives no finite output on any image of a domain.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> labels = torch.tensor([0, 1, 1])
        >>> data = TensorDataset(torch.nn.functional.one_hot(labels, 2).float().view(3, 2, 1, 1), labels)
        >>> table = evaluate(nn.Flatten(), {"toy": DataLoader(data, batch_size=3)})
        >>> table.scores[0].accuracy
        1.0
    """
    _check_kinds(model, before, domains, refresh_on)
    roles = _roles(list(domains), authorized)
    _check_names(refresh_on or {}, list(domains), "refresh_on")
    _check_options(precision, batch_size=batch_size, refresh_images=refresh_images, limit=limit)
    found = {name: as_domain(thing, name=name, image=image, split="test") for name, thing in domains.items()}
    check_class_names(found.values())
    others = {
        name: as_domain(thing, name=name, image=image, labelled=False) for name, thing in (refresh_on or {}).items()
    }
    target = _device(device) if device is not None else device_of(model)
    networks = [in_float32(unwrap(network), target) for network in (model, before) if network is not None]
    run = Runner(batch_size, refresh_images, limit, precision, target)
    scores = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for network in networks:
            stack.enter_context(untouched(network))
        classes = _preflight(networks, found, run)
        for name, domain in found.items():
            measured, facts = run.measure(networks, domain, others.get(name, domain), name, classes)
            scores.append(_score(name, roles[name], measured, facts, classes))
    refreshes = any(has_batch_norm(network) for network in networks)
    return Evaluation(tuple(scores), classes=classes, refresh_images=refresh_images if refreshes else None)


def _roles(names: list[str], authorized: str | Sequence[str] | None) -> dict[str, Role]:
    if not names:
        raise InputError("domains is empty; give at least one name and domain")
    if authorized is None:
        authorized = names[:1]
    if not isinstance(authorized, Sequence):
        raise InputError(f"authorized= is {type(authorized).__name__}; a name or a list of names is needed")
    chosen = [authorized] if isinstance(authorized, str) else list(authorized)
    _check_names(chosen, names, "authorized")
    return {name: "authorized" if name in chosen else "unauthorized" for name in names}


def _check_names(given: Mapping[str, object] | Sequence[str], known: list[str], argument: str) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"{argument}: {name!r} isn't among the domains given.{nearest(name, known)}")


def _check_kinds(model: object, before: object, domains: object, refresh_on: object) -> None:
    for name, network in (("model", model), ("before", before)):
        if name == "model" or network is not None:
            require_network(network, name)
    for name, given in (("domains", domains), ("refresh_on", refresh_on or {})):
        if not isinstance(given, Mapping):
            raise InputError(f"{name}= is {type(given).__name__}; a dictionary of domains by name is needed")


def _check_options(precision: object, **counts: object) -> None:
    if precision not in ("fp32", "bf16"):
        raise InputError(f"precision is {precision!r}; 'fp32' or 'bf16' is needed")
    for name, count in counts.items():
        least = 2 if name == "refresh_images" else 1
        if name == "limit" and count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise InputError(f"{name} is {count!r:.40}; a whole number of at least {least} is needed")


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {given!r:.40}; a device of torch, such as 'cpu' or 'cuda', is needed") from error


def _preflight(networks: list[nn.Module], domains: Mapping[str, Domain], run: Runner) -> int:
    """Check every domain and model by one image each; return the number of classes."""
    counts: list[int] = []
    for name, domain in domains.items():
        if not domain.labelled:
            raise InputError(f"domain {name!r} has no labels; evaluation needs them")
        first = next(iter(domain.once(1, limit=1, device=run.device)), None)
        if first is None:
            raise InputError(f"domain {name!r} has no images; check its split or path")
        counts = [_class_count(network, first.images, name, run) for network in networks]
        if len(set(counts)) > 1:
            raise InputError(f"the model has {counts[0]} classes, the one before it {counts[1]}; give a pair")
        known = getattr(domain, "labels", None)
        checked_labels(known if isinstance(known, Tensor) else first.labels, counts[0], name)
    return counts[0]


def _class_count(network: nn.Module, images: Tensor, name: str, run: Runner) -> int:
    return tried(lambda given: run.forward(network, given), images, f"domain {name!r}: the model").shape[1]


def _score(name: str, role: Role, measured: list[ModelScore], labels: Tensor, classes: int) -> DomainScore:
    after, *rest = measured
    top_share = float((labels == after.most_predicted_class).double().mean())
    return DomainScore(
        **vars(after),
        name=name,
        role=role,
        images=len(labels),
        chance=1.0 / classes,
        top_label_share=top_share,
        before=rest[0] if rest else None,
    )
