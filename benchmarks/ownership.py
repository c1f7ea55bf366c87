"""Ownership: marked models, source-available, and independently trained models without the mark.

Marked: VGG11-BN source models learn a mask against their own images with the watermark (`SAMap(recipe="ownership")`,
one seed a cell);
two unmarked models of the same domain are the references of the claim. Unmarked: 20 small networks, five a digit
domain, each with its own weights, order and choice of 5,000 training images (of 7,291 for USPS); each is claimed to be
marked, with another one as reference. Claims are tested on 100 test images, spread evenly, and on all; CUTI's mark for
digits (value 80) beside NTL's (20), for the unmarked ones too. A finished cell is a file under results/ownership/ and
isn't run twice.

    python benchmarks/ownership.py
    python benchmarks/ownership.py --seeds 1 2 --domains mnist usps
    python benchmarks/ownership.py --domains svhn --values 20 --set '{"recipe": "default"}' --tag default
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            for seed in range(EACH) if domain in DIGITS else ():
                path = CELLS / "unmarked" / f"{domain}-{value}-{seed}.json"
                show(cell(path, lambda: measure_unmarked(domain, value, seed)))  # noqa: B023
            for seed in options.seeds:
                folder = f"marked-{options.network}" + (f"-{options.tag}" if options.tag else "")
                path = CELLS / folder / f"{domain}-{value}-{seed}.json"
                show(cell(path, lambda: measure_marked(domain, value, seed, options)))  # noqa: B023


def show(made):
    few, whole = made["claims"]["of 100"], made["claims"]["of all"]
    shown = f"{made['kind']:>8} {made['domain']:>8} {made['mark']['value']:>3} seed {made['seed']}"
    for verdict in (few, whole):
        clean, marked = verdict["accuracy_clean"], verdict["accuracy_marked"]
        shown += f" | {100 * clean:5.1f} / {100 * marked:5.1f} p {verdict['p_value']:.1e}"
    print(shown, flush=True)


if __name__ == "__main__":
    main()
