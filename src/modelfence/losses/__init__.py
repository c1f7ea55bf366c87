"""Losses as pure functions, one family a file."""
