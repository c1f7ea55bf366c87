"""One file per method: a frozen config and a function. Importing the package registers them."""

from modelfence.methods import dfmap, samap, sfmap

__all__ = ["dfmap", "samap", "sfmap"]
