"""How long the methods of a table learn until the target is down as far as all of them get it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from modelfence.bench import paper
from modelfence.bench.cells import Record


def seconds_to_same_drop(records: Sequence[Record]) -> dict[str, list[tuple[float, bool]]]:
    """Return by method the seconds of learning to the same target accuracy, for each pair and seed.

    Beside them stands whether that was the first time that the run was measured: it may have got there sooner.

    The accuracy is the highest that any of the methods ended with on validation images, so that all got there. Pairs
    and seeds that a method lacks, or has no such accuracies of, are left out.

    Args:
        records: Results of cells with one target each.

    Example:
        >>> cell = {"source": "a", "targets": ["b"], "seed": 0}
        >>> fast = [{"seconds": 1.0, "target_accuracy:b": 0.3}, {"seconds": 2.0, "target_accuracy:b": 0.1}]
        >>> slow = [{"seconds": 4.0, "target_accuracy:b": 0.9}, {"seconds": 8.0, "target_accuracy:b": 0.3}]
        >>> seconds_to_same_drop([{"cell": {**cell, "method": "A"}, "history": fast},
        ...                       {"cell": {**cell, "method": "B"}, "history": slow}])
        {'A': [(1.0, True)], 'B': [(8.0, False)]}
    """
    runs: dict[tuple[str, str, int], dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for record in records:
        cell = record["cell"]
        curve = _curve(record.get("history", ()), cell["targets"])
        if curve:
            runs[cell["source"], cell["targets"][0], cell["seed"]][cell["method"]] = curve
    methods = list(dict.fromkeys(name for run in runs.values() for name in run))
    whole = [run for run in runs.values() if len(run) == len(methods)]
    levels = [max(curve[-1][1] for curve in run.values()) for run in whole]
    return {
        method: [
            next((seconds, place == 0) for place, (seconds, found) in enumerate(run[method]) if found <= level)
            for run, level in zip(whole, levels, strict=True)
        ]
        for method in methods
        if whole
    }


def times_notes(records: Sequence[Record]) -> list[str]:
    """Say what :func:`seconds_to_same_drop` finds; nothing where there aren't two methods to compare.

    Args:
        records: Results of cells.
    """
    times = seconds_to_same_drop(records)
    if len(times) < 2:
        return []
    count = len(next(iter(times.values())))
    said = ", ".join(
        f"{paper.title(method)} {sum(seconds for seconds, _ in found) / count:.0f} "
        f"({sum(first for _, first in found)} of {count} when first measured)"
        for method, found in times.items()
    )
    return [
        "Seconds of learning until the target's accuracy on validation images was first measured at or below the "
        f"highest that any of the methods ended with, mean over {count} pairs and seeds: {said}. What was reached when "
        "a run was first measured may have been reached long before. The training of the source model, from which all "
        "go on, isn't counted."
    ]


def _curve(history: Sequence[Mapping[str, float]], targets: Sequence[str]) -> list[tuple[float, float]]:
    """Return seconds and the target's accuracy at every measurement; empty with several targets or without it."""
    name = f"target_accuracy:{targets[0]}"
    if len(targets) != 1 or not all(name in row for row in history):
        return []
    return [(row["seconds"], row[name]) for row in history]
