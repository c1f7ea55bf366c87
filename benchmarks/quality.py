"""How well masks keep the source and close the target: ordered pairs of domains, several seeds.

Settings: "sa" (source-available, SAMap) and "sf" (source-free, SFMap) learn one mask a pair, "df" (data-free, DFMap)
and "so" (source only, DFMap with unlabelled source images) one mask against all other domains of the family. One cell
is one mask: source, targets, recipe, network and seed; it is a file under results/quality/, and a finished cell isn't
run twice. The source models are trained once (seed 0) and shared; the seed is that of the mask's learning, and of the
synthesis. Closure is taken on balanced accuracy, drops on both. --merge writes the summary, results/quality.json.

    python benchmarks/quality.py --family digits --network vgg11_bn --recipe default --seeds 0 1 2
    python benchmarks/quality.py --merge
"""

import argparse
import itertools
import json
import math
import sys
import time
from dataclasses import asdict

import torch
from _common import RESULTS, WORK, cell, domains, image_spec, machine, source_model

import modelfence as mf
from modelfence.bench.cells import read_record
from modelfence.bench.source_models import SourceModel
from modelfence.bench.tables.digits import DOMAINS as DIGITS
from modelfence.evaluation.metrics import mean_st_d, st_d
from modelfence.files import atomic_write
from modelfence.models.autocast import resolve_precision

FAMILIES = {
    "digits": {"size": 32, "classes": 10, "pairs": list(itertools.permutations(DIGITS, 2))},
    "fifth": {"size": 32, "classes": 10, "pairs": [(name, "sklearn_digits") for name in DIGITS]},
    "objects": {
        "size": 32,
        "classes": 10,
        "pairs": [("cifar10", "stl10"), ("stl10", "cifar10"), ("cifar10", "cinic10_imagenet")],
    },
    "pacs": {
        "size": 32,
        "classes": 7,
        "pairs": [("pacs_photo", f"pacs_{style}") for style in ("sketch", "art_painting", "cartoon")],
    },
}


SETTINGS = {"sa": mf.SAMap, "sf": mf.SFMap, "df": mf.DFMap, "so": mf.DFMap}
CELLS = RESULTS / "quality"


def measure(options, source, targets, seed):
    facts = FAMILIES[options.family]
    image = image_spec(facts["size"])
    model = source_model(options.network, source, facts["size"], facts["classes"])
    parts = {name: domains(name, facts["size"], 0) for name in (source, *targets)}
    tests = {name: part[2] for name, part in parts.items()}
    learn = {name: part[0] for name, part in parts.items()}
    method = method_of(options, model, seed)
    start = time.time()
    protected = mf.protect(
        model,
        authorized=learn[source] if options.setting in ("sa", "so") else None,
        unauthorized=None if options.setting in ("df", "so") else {name: learn[name] for name in targets},
        image=image,
        method=method,
        watch=None if options.setting == "sa" else {name: part[1] for name, part in parts.items()},
        cache=WORK / "synthetic",
    )
    seconds = time.time() - start
    table = mf.evaluate(
        protected.model, tests, before=model, image=image, refresh_on=learn, precision=resolve_precision("auto")
    )
    return {
        "family": options.family,
        "network": options.network,
        "setting": options.setting,
        "recipe": options.recipe,
        "source": source,
        "targets": list(targets),
        "seed": seed,
        "seconds": round(seconds, 1),
        "cut_share": None if protected.mask is None else protected.mask.cut_share(),
        "evaluation": table.to_dict(),
        "history": [{key: round(value, 4) for key, value in row.items()} for row in protected.history],
        "configuration": asdict(protected.config),
        "machine": machine(),
    }


def method_of(options, model, seed):
    """Return the configuration that a mask of this seed is learned by."""
    overrides = {"evaluate_every": 100, **json.loads(options.set)}
    return SETTINGS[options.setting](recipe=options.recipe, seed=seed, **overrides).for_network(model)


_ONCE_NONE = ("restyled", "source_weight")
"""Fields that were None in older cells where the recipe's value was taken."""


def require_current(path, options, model, seed):
    """Stop where a finished cell was made with other settings than those asked for.

    A field that a cell lacks didn't exist then and had its present default. How often a run is measured changes no
    mask.
    """
    found = read_record(path, print)
    if found is None:
        return
    wanted = asdict(method_of(options, model, seed))
    recorded = found["configuration"]
    defaults = asdict(SETTINGS[options.setting](recipe=options.recipe).for_network(model))
    told = {name: recorded.get(name, defaults[name]) for name in sorted(wanted.keys() - {"evaluate_every"})}
    unknown = [name for name in _ONCE_NONE if told.get(name, 0) is None]
    other = {name: value for name, value in told.items() if value != wanted[name] and name not in unknown}
    if other:
        sys.exit(f"{path}: was made with {other}: move it, or name these results otherwise (--tag)")


def run(options):
    cells = list(itertools.product(options.seeds, masks(options)))
    if options.pairs:
        cells = [one for one in cells if ">".join((one[1][0], "+".join(one[1][1]))) in options.pairs]
    shard, shards = (int(part) for part in options.shard.split("/"))
    setting = "" if options.setting == "sa" else f"-{options.setting}"
    name = f"{options.family}-{options.network}{setting}-{options.recipe}" + (f"-{options.tag}" if options.tag else "")
    mine = [
        (seed, source, targets, CELLS / name / f"{source}-{'+'.join(targets)}-{seed}.json")
        for seed, (source, targets) in cells[shard - 1 :: shards]
    ]
    facts = FAMILIES[options.family]
    untrained = SourceModel(options.network, "", facts["size"], facts["classes"]).create()
    for seed, *_, path in mine:
        require_current(path, options, untrained, seed)
    for seed, source, targets, path in mine:
        made = cell(path, lambda: measure(options, source, targets, seed))  # noqa: B023
        print(name, line(made), flush=True)


