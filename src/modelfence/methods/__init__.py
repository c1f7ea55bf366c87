"""One file per method: a frozen config and a function. Importing the package registers them."""

from modelfence.methods import cuti, dfmap, ntl, samap, sfmap

__all__ = ["cuti", "dfmap", "ntl", "samap", "sfmap"]
