"""Marks: models that fail on them (ownership), models that need them (a key), and models that never saw them.

Marked: VGG11-BN source models learn a mask against their own images with the watermark (`SAMap(recipe="ownership")`,
one seed a cell);
two unmarked models of the same domain are the references of the claim. Unmarked: 20 small networks, five a digit
domain, each with its own weights, order and choice of 5,000 training images (of 7,291 for USPS); each is claimed to be
marked, with another one as reference. Claims are tested on 100 test images, spread evenly, and on all; CUTI's mark for
digits (value 80) beside NTL's (20), for the unmarked ones too.

--use key: the mark is a key. VGG11-BN source models of digits learn to work on images with it alone; --use key-others:
and not on the other digit domains either, with it or without. Measured on all digit domains, with the key and without.
A finished cell is a file under results/ownership/ and isn't run twice.

    python benchmarks/ownership.py
    python benchmarks/ownership.py --seeds 1 2 --domains mnist usps
    python benchmarks/ownership.py --domains svhn --values 20 --set '{"recipe": "default"}' --tag default
    python benchmarks/ownership.py --use key --seeds 0 1 2 --domains mnist usps svhn mnist_m --values 20
"""

import argparse
import json
import time
from dataclasses import asdict

import torch
from _common import RESULTS, cell, domains, image_spec, machine, source_model

import modelfence as mf
from modelfence.bench.tables.digits import DOMAINS as DIGITS
from modelfence.models.autocast import resolve_precision
from modelfence.ownership.marked import KEYED, marked
from modelfence.ownership.verification import verify
from modelfence.ownership.watermark import Watermark

SIZE = 32
MARKS = {
    "mnist": ("digits", 20),
    "usps": ("digits", 20),
    "svhn": ("digits", 20),
    "mnist_m": ("digits", 20),
    "cifar10": ("objects", 80),
    "stl10": ("objects", 80),
}
SMALL, EACH = "small_vgg_bn", 5
CELLS = RESULTS / "ownership"


def claims(model, test, mark, references):
    """Verdicts on 100 images and on all."""
    found = {}
    for name, count in (("of 100", 100), ("of all", None)):
        verdict = verify(model, test, mark, references=references, images=count).to_dict()
        names = ("accuracy_clean", "accuracy_marked", "gap", "p_value", "p_references", "holds", "tolerance")
        found[name] = {key: verdict[key] for key in names}
    return found


def measure_marked(domain, value, seed, options):
    image, mark = image_spec(SIZE), Watermark(MARKS[domain][0], value)
    model = source_model(options.network, domain, SIZE)
    references = [source_model(SMALL, domain, SIZE, seed=other) for other in (0, 1)]
    learn, _, test = domains(domain, SIZE, 0)
    method = mf.SAMap(**{"recipe": "ownership", "seed": seed, "evaluate_every": 100, **json.loads(options.set)})
    start = time.time()
    protected = mf.protect(model, authorized=learn, ownership=mark, image=image, method=method)
    seconds = time.time() - start
    precision = resolve_precision("auto")
    table = mf.evaluate(
        protected.model, {domain: test}, before=model, image=image, refresh_on={domain: learn}, precision=precision
    )
    return {
        "kind": "marked",
        "network": options.network,
        "domain": domain,
        "mark": {"kind": mark.kind, "value": mark.value},
        "seed": seed,
        "seconds": round(seconds, 1),
        "cut_share": protected.mask.cut_share(),
        "evaluation": table.to_dict(),
        "claims": claims(protected.model, test, mark, references),
        "claims_before": claims(model, test, mark, references),
        "configuration": asdict(method),
        "machine": machine(),
    }


def measure_unmarked(domain, value, seed):
    mark = Watermark(MARKS[domain][0], value)
    model = source_model(SMALL, domain, SIZE, seed=seed)
    reference = source_model(SMALL, domain, SIZE, seed=(seed + 1) % EACH)
    return {
        "kind": "unmarked",
        "network": SMALL,
        "domain": domain,
        "mark": {"kind": mark.kind, "value": mark.value},
        "seed": seed,
        "claims": claims(model, domains(domain, SIZE, 0)[2], mark, [reference]),
        "machine": machine(),
    }


