"""What a mask step costs beside plain fine-tuning, and the folded model beside the original.

Each line compares two steps of one network on one batch, taken in turn (A B A B ...), as the median of the ratios pair
by pair. Peak memory is measured in processes of their own: what the resident set grew by after the imports, median of
five.

    python benchmarks/speed.py --output benchmarks/results/speed.json
    python benchmarks/speed.py --only precisions --rounds 7 --output benchmarks/results/speed-xeon.json
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from _common import RESULTS, image_spec, machine
from torch.func import functional_call
from torch.nn import functional as F

from modelfence.files import atomic_write
from modelfence.losses.classification import clamped_ascent, cross_entropy
from modelfence.masking.mask import Mask
from modelfence.masking.masked_model import MaskedModel
from modelfence.models.autocast import attention_in_float32, autocast, resolve_precision
from modelfence.models.zoo import create_model

NETWORKS = {
    "vgg11": ("vgg11", 32, {}),
    "resnet18": ("resnet18", 32, {}),
    "vit_tiny": ("vit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 4}),
}
BATCH = 64
PRECISIONS = ("fp32", "bf16")


def batch_of(size):
    torch.manual_seed(1)
    images = torch.randn(BATCH, 3, size, size).to(memory_format=torch.channels_last)
    return images, torch.arange(BATCH) % 10


def finetune_step(name, precision):
    """Plain fine-tuning of all weights, in the contexts that ``train`` uses: the floor."""
    network, size, args = NETWORKS[name]
    model = create_model(network, 10, image_spec(size), **args).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    images, labels = batch_of(size)

    def step():
        with attention_in_float32("cpu", precision):
            with autocast("cpu", precision):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def mask_step(name, precision):
    """A step of SA-MAP as the paper has it (Eq. 1): half the batch authorized, half unauthorized."""
    network, size, args = NETWORKS[name]
    model = create_model(network, 10, image_spec(size), **args)
    dtype = torch.bfloat16 if precision == "bf16" else None
    masked = MaskedModel(model, dtype=dtype, channels_last=True)
    del model
    optimizer = torch.optim.Adam(masked.scores.parameters(), lr=1e-4, fused=True)
    images, labels = batch_of(size)
    half = BATCH // 2

    def step():
        with attention_in_float32("cpu", precision):
            with autocast("cpu", precision):
                logits = masked(images)
            loss = cross_entropy(logits[:half], labels[:half]) - clamped_ascent(logits[half:], labels[half:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def naive_step(name):
    """The same step as it is usually written first: float32, contiguous, a float mask, Adam as it comes."""
    network, size, args = NETWORKS[name]
    model = create_model(network, 10, image_spec(size), **args).eval().requires_grad_(False)
    weights = {key: value for key, value in model.named_parameters() if value.ndim > 1}
    scores = {key: torch.full_like(value, 1e-2).requires_grad_() for key, value in weights.items()}
    optimizer = torch.optim.Adam(scores.values(), lr=1e-4)
    images, labels = batch_of(size)
    images = images.contiguous()
    half = BATCH // 2

    def step():
        masked = {}
        for key, score in scores.items():
            hard = (score > 5e-3).float()
            masked[key] = weights[key] * (hard.detach() + score - score.detach())
        logits = functional_call(model, masked, (images,))
        loss = F.cross_entropy(logits[:half], labels[:half])
        loss = loss - (0.1 * F.cross_entropy(logits[half:], labels[half:])).clamp(max=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(name, *, folded):
    """A forward pass of the original or of the folded model."""
    network, size, args = NETWORKS[name]
    torch.manual_seed(0)
    model = create_model(network, 10, image_spec(size), **args).eval()
    if folded:
        masked = MaskedModel(model)
        for score in masked.scores:
            score.data.uniform_(0, 1e-1)
        model = Mask.of(model, masked.kept()).apply(model)
    images, _ = batch_of(size)

    @torch.inference_mode()
    def step():
        model(images)

    return step


def in_turn(first, second, rounds):
    """Return the pairwise ratios first/second and both medians in seconds."""
    for step in (first, second, first, second):
        step()
    times = ([], [])
    for _ in range(rounds):
        for step, into in ((first, times[0]), (second, times[1])):
            start = time.perf_counter()
            step()
            into.append(time.perf_counter() - start)
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "seconds": [statistics.median(part) for part in times],
        "images_per_second": [BATCH / statistics.median(part) for part in times],
        "rounds": rounds,
    }


PROBES = 5


def memory(kind, name, precision):
    """Peak growth of the resident set in bytes, over a few steps in a fresh process; the median of several."""
    command = [sys.executable, __file__, "--probe", kind, name, precision]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(PROBES)]
    return statistics.median(int(run.stdout.split()[-1]) for run in runs)


def probe(kind, name, precision):
    create_model(*NETWORKS[name][:1], 10, image_spec(32), **NETWORKS[name][2])
    gc.collect()
    before = resident("VmRSS")
    step = finetune_step(name, precision) if kind == "finetune" else mask_step(name, precision)
    for _ in range(4):
        step()
    print(resident("VmHWM") - before)


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "speed.json")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--only", choices=["precisions"], help="bfloat16 beside float32 alone")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(*options.probe)
        return
    rows = []
    for name in options.networks:
        row = in_turn(mask_step(name, "bf16"), mask_step(name, "fp32"), options.rounds)
        rows.append({"compare": "bfloat16 / float32 paper step", "network": name, "precision": "both", **row})
        report(rows[-1])
        if options.only:
            continue
        for precision in PRECISIONS:
            row = in_turn(mask_step(name, precision), finetune_step(name, precision), options.rounds)
            peak = [memory(kind, name, precision) for kind in ("mask", "finetune")]
            row |= {"peak_bytes": peak, "peak_ratio": peak[0] / peak[1]}
            rows.append({"compare": "paper step / fine-tuning step", "network": name, "precision": precision, **row})
            report(rows[-1])
        row = in_turn(inference(name, folded=True), inference(name, folded=False), 2 * options.rounds)
        rows.append({"compare": "folded / original inference", "network": name, "precision": "fp32", **row})
        report(rows[-1])
        fast = mask_step(name, resolve_precision("auto"))
        row = in_turn(naive_step(name), fast, options.rounds)
        rows.append({"compare": "naive step / paper step", "network": name, "precision": "auto", **row})
        report(rows[-1])
    atomic_write(options.output, json.dumps({"machine": machine(), "batch": BATCH, "rows": rows}, indent=1) + "\n")


def report(row):
    peak = f", peak {row['peak_ratio']:.2f} x" if "peak_ratio" in row else ""
    print(f"{row['network']:>9} {row['precision']:>5}  {row['compare']}: {row['ratio']:.3f} x{peak}", flush=True)


if __name__ == "__main__":
    main()