def masks(options):
    """Source and targets of every mask of a family."""
    pairs = FAMILIES[options.family]["pairs"]
    if options.setting not in ("df", "so"):
        return [(source, (target,)) for source, target in pairs]
    sources = list(dict.fromkeys(source for source, _ in pairs))
    return [(one, tuple(target for source, target in pairs if source == one)) for one in sources]


def line(made):
    shown = f"{made['source']:>12} > {targets_of(made):<12} seed {made['seed']}"
    for score in made["evaluation"]["scores"]:
        before = score["before"]
        shown += f" | {100 * before['accuracy']:5.1f} > {100 * score['accuracy']:5.1f}"
        if score["refreshed_accuracy"] is not None:
            shown += f" (r {100 * before['refreshed_accuracy']:5.1f} > {100 * score['refreshed_accuracy']:5.1f})"
    return f"{shown} | cut {100 * made['cut_share']:4.1f} % | {made['seconds']:.0f} s"


def targets_of(made):
    return "+".join(made.get("targets") or [made["target"]])


def merge():
    """Summarize every folder of cells into one committed file."""
    rows = {}
    for folder in sorted(path for path in CELLS.iterdir() if any(path.glob("*.json"))):
        cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        found = summarize([one for made in cells for one in numbers_of(made)])
        rows[folder.name] = {
            name: {part: None if math.isnan(value) else value for part, value in numbers.items()}
            for name, numbers in found.items()
        }
        print(folder.name, json.dumps(rows[folder.name]))
    atomic_write(RESULTS / "quality.json", json.dumps(rows, indent=1, allow_nan=False) + "\n")


def numbers_of(made):
    """Pick the numbers of a cell that the summary is made of, one row for each target."""
    source, *targets = made["evaluation"]["scores"]
    chance = 1 / FAMILIES[made["family"]]["classes"]
    before = source["before"]
    kept = "balanced_accuracy"
    rows = []
    for target in targets:
        after, at = target["before"], target["before"]["balanced_accuracy"]
        rows.append(
            {
                "source": made["source"],
                "seed": made["seed"],
                "protectable": at >= chance + 0.05,
                "source_before": before["accuracy"],
                "source_after": source["accuracy"],
                "balanced_drop": (before[kept] - source[kept]) / before[kept],
                "target_before": after["accuracy"],
                "target_after": target["accuracy"],
                "closure": _closure(at, target["balanced_accuracy"], chance),
                "refreshed": None
                if target["refreshed_accuracy"] is None
                else {
                    "closure": _closure(after["refreshed_accuracy"], target["refreshed_accuracy"], chance),
                    "source_points": before["accuracy"] - source["refreshed_accuracy"],
                },
            }
        )
    return rows


def _closure(before, after, chance):
    return (before - max(after, chance)) / (before - chance) if before > chance else math.nan


def summarize(scores):
    """Mean over pairs for each seed, then mean, smallest and largest over seeds; empty where nothing is protectable."""
    by_seed = {}
    for seed in sorted({one["seed"] for one in scores}):
        of_seed = [one for one in scores if one["seed"] == seed and one["protectable"]]
        row = {
            "pairs": len(of_seed),
            "relative_source_drop": mean(map(_source_drop, of_seed)),
            "balanced_source_drop": mean(one["balanced_drop"] for one in of_seed),
            "closure": mean(one["closure"] for one in of_seed),
            "st_d": mean_st_d([_row(of_seed, source) for source in sorted({o["source"] for o in of_seed})]),
        }
        fresh = [one["refreshed"] for one in of_seed if one["refreshed"]]
        if fresh:
            row["closure_refreshed"] = mean(one["closure"] for one in fresh)
            row["source_points_lost_refreshed"] = mean(one["source_points"] for one in fresh)
        if of_seed:
            by_seed[seed] = row
    return {
        name: {
            "mean": mean(row[name] for row in by_seed.values()),
            "min": min(row[name] for row in by_seed.values()),
            "max": max(row[name] for row in by_seed.values()),
            "seeds": len(by_seed),
        }
        for name in next(iter(by_seed.values()), {})
    }


def _row(scores, source):
    """ST-D of one source: mean relative source drop of its masks over the summed relative target drop."""
    mine = [one for one in scores if one["source"] == source]
    dropped = mean(map(_source_drop, mine))
    return st_d(1.0, 1.0 - dropped, [one["target_before"] for one in mine], [one["target_after"] for one in mine])


def _source_drop(one):
    return (one["source_before"] - one["source_after"]) / one["source_before"]


def mean(values):
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="digits")
    parser.add_argument("--network", default="vgg11_bn")
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="sa")
    parser.add_argument("--recipe", choices=("default", "paper"), default="default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", nargs="*", help="source>target (data-free: source>a+b+c), only these")
    parser.add_argument("--shard", default="1/1", help="i/n: this process's part of the cells")
    parser.add_argument("--set", default="{}", help="JSON of configuration values that differ from the recipe")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--merge", action="store_true", help="write the summary of all cells")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    merge() if options.merge else run(options)


if __name__ == "__main__":
    main()
