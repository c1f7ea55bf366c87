"""One file per method: a frozen config and a function."""
