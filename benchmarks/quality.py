"""How well masks keep the source and close the target: ordered pairs of domains, several seeds.

One cell is one pair, recipe, network and seed; it is a file under results/quality/, and a finished cell isn't run
twice. The source models are trained once (seed 0) and shared; the seed is that of the mask's learning. --merge writes
the summary, results/quality.json.

    python benchmarks/quality.py --family digits --network vgg11_bn --recipe default --seeds 0 1 2
    python benchmarks/quality.py --merge
"""

import argparse
import itertools
import json
import math
import time
from dataclasses import asdict

import torch
from _common import RESULTS, cell, domains, image_spec, machine, source_model

import modelfence as mf
from modelfence.evaluation.metrics import mean_st_d, st_d
from modelfence.files import atomic_write
from modelfence.models.autocast import resolve_precision

FAMILIES = {
    "digits": {
        "size": 32,
        "classes": 10,
        "pairs": list(itertools.permutations(("mnist", "usps", "svhn", "mnist_m"), 2)),
    },
    "objects": {
        "size": 32,
        "classes": 10,
        "pairs": [("cifar10", "stl10"), ("stl10", "cifar10"), ("cifar10", "cinic10_imagenet")],
    },
    "pacs": {"size": 32, "classes": 7, "pairs": [("pacs_photo", "pacs_sketch")]},
}


CELLS = RESULTS / "quality"


def measure(family, network, recipe, source, target, seed, overrides):
    facts = FAMILIES[family]
    model = source_model(network, source, facts["size"], facts["classes"])
    source_learn, _, source_test = domains(source, facts["size"], 0)
    target_learn, _, target_test = domains(target, facts["size"], 0)
    method = mf.SAMap(recipe=recipe, seed=seed, **{"evaluate_every": 100, **overrides})
    start = time.time()
    protected = mf.protect(
        model,
        authorized=source_learn,
        unauthorized={target: target_learn},
        image=image_spec(facts["size"]),
        method=method,
    )
    seconds = time.time() - start
    table = mf.evaluate(
        protected.model,
        {source: source_test, target: target_test},
        before=model,
        image=image_spec(facts["size"]),
        refresh_on={source: source_learn, target: target_learn},
        precision=resolve_precision("auto"),
    )
    return {
        "family": family,
        "network": network,
        "recipe": recipe,
        "source": source,
        "target": target,
        "seed": seed,
        "seconds": round(seconds, 1),
        "cut_share": protected.mask.cut_share(),
        "evaluation": table.to_dict(),
        "history": [{key: round(value, 4) for key, value in row.items()} for row in protected.history],
        "configuration": asdict(method),
        "machine": machine(),
    }


def run(options):
    overrides = json.loads(options.set)
    tag = f"-{options.tag}" if options.tag else ""
    cells = list(itertools.product(options.seeds, FAMILIES[options.family]["pairs"]))
    if options.pairs:
        cells = [one for one in cells if ">".join(one[1]) in options.pairs]
    shard, shards = (int(part) for part in options.shard.split("/"))
    for seed, (source, target) in cells[shard - 1 :: shards]:
        name = f"{options.family}-{options.network}-{options.recipe}{tag}"
        path = CELLS / name / f"{source}-{target}-{seed}.json"
        made = cell(
            path,
            lambda: measure(options.family, options.network, options.recipe, source, target, seed, overrides),  # noqa: B023
        )
        print(name, line(made), flush=True)


def line(made):
    source, target = made["evaluation"]["scores"]
    shown = f"{made['source']:>12} > {made['target']:<12} seed {made['seed']}"
    for score in (source, target):
        before = score["before"]
        shown += f" | {100 * before['accuracy']:5.1f} > {100 * score['accuracy']:5.1f}"
        if score["refreshed_accuracy"] is not None:
            shown += f" (r {100 * before['refreshed_accuracy']:5.1f} > {100 * score['refreshed_accuracy']:5.1f})"
    return f"{shown} | cut {100 * made['cut_share']:4.1f} % | {made['seconds']:.0f} s"


def merge():
    """Summarize every folder of cells into one committed file."""
    rows = {}
    for folder in sorted(path for path in CELLS.iterdir() if path.is_dir()):
        cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        rows[folder.name] = summarize([numbers_of(made) for made in cells])
        print(folder.name, json.dumps(rows[folder.name]))
    atomic_write(RESULTS / "quality.json", json.dumps(rows, indent=1) + "\n")


def numbers_of(made):
    """Pick the numbers of a cell that the summary is made of."""
    source, target = made["evaluation"]["scores"]
    chance = 1 / FAMILIES[made["family"]]["classes"]
    at = target["before"]["balanced_accuracy"]
    before, after = source["before"], target["before"]
    return {
        "source": made["source"],
        "seed": made["seed"],
        "protectable": at >= chance + 0.05,
        "source_before": before["accuracy"],
        "source_after": source["accuracy"],
        "target_before": after["accuracy"],
        "target_after": target["accuracy"],
        "closure": (at - max(target["balanced_accuracy"], chance)) / (at - chance) if at > chance else math.nan,
        "refreshed": None
        if target["refreshed_accuracy"] is None
        else {
            "closure": (after["refreshed_accuracy"] - max(target["refreshed_accuracy"], chance))
            / (after["refreshed_accuracy"] - chance),
            "source_points": before["accuracy"] - source["refreshed_accuracy"],
        },
    }


def summarize(scores):
    """Mean over pairs for each seed, then mean, smallest and largest over seeds."""
    by_seed = {}
    for seed in sorted({one["seed"] for one in scores}):
        of_seed = [one for one in scores if one["seed"] == seed and one["protectable"]]
        row = {
            "pairs": len(of_seed),
            "relative_source_drop": mean(map(_source_drop, of_seed)),
            "closure": mean(one["closure"] for one in of_seed),
            "st_d": mean_st_d([_row(of_seed, source) for source in sorted({o["source"] for o in of_seed})]),
        }
        fresh = [one["refreshed"] for one in of_seed if one["refreshed"]]
        if fresh:
            row["closure_refreshed"] = mean(one["closure"] for one in fresh)
            row["source_points_lost_refreshed"] = mean(one["source_points"] for one in fresh)
        by_seed[seed] = row
    names = list(next(iter(by_seed.values())))
    return {
        name: {
            "mean": mean(row[name] for row in by_seed.values()),
            "min": min(row[name] for row in by_seed.values()),
            "max": max(row[name] for row in by_seed.values()),
            "seeds": len(by_seed),
        }
        for name in names
    }


def _row(scores, source):
    """ST-D of one source: mean relative source drop of its masks over the summed relative target drop."""
    mine = [one for one in scores if one["source"] == source]
    dropped = mean(map(_source_drop, mine))
    return st_d(
        1.0, 1.0 - dropped, [one["target_before"] for one in mine], [one["target_after"] for one in mine]
    )


def _source_drop(one):
    return (one["source_before"] - one["source_after"]) / one["source_before"]


def mean(values):
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="digits")
    parser.add_argument("--network", default="vgg11_bn")
    parser.add_argument("--recipe", choices=("default", "paper"), default="default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", nargs="*", help="source>target, only these")
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
