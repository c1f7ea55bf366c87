"""One file for each table of the paper: which cells it has, and how they become rows."""
