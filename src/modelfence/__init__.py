"""Confine a trained image classifier to the domains its owner authorized."""

__version__ = "0.1.0.dev0"