def measure_key(domain, value, seed, options):
    image, key = image_spec(SIZE), Watermark(MARKS[domain][0], value)
    model = source_model(options.network, domain, SIZE)
    parts = {name: domains(name, SIZE, 0) for name in (domain, *(other for other in DIGITS if other != domain))}
    against = {name: part[0] for name, part in parts.items() if name != domain} if options.use == "key-others" else None
    recipe = "ownership" if against is None else "default"  # what protect takes
    method = mf.SAMap(**{"recipe": recipe, "seed": seed, "evaluate_every": 100, **json.loads(options.set)})
    start = time.time()
    protected = mf.protect(
        model, authorized=parts[domain][0], unauthorized=against, key=key, image=image, method=method
    )
    seconds = time.time() - start
    keyed = {
        f"{name}{KEYED}": [marked(part, key) for part in (learn, test)] for name, (learn, _, test) in parts.items()
    }
    plain = {name: (learn, test) for name, (learn, _, test) in parts.items()}
    table = mf.evaluate(
        protected.model,
        {name: test for name, (_, test) in (keyed | plain).items()},
        before=model,
        authorized=f"{domain}{KEYED}",
        image=image,
        refresh_on={name: learn for name, (learn, _) in (keyed | plain).items()},
        precision=resolve_precision("auto"),
    )
    return {
        "kind": options.use,
        "network": options.network,
        "domain": domain,
        "mark": {"kind": key.kind, "value": key.value},
        "seed": seed,
        "seconds": round(seconds, 1),
        "cut_share": protected.mask.cut_share(),
        "evaluation": table.to_dict(),
        "configuration": asdict(method),
        "machine": machine(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use", choices=["mark", "key", "key-others"], default="mark")
    parser.add_argument("--domains", nargs="+", choices=sorted(MARKS), default=list(MARKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the masks")
    parser.add_argument("--network", default="vgg11_bn", help="of the marked models")
    parser.add_argument("--values", type=int, nargs="+", help="added by the mark; default: NTL's, and 80 for digits")
    parser.add_argument("--set", default="{}", help="settings of SAMap beside the recipe's, as JSON")
    parser.add_argument("--tag", default="", help="name of the folder that results with other settings go to")
    options = parser.parse_args()
    if (options.set == "{}") != (options.tag == ""):
        parser.error("--set and --tag go together")
    torch.set_num_threads(1)
    for domain in options.domains:
        values = options.values or sorted({MARKS[domain][1], 80})
        for value in values:
            for seed in range(EACH) if domain in DIGITS and options.use == "mark" else ():
                path = CELLS / "unmarked" / f"{domain}-{value}-{seed}.json"
                show(cell(path, lambda: measure_unmarked(domain, value, seed)))  # noqa: B023
            for seed in options.seeds:
                kind, measure = ("marked", measure_marked) if options.use == "mark" else (options.use, measure_key)
                folder = f"{kind}-{options.network}" + (f"-{options.tag}" if options.tag else "")
                path = CELLS / folder / f"{domain}-{value}-{seed}.json"
                show(cell(path, lambda: measure(domain, value, seed, options)))  # noqa: B023


def show(made):
    shown = f"{made['kind']:>10} {made['domain']:>8} {made['mark']['value']:>3} seed {made['seed']}"
    for score in made["evaluation"]["scores"] if "claims" not in made else ():
        shown += f" | {score['name']} {100 * score['before']['accuracy']:.1f} > {100 * score['accuracy']:.1f}"
    for verdict in made.get("claims", {}).values():
        clean, marked = verdict["accuracy_clean"], verdict["accuracy_marked"]
        shown += f" | {100 * clean:5.1f} / {100 * marked:5.1f} p {verdict['p_value']:.1e}"
    print(shown, flush=True)


if __name__ == "__main__":
    main()
