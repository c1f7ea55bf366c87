"""What the benchmark scripts share: real domains, source models trained once, cells that are files."""

import json
import os
import platform
import time
from pathlib import Path

import torch

from modelfence import artifact
from modelfence.data.image_spec import ImageSpec
from modelfence.data.sources import as_domain
from modelfence.data.splits import protocol
from modelfence.files import atomic_write
from modelfence.models.load import load_model, save_model
from modelfence.models.training import TrainConfig, train
from modelfence.models.zoo import create_model

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"
WORK = Path(os.environ.get("MODELFENCE_BENCH", "out/bench"))


def image_spec(size):
    """RGB at the given height and width, pixels scaled to -1..1."""
    return ImageSpec(channels=3, height=size, width=size, mean=(0.5,) * 3, std=(0.5,) * 3)


def domains(name, size, seed, train_size=5000, validation_size=1000):
    """Return training, validation and test part of a domain (the 5,000 / 1,000 protocol, or what there is)."""
    spec = image_spec(size)
    whole = as_domain(name, image=spec, split="train")
    test = as_domain(name, image=spec, split="test")
    wanted = min(train_size, whole.size - min(validation_size, whole.size // 6))
    rest = min(validation_size, whole.size - wanted)
    learn, check = protocol(whole.size, wanted, rest, seed=seed)
    return whole.subset(learn, name), whole.subset(check, name), test


def source_model(network, domain, size, classes=10, seed=0):
    """Return the source model (SL) of a domain; it is trained once and kept in the work folder."""
    folder = WORK / "sl" / f"{network}-{domain}-{size}-{seed}"
    if (folder / "model.json").exists():
        return load_model(str(folder)).model
    torch.manual_seed(seed)
    learn, check, _ = domains(domain, size, seed)
    model = create_model(network, classes, image_spec(size))
    start = time.time()
    config = TrainConfig(epochs=6 if "bn" in network or "resnet" in network else 12, seed=seed)
    history = train(model, learn, check, config)
    extra = {"domain": domain, "seed": seed, "seconds": time.time() - start, "history": history}
    save_model(folder, model, reference=network, args={}, classes=classes, image=image_spec(size), extra=extra)
    return model


def cell(path, make):
    """Return a finished cell's content; run it and save it if it isn't finished."""
    path = Path(path)
    if path.exists():
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError:
            print(f"{path}: damaged, computed anew")
    result = make()
    atomic_write(path, json.dumps(result, indent=1) + "\n")
    return result


def machine():
    """Say what the numbers were measured on."""
    return {"processor": _processor(), **artifact.machine()}


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
