"""One file per method: a frozen config and a function. Importing the package registers them."""

from modelfence.methods import samap

__all__ = ["samap"]
