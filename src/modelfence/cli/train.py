"""``modelfence train``: a source model."""

import click

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="train", short_help="Train a source model.")
@click.argument("run_file", metavar="[RUN.toml]", required=False)
@click.option("--domain", help="What to learn: a catalog name, a path, or hub:owner/name.")
@click.option("--network", help="A network of the zoo or of timm, or package.module:factory.")
@options.weights
@options.output
@click.option("--epochs", type=int, help="Passes over the training images.")
@click.option("--seed", type=int, help="Of weights, order and shifts.")
@options.image_size
@click.option("--whole", is_flag=True, help="Train on all images, not on 5,000.")
@options.sets
@options.force
@options.as_json
def command(
    run_file: str | None,
    domain: str | None,
    network: str | None,
    weights: str | None,
    output: str | None,
    epochs: int | None,
    seed: int | None,
    image_size: int | None,
    whole: bool,
    sets: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Train a source model on a domain.

    The settings come from a run file, from options, or from both; options go before the file.

    \b
    modelfence train --domain mnist --network vgg11_bn --output sl/
    """
    from modelfence.cli.reference import image_option, model_option, named_domains
    from modelfence.cli.runfile import read_run
    from modelfence.cli.train_job import train_model

    given = {
        "model": ("--network", model_option(network) if network else None),
        "model.weights": ("--weights", weights),
        "image": ("--image-size", image_option(image_size)),
        "data.authorized": ("--domain", named_domains([domain] if domain else [])),
        "data.train_size": ("--whole", "whole" if whole else None),
        "train.epochs": ("--epochs", epochs),
        "train.seed": ("--seed", seed),
        "output.folder": ("--output", output),
    }
    console = Console(as_json=as_json)
    run = read_run(run_file, options=given, sets=sets)
    report = train_model(run, console, force=force)
    if not report:
        return
    folder = run.output.folder if run.output else ""
    text = (
        f"{100 * report['test_accuracy']:.1f} % right on {report['images']['test']:,} test images of "
        f"{report['domain']}; the model is in {folder}"
    )
    console.result(text, report)
