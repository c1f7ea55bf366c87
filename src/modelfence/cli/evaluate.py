"""``modelfence evaluate``: accuracies of a model, and drops against the one it was made from."""

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="evaluate", short_help="Measure a model on domains.")
@click.argument("model")
@click.argument("domains", metavar="[DOMAIN]...", nargs=-1)
@click.option("--before", metavar="BASE", help="The model it was made from: a folder, a reference or a weights file.")
@click.option("--authorized", multiple=True, metavar="NAME", help="The authorized domain; by default the first.")
@options.model_options
@options.sets
@options.as_json
def command(
    model: str,
    domains: tuple[str, ...],
    before: str | None,
    authorized: tuple[str, ...],
    weights: str | None,
    classes: int | None,
    image_size: int | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure a model on the test images of domains.

    MODEL is a folder that a model was saved to, a network with --weights, package.module:factory, or a run file, whose
    domains are taken when none is named. A DOMAIN is a catalog name, a path, hub:owner/name, or name=one of these.

    \b
    modelfence evaluate out/ mnist usps --before sl/
    modelfence evaluate sl/ mnist --set evaluate.limit=1000
    modelfence evaluate out/ mnist --set key.kind=digits
    """
    import torch

    from modelfence.cli.marks import require_free_names, with_marks
    from modelfence.cli.measured import Measured, labelled_in, measured_by, role_warning
    from modelfence.cli.parts import load_test, note_undivided
    from modelfence.cli.reference import description, load, load_before, named_domains, output_hint, run_of
    from modelfence.data.class_names import check_class_names
    from modelfence.errors import InputError
    from modelfence.evaluation.table import evaluate
    from modelfence.methods.loop import WARNING

    console = Console(as_json=as_json)
    run = run_of(model, weights=weights, classes=classes, image_size=image_size, sets=sets)
    given = named_domains(domains)
    measured = measured_by(run, labels_of=labelled_in(run)) if given is None else Measured(given)
    if not measured.domains:
        raise InputError("evaluate: DOMAIN is missing; name at least one, such as mnist (see modelfence domains)")
    loaded = load(run.model, run.image, model)
    measured = measured if given else measured.with_origin(loaded.extra)
    note_undivided(measured.domains, console)
    require_free_names(run, measured.domains)
    roles = list(authorized or measured.authorized) or list(measured.domains)[: bool(given)]
    tests = {name: load_test(name, text, loaded.image, loaded.classes) for name, text in measured.domains.items()}
    check_class_names(list(tests.values()), loaded.extra.get("class_names"))
    console.note(f"measuring {description(run.model)}")
    if model.endswith(".toml") and (hint := output_hint(run, model)) is not None:
        console.note(f"  {hint}")
    if given is None and not authorized and (warning := role_warning(run, measured)) is not None:
        console.note(f"  {WARNING}{warning}")
    shown, roles = with_marks(run, tests, roles, loaded.image)
    table = evaluate(
        loaded.model,
        shown,
        before=load_before(before, loaded).model if before else None,
        authorized=roles,
        limit=run.evaluate.limit,
        batch_size=run.evaluate.batch_size,
        refresh_images=run.evaluate.refresh_images,
        precision=run.evaluate.precision,
        device="cuda" if torch.cuda.is_available() else None,
    )
    console.result(str(table), table.to_dict())
