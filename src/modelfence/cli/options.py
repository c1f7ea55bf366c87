"""Options that several verbs share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Verb = TypeVar("Verb", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
sets = click.option("--set", "sets", multiple=True, metavar="TABLE.KEY=VALUE", help="Set one value of the run file.")
force = click.option("--force", is_flag=True, help="Replace an earlier result in the output folder.")
output = click.option("--output", metavar="FOLDER", help="Where results go.")
weights = click.option("--weights", metavar="FILE", help="Weights: .safetensors, .pt or .pth, or a saved folder.")
classes = click.option("--classes", type=int, help="Number of classes; a saved folder knows it.")
image_size = click.option("--image-size", type=int, metavar="PIXELS", help="RGB images, this high and wide.")


def model_options(verb: Verb) -> Verb:
    """Add the options that say more about a model named on the command line."""
    for option in (image_size, classes, weights):
        verb = option(verb)
    return verb
