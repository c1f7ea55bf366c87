"""What source-free protection costs from end to end: seconds by stage, and peak memory beside fine-tuning.

Each run is a process of its own with two threads: `protect(model, unauthorized=...)` with `SFMap()` on VGG11-BN, 32
pixels, 5,000 unauthorized images. The first target begins with an empty folder of synthetic images; the second one
finds those that don't depend on the target. Stages are read off Python's profiler (cumulative time of the functions
named, and within the learning, of the calls into the autograd engine and of layers). Peak memory is what the resident
set grew by after the model and the data were loaded (read on Linux); the floor is plain fine-tuning of all weights,
one epoch of the source's images in batches of 64.

    python benchmarks/source_free.py
"""

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import RESULTS, domains, image_spec, machine, source_model
from speed import resident

import modelfence as mf
from modelfence.files import atomic_write
from modelfence.models.training import TrainConfig, train

SIZE, NETWORK = 32, "vgg11_bn"
STAGES = {
    "generated images": ("generation.py", "generate"),
    "translated images": ("translation.py", "translate"),
    "restyled copies": ("restyling.py", "restyle"),
    "pseudo-labels": ("pseudo_labels.py", "pseudo_labels"),
    "learning": ("material.py", "learn_on"),
}
WITHIN = {
    "backward passes": ("", "run_backward"),
    "student's forward passes": ("masked_model.py", "forward"),
    "measuring proxies": ("material.py", "__call__"),
    "optimizer": ("adam.py", "step"),
}


def protect(source, target, cache):
    """One run, profiled."""
    model = source_model(NETWORK, source, SIZE)
    learn, image = domains(target, SIZE, 0)[0], image_spec(SIZE)
    next(learn.once(5000))
    before = fresh_peak()
    profiler = cProfile.Profile()
    start = time.perf_counter()
    with profiler:
        mf.protect(model, unauthorized={target: learn}, image=image, method=mf.SFMap(), cache=Path(cache))
    seconds = time.perf_counter() - start
    found = pstats.Stats(profiler).stats
    return {
        "source": source,
        "target": target,
        "seconds": round(seconds, 1),
        "stages": {name: cumulative(found, *where) for name, where in STAGES.items()},
        "within": {name: cumulative(found, *where) for name, where in WITHIN.items()},
        "peak_bytes": resident("VmHWM") - before,
    }


def finetune(source):
    """One epoch of plain training, for its memory."""
    model = source_model(NETWORK, source, SIZE)
    learn, check, _ = domains(source, SIZE, 0)
    next(learn.once(5000))
    before = fresh_peak()
    start = time.perf_counter()
    train(model, learn, check, TrainConfig(epochs=1, batch_size=64))
    return {"seconds": round(time.perf_counter() - start, 1), "peak_bytes": resident("VmHWM") - before}


def fresh_peak():
    """Forget the peak so far, which loading had; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def cumulative(found, file, function):
    """Seconds in a function and in all that it calls."""
    names = (function, f"<method '{function}' of")
    rows = [row[3] for (path, _, name), row in found.items() if path.endswith(file) and name.startswith(names)]
    return round(max(rows, default=0.0), 1)


def process(*what):
    command = [sys.executable, __file__, "--probe", *what]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist")
    parser.add_argument("--targets", nargs=2, default=["usps", "mnist_m"])
    parser.add_argument("--output", type=Path, default=RESULTS / "source_free.json")
    parser.add_argument("--probe", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.probe:
        print(json.dumps(protect(*options.probe) if len(options.probe) > 1 else finetune(*options.probe)))
        return
    floor = process(options.source)
    print(floor, flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for target in options.targets:
            rows.append(process(options.source, target, cache))
            rows[-1]["peak_ratio"] = round(rows[-1]["peak_bytes"] / floor["peak_bytes"], 2)
            print(rows[-1], flush=True)
    result = {"network": NETWORK, "size": SIZE, "machine": machine(), "fine-tuning": floor, "runs": rows}
    atomic_write(options.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
