"""``modelfence doctor``: whether a model can be masked."""

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="doctor", short_help="Say whether a model can be masked.")
@click.argument("model")
@options.model_options
@options.as_json
def command(model: str, weights: str | None, classes: int | None, image_size: int | None, as_json: bool) -> int:
    """Say what speaks against masking a model. Exit code 1 if it can't be masked.

    MODEL is a folder that a model was saved to, a network of the zoo or of timm, package.module:factory, or a run file.
    A network without weights is looked at as it is built.
    """
    import torch

    from modelfence.cli.reference import load, load_untrained, run_of
    from modelfence.masking.preflight import preflight

    run = run_of(model, weights=weights, classes=classes, image_size=image_size)
    table = run.model
    if table is not None and table.name and not table.weights and run.image and table.classes:
        loaded = load_untrained(table, run.image, table.classes)
    else:
        loaded = load(table, run.image, model)
    findings = preflight(loaded.model, sample=torch.zeros(2, *loaded.image.shape))
    failed = any(finding.severity == "error" for finding in findings)
    verdict = "it can't be masked" if failed else "it can be masked"
    record = {"model": model, "maskable": not failed, "findings": [vars(finding) for finding in findings]}
    Console(as_json=as_json).result("\n".join([*map(str, findings), f"{model}: {verdict}"]), record)
    return int(failed)
