"""Write docs/results.md from the committed result files: every number in it comes from there.

python benchmarks/tables.py
"""

import json
import math
from pathlib import Path

from _common import RESULTS
from quality import CELLS, numbers_of, summarize, targets_of

from modelfence.files import atomic_write
from modelfence.report import style

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
HEAD = """# Results

Made by `python benchmarks/tables.py` from the files in `benchmarks/results/`; don't edit by hand. How each was
measured is in the script named; every cell file holds its configuration, seed, versions and machine. The source
models are trained from scratch (no ImageNet weights), once a domain, and shared by all seeds; the seed is that of
the mask's learning. Images are 32 x 32, at most 5,000 of each domain to learn from. Tests are on the test images of
reduced copies of the data sets: 2,000 of mnist, mnist_m and svhn, 1,007 of usps, 1,500 of cifar10 and stl10, 1,000 of
cinic10_imagenet, 330 of a PACS domain, 269 of scikit-learn's digits; "all test images" are those. They aren't the
official splits: svhn's images all come from its official test part, cifar10's from its training part, split without
overlap.

What was chosen by looking at test images, by seed 0: the default recipe's step count and learning rate on four pairs
(mnist > usps, usps > mnist, mnist_m > mnist, svhn > mnist_m); that the rate of the recipe "paper" falls, on the
8 pairs of VGG11-BN, and where its bound lies, on mnist > svhn, usps > mnist and svhn > usps (VGG11); the recipe for
ownership on svhn. No recipe was chosen on the objects or on PACS, but the trade-off shows the settings that were tried
on CIFAR-10 > STL-10, all but one (unlearning how much the answers depend on the image: 38 % of the source at closure
0.57, no result file). That DFMap's agreement weighs 16 without BatchNorm, with source images too, was chosen on svhn
and mnist_m.

"fifth" has scikit-learn's digits as target, a domain that nothing was chosen on, and was run once. Nothing was chosen
with ResNet-18 either. Without BatchNorm the default recipe's values are those of "paper" (decision 17): read the
results of that name. Of the ViT (of timm, 192 dimensions, patches of 4 pixels) one pair was looked at before that was
decided. "default-distillation" is the default recipe of before, 600 steps without BatchNorm, "default-ascent0.1" the
same with less weight on the unlearning; "decay1" lets the rate fall over all of the steps.

The headings say family, network, setting (sf: source-free, df: data-free; none: source-available) and recipe. "paper"
has the paper's bound on each image and a rate that falls to zero over the last half of the steps (decisions 12 and 16);
"elementwise" has the bound on the scale of an element-wise mean (cells with `limit=10` instead are the same for 10
classes), "batch" on the batch's mean, as printed, "constant_rate" kept the rate, and "1872steps" took twice the steps.
"limit_chance" bounds an image's unlearning where its class can't be the most probable one any more (`limit=None`), and
"ascent0.2" weighs the unlearning at a fifth of the default. The source-free default recipe was chosen on seed 0 of
mnist > usps, mnist_m > mnist, mnist > mnist_m and svhn > usps; earlier states of it had been measured on svhn > mnist,
usps > mnist and mnist_m > usps too. The data-free one takes its settings over; its weight of the agreement, 8, was
compared with others on seed 0 of mnist and mnist_m, its other settings on mnist, mnist_m and svhn. What differs without
BatchNorm (decision 11) was chosen on seed 0 of mnist > usps, usps > mnist, svhn > usps, mnist_m > mnist and svhn >
mnist_m. What follows "default-" are other recipes (most are those of decisions 9 to 11): "weight4" has another weight
of the agreement, "rate4e-4" another learning rate, "copies_apart" kept copies in random styles apart from images near
the source without BatchNorm too, "image_filter50" judged neighbours image by image, with `outside=0.5`, "300steps" took
300 steps, "100steps" fitted the generators for 100; the other source-free ones of vgg11 took 450 steps where the
default without BatchNorm takes 900, and "weight8" differs in nothing else. "limit2" ends the unlearning of an image at
2 nats, not at the log of the classes + 0.2 (2.5). "so": source only, unlabelled source images.
Seed 1 of digits-vgg11-sf-default lacks svhn > mnist_m.
Older cells have `null` for settings that were the recipe's (the weight of the agreement is that of the name, or 8).

Means are over pairs whose target stood at least 5 points above chance before (balanced accuracy); the others have
nothing to protect and are marked †. Closure is on balanced accuracy, all else on plain accuracy where nothing is said;
an accuracy below chance counts as chance. "s" is seconds on a busy machine, not a measure of speed.
"""

TRADED = {
    "digits, VGG11-BN, mean of 8 pairs": ("digits-vgg11_bn-", None),
    "CIFAR-10 > STL-10, VGG13-BN": ("objects-vgg13_bn-", "cifar10>stl10"),
}
"""What the trade-off shows: the beginning of the cells' names, and the pair, or None for the means over pairs."""
TRADED_PAIRS = 8


