"""The way in: a trained classifier and domains go in, a confined classifier and, as a rule, its mask come out."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import modelfence.methods  # noqa: F401 (registers the methods)
from modelfence.data.class_names import check_class_names
from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.files import versions, writable_folder
from modelfence.masking.mask import Mask
from modelfence.masking.preflight import require_maskable
from modelfence.masking.unwrap import unwrap
from modelfence.methods.config import LearnConfig, MaskConfig
from modelfence.methods.loop import WARNING, Monitor, Row, Session, row_kept
from modelfence.methods.registry import Method, method_for
from modelfence.methods.retraining import with_weights
from modelfence.methods.samples import Synthetic, together
from modelfence.methods.state import state_file, states_of
from modelfence.methods.subject import computes_in_bfloat16
from modelfence.models.autocast import attention_in_float32
from modelfence.monitor import HeldOut, Watch, check_images, doubts

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from modelfence.data.domain import Domain
    from modelfence.evaluation.result import Evaluation
    from modelfence.ownership.watermark import Watermark

_LOGGER = logging.getLogger("modelfence")


@dataclass(frozen=True, repr=False)
class Protection:
    """What :func:`protect` gives back.

    Attributes:
        model: The confined network: an ordinary module, same class and keys as the one given; what is shipped.
        mask: The mask folded into it; the owner's record, never shipped. None where the method retrained the network
            (:class:`modelfence.NTL`, :class:`modelfence.CUTI`).
        masks: With ``masks="one_each"``: the mask of every unauthorized domain, by name; else empty.
        history: One row per measurement: step, loss and its terms, share of weights kept, held-out accuracies.
        config: The configuration used, every value resolved.
        synthetic: Where data was missing: some of the images that were synthesized instead, to look at.
        warnings: Sentences about what may make the result worse than it looks, such as a domain near the source.
        image: What the model eats, as it was given.
        classes: The model's number of classes.
    """

    model: nn.Module
    mask: Mask | None
    masks: Mapping[str, Mask]
    history: list[Row]
    config: LearnConfig
    synthetic: Synthetic = field(default_factory=Synthetic)
    warnings: tuple[str, ...] = ()
    image: ImageSpec | None = None
    classes: int | None = None

    def __repr__(self) -> str:
        cut = "retrained" if self.mask is None else f"{100 * self.mask.cut_share():.2f} % of its weights cut"
        told = f", {len(self.warnings)} warning(s)" if self.warnings else ""
        return f"Protection({type(self.model).__name__}, {cut}{told})"

    @property
    def measured(self) -> Row:
        """The row of the history that was measured on :attr:`model`; empty where several masks were combined."""
        return row_kept(self.history, self.config) if self.history and len(self.masks) < 2 else {}

    def save(self, folder: str | Path, *, evaluation: "Evaluation | None" = None) -> Path:
        """Write the output folder (docs/artifact.md): the checkpoint to ship, the owner's record, the history.

        Where ``protect`` was told ``image=``, ``load_model(factory, weights=folder)`` and ``modelfence evaluate
        package.module:factory --weights folder`` load it again.

        Args:
            folder: Where to; made when missing, files of these names are replaced.
            evaluation: What :func:`modelfence.evaluate` measured; with it the model card is written too.

        Returns:
            The folder.

        Raises:
            ArtifactError: The folder can't be written.
        """
        from modelfence.artifact import Artifact, write_artifact

        artifact = Artifact(
            model=self.model,
            image=self.image,
            classes=self.classes,
            mask=self.mask,
            masks=self.masks,
            history=self.history,
            config=self.config,
            evaluation=evaluation,
            synthetic=self.synthetic,
            warnings=self.warnings,
        )
        write_artifact(Path(folder), artifact)
        return Path(folder)


def protect(
    model: nn.Module,
    *,
    authorized: Any = None,
    unauthorized: Any = None,
    image: ImageSpec | None = None,
    method: LearnConfig | None = None,
    ownership: "Watermark | None" = None,
    key: "Watermark | None" = None,
    watch: Any = None,
    output: str | Path | None = None,
    resume: bool = False,
    cache: str | Path | None = None,
    progress: Callable[[Row], None] | None = None,
    announce: Callable[[str], None] | None = None,
    fabric: "Fabric | None" = None,
) -> Protection:
    """Learn what keeps a classifier accurate on authorized data and makes it fail on unauthorized data: a binary mask.

    The data given decides the setting (MAP, CVPR 2024): with both domains it is source-available (SA-MAP, Eq. 1), with
    the unauthorized one alone source-free (SF-MAP, Eq. 4), with the authorized one alone or none data-free (DF-MAP).
    The latter two read no labels. MAP's rivals NTL and CUTI, which retrain the whole network and give no mask, have to
    be named by ``method``. The model given is never changed. What the result withstands and what it doesn't:
    docs/limits.md.

    Args:
        model: A trained classifier of K classes that takes float images (N, C, H, W); wrapped or not.
        authorized: Labelled images of the domain it shall keep working on: a DataLoader, a torch or Hugging Face
            Dataset, a Domain, or a name or path (see :func:`modelfence.data.sources.as_domain`).
        unauthorized: The same for the domain it shall fail on; several as a list or a mapping by name. Without
            authorized= its labels aren't needed, nor looked at.
        image: What the model eats; needed unless the domains give float tensors, and where images are synthesized.
        method: A configuration object such as ``SAMap(steps=400)``; None takes the setting's default, and
            ``SAMap(recipe="ownership")`` where images with a mark, or without it, are all that is unauthorized. An
            object that is given is taken as it is: ``SAMap(seed=1)`` has the recipe "default".
        ownership: A watermark that the model shall fail on: the authorized images with it become an unauthorized
            domain, "watermark" (Eq. 7); see :func:`modelfence.ownership.verification.verify`.
        key: A mark that the model shall need (NTL's second use, ICLR 2022): the authorized images with it are the
            authorized domain; without it they become an unauthorized one, "no_key". Unauthorized domains are unlearned
            without it and, as "<name>+key", with it. Whoever may use the model puts the mark on; see
            :meth:`modelfence.ownership.watermark.Watermark.apply`.
        watch: Labelled domains, as ``unauthorized``, that are measured at every evaluation and never used: the
            history gets "watch:<name>".
        output: Folder where the run's state is kept, so that a killed run can go on; an earlier run's is replaced,
            which is logged.
        resume: Go on from the state in ``output``; the result is that of a run that was never stopped.
        cache: Folder where synthetic images are kept, by the model's digest, for other runs; None keeps those of
            this run in ``output`` alone.
        announce: Called with a line of text now and then while images are synthesized, and with warnings, which begin
            with "warning: "; without it warnings, and nothing else, are logged. (Of several processes, by the first.)
        progress: Called with every row of the history as it is made. (Likewise.)
        fabric: A Lightning Fabric to run on (device, precision, processes); None takes one process on the best
            device. Give it launched.

    Returns:
        The confined network, its mask if there is one, and the history.

    Raises:
        InputError: A domain, the model or an argument can't be used; found before any learning.
        ArtifactError: ``output`` can't be written.
        NonFiniteError: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the state was saved if ``output`` was given.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> images, labels = torch.randn(64, 1, 2, 2), torch.arange(64) % 2
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> data = TensorDataset(images, labels)
        >>> from modelfence import SAMap
        >>> p = protect(model, authorized=data, unauthorized=TensorDataset(-images, labels),
        ...             method=SAMap(steps=2, batch_size=8))
        >>> type(p.model).__name__, p.history[-1]["step"]
        ('Sequential', 2)
    """
    given = {"authorized": authorized is not None, "unauthorized": unauthorized is not None}
    found, config = method_for(method, given, marked=ownership is not None or key is not None)
    base = unwrap(model)
    file = _state_file(output, resume=resume)
    kept = None if cache is None else writable_folder(cache, "cache")
    findings = require_maskable(base, masked=issubclass(found.config, MaskConfig))
    config = config.for_network(base)
    source = None if authorized is None else as_one_domain(authorized, image, labelled=found.labels)
    targets = {} if unauthorized is None else as_named_domains(unauthorized, image, labelled=found.labels)
    if key is not None or ownership is not None:
        source, targets = _with_marks(source, targets, key, ownership, image)
    held_out = _held_out(found, base, source, targets, config, image)
    apart = held_out if found.labels and config.held_out else None
    seen = {} if watch is None else as_named_domains(watch, image, argument="watch")
    check_class_names([*([] if source is None else [source]), *targets.values(), *seen.values()])
    watched = Watch.of(base, seen) if seen else None
    fabric = fabric or default_fabric(config.precision)
    computes_in_bfloat16(fabric)  # or is refused
    session = Session(
        fabric=fabric,
        authorized=held_out.source_rest,
        unauthorized=held_out.target_rest,
        monitor=_monitors(apart, watched),
        state_file=file,
        resume=resume,
        progress=progress,
        image=image,
        cache=kept,
        announce=(announce or _log_warning) if fabric.is_global_zero else None,
    )
    for one in findings if issubclass(found.config, MaskConfig) else []:
        if one.severity == "warning":
            session.warn(str(one).removeprefix(WARNING))
    named = {**({} if source is None else {"authorized": source}), **targets}
    for text in doubts(base, named, image, apart.source if apart is not None else None):
        session.warn(text)
    if found.check is not None:
        found.check(base, config, session)
    with attention_in_float32(fabric.device, str(fabric._precision.precision)):
        if isinstance(config, MaskConfig) and config.masks == "one_each":
            protection = _one_each(base, found, config, session, apart, watched)
            return replace(protection, image=image, classes=held_out.classes)
        learned = found.learn(base, config, session)
    if learned.weights is not None:
        confined, mask = with_weights(base, learned.weights), None
    else:
        mask = Mask.of(base, learned.kept, _metadata(config))
        confined = mask.apply(base)
        if mask.cut_share() == 0:
            session.warn("the mask cuts no weight, so the model is what it was: take more steps")
    told = tuple(session.warnings)
    return Protection(
        confined, mask, {}, learned.history, config, learned.synthetic, told, image=image, classes=held_out.classes
    )


def _state_file(output: str | Path | None, *, resume: bool) -> Path | None:
    if output is None:
        if resume:
            raise InputError("resume= needs output=: the folder where the run's state is kept")
        return None
    file = state_file(output, resume=resume)
    if not resume and states_of(file.parent):
        _LOGGER.warning("%s: the state of an earlier run is replaced; resume=True would go on with it", file.parent)
    return file


def _log_warning(text: str) -> None:
    """Log the text if it is a warning, for those who gave no function to tell."""
    if text.startswith(WARNING):
        _LOGGER.warning("%s", text.removeprefix(WARNING))


def _one_each(
    base: nn.Module,
    method: Method,
    config: MaskConfig,
    session: Session,
    apart: HeldOut | None,
    watched: Watch | None,
) -> Protection:
    if session.state_file is not None and not session.resume and session.fabric.is_global_zero:
        for left_over in set(states_of(session.state_file.parent)) - {session.state_file}:
            left_over.unlink()  # of another run: one that stops in an earlier mask would go on with it
    masks: dict[str, Mask] = {}
    history: list[Row] = []
    synthetic: list[Synthetic] = []
    for index, (name, domain) in enumerate(session.unauthorized.items()):
        file = session.state_file
        one = replace(
            session,
            unauthorized={name: domain},
            about=f"mask against {name!r}",
            monitor=_monitors(None if apart is None else apart.only(name), watched),
            state_file=None if file is None else file.with_name(f"state-{index}.safetensors"),
        )
        learned = method.learn(base, config, one)
        masks[name] = Mask.of(base, learned.kept, {**_metadata(config), "unauthorized": name})
        history += [{"mask": index, **row} for row in learned.history]
        synthetic.append(learned.synthetic)
    mask = Mask.combine(list(masks.values()), base)
    made = together(tuple(synthetic))
    return Protection(mask.apply(base), mask, masks, history, config, made, tuple(session.warnings))


def _held_out(
    method: Method,
    model: nn.Module,
    source: "Domain | None",
    targets: "Mapping[str, Domain]",
    config: LearnConfig,
    image: ImageSpec | None,
) -> HeldOut:
    """Keep a share of the domains apart to measure on; a method without labels sees to that itself."""
    if method.labels:
        return HeldOut.take(model, source, targets, share=config.held_out, seed=config.seed)
    every = {**targets, **({} if source is None else {source.name: source})}
    return HeldOut(check_images(model, every, image), None, {}, source, targets)


def _monitors(apart: HeldOut | None, watched: Watch | None) -> Monitor | None:
    """Return what measures the student at every evaluation: the held-out parts, and what is only watched."""
    found = [monitor for monitor in (apart, watched) if monitor is not None]
    if len(found) < 2:
        return found[0] if found else None
    return lambda student: {key: value for monitor in found for key, value in monitor(student).items()}


def _with_marks(
    source: "Domain | None",
    targets: "Mapping[str, Domain]",
    key: "Watermark | None",
    ownership: "Watermark | None",
    image: ImageSpec | None,
) -> "tuple[Domain, dict[str, Domain]]":
    from modelfence.ownership.marked import with_key, with_watermark

    if source is None:
        raise InputError(f"{'key' if ownership is None else 'ownership'}= needs authorized=: its images get the mark")
    found = dict(targets)
    if key is not None:
        source, found = with_key(source, found, key, image=image)
    return source, found if ownership is None else with_watermark(source, found, ownership, image=image)


def as_one_domain(thing: Any, image: ImageSpec | None, *, labelled: bool = True) -> "Domain":
    """Adapt whatever a user has for the authorized domain."""
    from modelfence.data.sources import as_domain

    name = None if isinstance(thing, str) else "authorized"
    return as_domain(thing, name=name, image=image, labelled=labelled)


def as_named_domains(
    thing: Any, image: ImageSpec | None, *, argument: str = "unauthorized", labelled: bool = True
) -> "dict[str, Domain]":
    """Adapt one or several domains, by name.

    Args:
        thing: Whatever a user has for them.
        image: What the model eats.
        argument: What they were given as.
        labelled: Whether labels are wanted; else they aren't looked at.

    Raises:
        InputError: None was given, or two have the same name.
    """
    from modelfence.data.sources import as_domain

    if isinstance(thing, Mapping):
        domains = {
            str(name): as_domain(one, name=str(name), image=image, labelled=labelled) for name, one in thing.items()
        }
    elif isinstance(thing, list | tuple):
        made = [
            as_domain(
                one,
                name=None if isinstance(one, str) else f"{_UNNAMED[argument]}_{index}",
                image=image,
                labelled=labelled,
            )
            for index, one in enumerate(thing)
        ]
        domains = {domain.name: domain for domain in made}
        if len(domains) < len(made):
            raise InputError(f"two domains of {argument}= have the same name; give a mapping with distinct names")
    else:
        name = None if isinstance(thing, str) else _UNNAMED[argument]
        one = as_domain(thing, name=name, image=image, labelled=labelled)
        domains = {one.name: one}
    if not domains:
        raise InputError(f"{argument}= is empty: give at least one domain")
    return domains


_UNNAMED = {"unauthorized": "unauthorized", "watch": "watched"}


def default_fabric(precision: str) -> "Fabric":
    """Return a Fabric for one process on the best device, in the precision asked for."""
    from lightning_fabric import Fabric

    from modelfence.models.autocast import resolve_precision

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = resolve_precision(precision, device)
    notices = logging.getLogger("lightning_fabric.utilities.rank_zero")
    level = notices.level
    notices.setLevel(logging.WARNING)
    try:
        return Fabric(accelerator=device, devices=1, precision="bf16-mixed" if chosen == "bf16" else "32-true")
    finally:
        notices.setLevel(level)


def _metadata(config: MaskConfig) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "method": type(config).__name__,
        "configuration": asdict(config),
        "versions": versions(),
    }
