"""``modelfence verify``: the test of a claim that a model carries the owner's mark."""

import click
from click.core import ParameterSource

from modelfence.cli import options
from modelfence.cli.console import Console


@click.command(name="verify", short_help="Test a claim that a model carries your mark.")
@click.option("--model", metavar="SUSPECT", help="A saved folder, a network with --weights, or package.module:factory.")
@options.model_options
@click.option(
    "--clean", metavar="DOMAIN", help="The authorized domain; its test images are used, of an undivided folder all."
)
@click.option(
    "--watermark", metavar="KIND", default="digits", show_default=True, help="digits, objects, visda, custom."
)
@click.option("--value", type=int, help="What the mark adds; by default that of its kind.")
@click.option("--channel", type=int, default=0, show_default=True, help="Which channel it is added to.")
@click.option("--pattern", metavar="FILE", help="Greyscale image that isn't black where a custom mark is.")
@click.option("--mark-size", type=int, metavar="PIXELS", help="Size the mark was learned at, if not the suspect's.")
@click.option("--images", type=int, default=200, show_default=True, help="Images to ask about.")
@click.option(
    "--reference", multiple=True, metavar="MODEL", help="One without the mark, such as a folder; may be given again."
)
@click.option("--match-labels", is_flag=True, help="The suspect's classes may be in another order.")
@click.option("--alpha", type=float, default=1e-6, show_default=True, help="Level of the test.")
@click.option("--tolerance", type=float, help="Share an unmarked model may lose; by default 0.8, for weak marks 0.3.")
@click.option("--export", metavar="FOLDER", help="Write image pairs for somebody else to ask, and test nothing.")
@click.option("--predictions", metavar="FILE", help="Test the answers in a CSV file instead of a model.")
@click.option("--labels", metavar="KEY.csv", help="The key that --export wrote, for --predictions.")
@options.force
@options.as_json
def command(as_json: bool, **given: object) -> int:
    """Test a claim that a model carries your mark. Exit code 1 if the claim doesn't hold.

    The suspect sees test images without and with the mark. The claim holds if the mark takes more of what it gets right
    than chance explains for a model without one. With --export and --predictions somebody else asks the model. Choose
    mark, images and level before you see the suspect; the same options take the same images.

    \b
    modelfence verify --model found/ --clean mnist --watermark digits --value 80
    modelfence verify --export ask/ --model mine/ --clean mnist --watermark digits --value 80
    modelfence verify --predictions answers.csv --labels ask/labels.csv
    """
    from modelfence.cli.verify_job import Claim, run_verify

    context = click.get_current_context()
    said = {name for name in given if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    return run_verify(Claim(**given, said=said), Console(as_json=as_json))  # type: ignore[arg-type]  # checked by click