def number(value, digits):
    """Write a number; one that is undefined as a dash."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value):
    return f"{100 * value:.1f}"


def read_cells():
    return {
        path.name: [json.loads(one.read_text()) for one in sorted(path.glob("*.json"))]
        for path in sorted(CELLS.iterdir())
        if any(path.glob("*.json"))
    }


def trade_off(found):
    """Source-available masks that lose more or less of the source, and close more or less of the target."""
    yield "## Trade-off\n"
    yield "Source-available, seed 0, in order of source drop (closure on balanced accuracy). The bound is that on the"
    yield "unlearning of an image, or of a batch, in nats of cross-entropy; the rate falls to zero over the last share"
    yield "of the steps.\n"
    yield "![Closure over source drop](trade-off.svg)\n"
    yield "| | | steps | rate falls over | bound | source drop, % | closure | closure after refresh |"
    yield "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"
    drawn = {}
    for title, (prefix, pair) in TRADED.items():
        rows = []
        for name, cells in found.items():
            mine = [one for one in cells if one["seed"] == 0 and (pair is None or traded_pair(one) == pair)]
            if not name.startswith(prefix) or not mine or mine[0].get("setting", "sa") != "sa":
                continue
            means = summarize([row for made in mine for row in numbers_of(made)])
            if not means or means["pairs"]["mean"] < (1 if pair else TRADED_PAIRS):
                continue
            numbers = [means[key]["mean"] for key in ("relative_source_drop", "closure", "closure_refreshed")]
            rows.append((*numbers, name, mine[0]["configuration"]))
        rows.sort(key=lambda row: row[0])
        drawn[title] = [(100 * drop, closure) for drop, closure, *_ in rows]
        for drop, closure, refreshed, name, configuration in rows:
            told = " | ".join((number(100 * drop, 2), number(closure, 3), number(refreshed, 3)))
            facts = f"{configuration['steps']} | {configuration['decay']:g} | {bound(configuration)}"
            yield f"| {title} | {name} | {facts} | {told} |"
    draw(drawn)


def traded_pair(made):
    return f"{made['source']}>{targets_of(made)}"


def bound(configuration):
    """Say where unlearning ends, in nats of cross-entropy."""
    limit, ascent = configuration["limit"], configuration["ascent"]
    if limit is None:
        return "log of classes + 0.2, image"
    scale = 10 if configuration.get("scale") == "elementwise" else 1  # all of these have 10 classes
    return f"{scale * limit / ascent:.3g}, {'image' if configuration['clamp'] == 'sample' else 'batch mean'}"


@style.styled()
def draw(drawn):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.WIDTH, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for (title, points), colour in zip(drawn.items(), (style.AUTHORIZED, style.UNAUTHORIZED), strict=True):
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=title, markersize=5)
    axes.set(xlabel="relative source drop, %", ylabel="closure", ylim=(0, 1.02))
    lowest = min(x for points in drawn.values() for x, _ in points)
    axes.set_xlim(left=min(0, lowest - 0.5))
    axes.grid(visible=True)
    axes.legend(loc="lower right")
    style.save_svg(figure, PAGE.with_name("trade-off.svg"))


def quality(found):
    recipes = {name: cells for name, cells in found.items() if name.endswith(("-default", "-paper"))}
    tried = {name: cells for name, cells in found.items() if name not in recipes}
    parts = ["## Recipes\n", *overview(recipes), ""]
    for name, cells in recipes.items():
        parts += [f"### {name}\n", *summary(cells), "", *pairs(cells), ""]
    parts += ["## Tried\n", "Variants.\n", *overview(tried), ""]
    for name, cells in tried.items():
        parts += [f"### {name}\n", *summary(cells), "", *pairs(cells), ""]
    return parts


def overview(found):
    """One row for each folder of cells: means over pairs, then over seeds."""
    yield "| | seeds | pairs | source drop, % | balanced, % | closure | ST-D | closure after refresh |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, cells in found.items():
        rows = summarize([one for made in cells for one in numbers_of(made)])
        if not rows:
            yield f"| {name} | {len({made['seed'] for made in cells})} | 0 | | | | | |"
            continue
        shown = [
            number(scale * rows[key]["mean"], digits) if key in rows else ""
            for key, scale, digits in (
                ("relative_source_drop", 100, 2),
                ("balanced_source_drop", 100, 2),
                ("closure", 1, 3),
                ("st_d", 1, 3),
                ("closure_refreshed", 1, 3),
            )
        ]
        count = rows["pairs"]
        yield f"| {name} | {count['seeds']} | {pair_count(count)} | {' | '.join(shown)} |"


def pair_count(count):
    """Say over how many pairs a mean is; seeds may have different ones."""
    low, high = (f"{count[key]:.0f}" for key in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def summary(cells):
    rows = summarize([one for made in cells for one in numbers_of(made)])
    if not rows:
        yield f"{len(cells)} cells; no target has anything to protect, so there are no means."
        return
    count = rows["pairs"]
    yield f"{len(cells)} cells, {count['seeds']} seed(s), {pair_count(count)} pairs in the means.\n"
    yield "| mean over pairs | mean of seeds | smallest | largest |"
    yield "| --- | ---: | ---: | ---: |"
    names = {
        "relative_source_drop": "relative source drop, %",
        "balanced_source_drop": "relative source drop of the balanced accuracy, %",
        "closure": "closure",
        "st_d": "ST-D",
        "closure_refreshed": "closure after refresh",
        "source_points_lost_refreshed": "source points lost after refresh on source images",
    }
    for key, title in names.items():
        if key in rows:
            scale = (
                100 if key in ("relative_source_drop", "balanced_source_drop", "source_points_lost_refreshed") else 1
            )
            values = [number(scale * rows[key][part], 3) for part in ("mean", "min", "max")]
            yield f"| {title} | {' | '.join(values)} |"


def pairs(cells):
    fresh = cells[0]["evaluation"]["scores"][0]["refreshed_accuracy"] is not None
    more = " source, refreshed | target, refreshed |" if fresh else ""
    yield f"| source > target | seed | source | target | target, balanced |{more} cut, % | s |"
    yield f"| --- | ---: | ---: | ---: | ---: |{' ---: | ---: |' if fresh else ''} ---: | ---: |"
    for made in sorted(cells, key=lambda one: (one["source"], targets_of(one), one["seed"])):
        source, *targets = made["evaluation"]["scores"]
        for target, numbers in zip(targets, numbers_of(made), strict=True):
            columns = [(source, "accuracy"), (target, "accuracy"), (target, "balanced_accuracy")]
            columns += [(source, "refreshed_accuracy"), (target, "refreshed_accuracy")] if fresh else []
            shown = " | ".join(f"{percent(score['before'][key])} > {percent(score[key])}" for score, key in columns)
            name = f"{made['source']} > {target['name']}{'' if numbers['protectable'] else ' †'}"
            yield f"| {name} | {made['seed']} | {shown} | {percent(made['cut_share'])} | {made['seconds']:.0f} |"


def speed():
    for path in sorted(RESULTS.glob("speed*.json"), key=lambda path: (len(path.name), path.name)):
        yield from speed_on(json.loads(path.read_text()))


def speed_on(found):
    machine = found["machine"]
    yield f"## Speed, {machine['processor']}\n"
    yield (
        f"`python benchmarks/speed.py`: batch {found['batch']}, two steps in turn, median of the ratios pair by pair; "
        "peak memory is the median of five processes each. "
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}.\n"
    )
    yield "| compared | network | precision | time | quartiles | images/s | peak memory |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for row in found["rows"]:
        low, high = row["ratio_quartiles"]
        peak = f"{row['peak_ratio']:.2f} x" if "peak_ratio" in row else ""
        rates = " / ".join(f"{rate:.0f}" for rate in row["images_per_second"])
        yield (
            f"| {row['compare']} | {row['network']} | {row['precision']} | {row['ratio']:.2f} x "
            f"| {low:.2f}-{high:.2f} | {rates} | {peak} |"
        )
    yield ""


def source_free():
    """What a source-free run costs."""
    path = RESULTS / "source_free.json"
    if not path.exists():
        return
    found = json.loads(path.read_text())
    machine, floor = found["machine"], found["fine-tuning"]
    yield "## Cost of a source-free run\n"
    yield (
        f"`python benchmarks/source_free.py`: {found['network']}, {found['size']} px, from end to end. "
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}. Peak memory is that of the "
        f"run over that of fine-tuning ({floor['peak_bytes'] / 2**20:.0f} MiB). Stages in seconds; backward and "
        "forward passes are those of learning and of making images together.\n"
    )
    stages = [*found["runs"][0]["stages"], *found["runs"][0]["within"]]
    yield f"| source > target | seconds | peak memory | {' | '.join(stages)} |"
    yield f"| --- |{' ---: |' * (2 + len(stages))}"
    for run in found["runs"]:
        spent = {**run["stages"], **run["within"]}
        shown = " | ".join(f"{spent[name]:.0f}" for name in stages)
        yield f"| {run['source']} > {run['target']} | {run['seconds']:.0f} | {run['peak_ratio']:.2f} x | {shown} |"


def marks():
    """Cells of benchmarks/ownership.py."""
    return [json.loads(path.read_text()) for path in sorted((RESULTS / "ownership").rglob("*.json"))]


def keys():
    """Models that need a key."""
    cells = [made for made in marks() if made["kind"] in ("key", "key-others")]
    if not cells:
        return
    yield "\n## A mark as a key\n"
    yield "`python benchmarks/ownership.py --use key`, and `--use key-others`, where the mask was learned against the"
    yield "other digit domains too, with the key and without. Accuracies in percent on all test images, before > after;"
    yield "of the other three digit domains the mean. The drop is that of the source with the key, relative, from its"
    yield "accuracy with the key before.\n"
    heads = ["", "network", "recipe", "domain", "mark", "seed", "with the key", "without", "without, refreshed"]
    heads += ["others with the key", "others without", "drop, %"]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- | --- | --- | --- |" + " ---: |" * (len(heads) - 4)
    for made in sorted(cells, key=lambda one: (one["kind"], one["domain"], one["mark"]["value"], one["seed"])):
        scores = {score["name"]: score for score in made["evaluation"]["scores"]}
        own, bare = scores.pop(f"{made['domain']}+key"), scores.pop(made["domain"])
        keyed, plain = (
            [one for name, one in scores.items() if name.endswith("+key") == with_key] for with_key in (True, False)
        )
        before = own["before"]["accuracy"]
        facts = [made["kind"], made["network"], made["configuration"]["recipe"], made["domain"], made["mark"]["value"]]
        shown = [change([own]), change([bare]), change([bare], "refreshed_accuracy"), change(keyed), change(plain)]
        drop = f"{100 * (before - own['accuracy']) / before:.2f}"
        yield "| " + " | ".join(map(str, [*facts, made["seed"], *shown, drop])) + " |"
    yield ""


def change(scores, name="accuracy"):
    """A mean over domains, before > after."""
    if any(score[name] is None for score in scores):
        return "-"
    before, after = (sum(one[name] for one in some) / len(some) for some in ([s["before"] for s in scores], scores))
    return f"{percent(before)} > {percent(after)}"


def ownership():
    """Marked models, and models without the mark."""
    cells = [made for made in marks() if "claims" in made]
    if not cells:
        return
    yield "\n## Ownership\n"
    yield "`python benchmarks/ownership.py`; accuracies in percent on all test images, p of the claim on 100 and on all"
    yield "of them, with unmarked models of the same domain as references; the drop is that of the source, relative."
    yield "Unmarked vgg11_bn models are those that were marked then. With value 80 claims at a tolerance of 0.5"
    yield "are from before the default became 0.8: unmarked models exceed it.\n"
    heads = ["", "network", "recipe", "domain", "mark", "tolerance", "seed", "clean", "marked", "gap", "drop, %"]
    heads += ["p of 100", "p of all", "holds"]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- | --- | --- | --- |" + " ---: |" * (len(heads) - 5) + " --- |"
    cells += before_marking(cells)
    for made in sorted(cells, key=lambda one: (one["kind"], one["domain"], one["mark"]["value"], one["seed"])):
        few, whole = made["claims"]["of 100"], made["claims"]["of all"]
        drop = "-"
        if made["kind"] == "marked":
            (score,) = made["evaluation"]["scores"]
            before = score["before"]["accuracy"]
            drop = f"{100 * (before - score['accuracy']) / before:.2f}"
        shown = [percent(whole[key]) for key in ("accuracy_clean", "accuracy_marked", "gap")]
        p = [f"{one['p_value']:.1e}" for one in (few, whole)]
        recipe = made["configuration"]["recipe"] if made["kind"] == "marked" else "-"
        facts = [made["kind"], made["network"], recipe, made["domain"], made["mark"]["value"]]
        facts += [whole["tolerance"], made["seed"]]
        holds = "yes" if few["holds"] and whole["holds"] else "no"
        yield "| " + " | ".join(map(str, [*facts, *shown, drop, *p, holds])) + " |"
    yield ""


def before_marking(cells):
    """What the models that were marked then are claimed to be: each once, as an unmarked one."""
    seen = {}
    for made in cells:
        if "claims_before" in made:
            tolerance = made["claims_before"]["of all"]["tolerance"]
            key = (made["network"], made["domain"], made["mark"]["value"], tolerance)
            seen.setdefault(key, {**made, "kind": "unmarked", "claims": made["claims_before"]})
    return list(seen.values())


def rivals():
    """Tables of ``modelfence bench`` that are committed."""
    for path in sorted((RESULTS / "bench").glob("*.md")):
        yield path.read_text().replace("### ", "## ", 1).rstrip() + "\n"


def main():
    found = read_cells()
    text = "\n".join(
        [HEAD, *speed(), *source_free(), *ownership(), *keys(), *rivals(), *trade_off(found), "", *quality(found)]
    )
    atomic_write(PAGE, text.rstrip() + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()
