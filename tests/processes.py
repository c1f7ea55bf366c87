"""Run functions in processes of their own, with a time limit, and without a network port."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SECONDS = 180  # far more than any of them takes: a hang becomes a failure with a text

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["torch", "lightning_fabric", "modelfence.protect", "modelfence.data.sources"])


def start(function: Callable[..., object], *args: object) -> BaseProcess:
    """Start a function of a test module in a clean process that has imported torch already."""
    process = _FORKSERVER.Process(target=_one_thread, args=(function, args), daemon=True)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"process still ran after {SECONDS} s")


def wait_until(condition: Callable[[], bool], process: BaseProcess) -> None:
    """Wait for something that a process does; fail when it ends without doing it."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if not process.is_alive() and not condition():
            raise AssertionError(f"the process ended early (exit code {process.exitcode})")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"waited {SECONDS} s in vain")
        time.sleep(0.002)


def call(function: Callable[..., Any], *args: object, folder: Path) -> Any:
    """Return what a function returns in a process of its own; raise with its traceback when it raises."""
    target = folder / "answer"
    target.unlink(missing_ok=True)
    finish(start(_answer, function, args, target))
    return _read(target)


def ranks(function: Callable[..., Any], *args: object, folder: Path, world: int = 2) -> list[Any]:
    """Return what ``function(*args)`` returns in each of several processes joined by gloo over a file."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / f"answer-{rank}" for rank in range(world)]
    running = [
        start(_answer, _joined, (rank, world, folder / "store", function, args), target)
        for rank, target in enumerate(targets)
    ]
    for process in running:
        finish(process)
    return [_read(target) for target in targets]


def _one_thread(function: Callable[..., object], args: tuple[object, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    function(*args)


def _joined(rank: int, world: int, store: Path, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
    """Join the process group as torchrun's children do, so that Fabric finds its rank in the environment."""
    from datetime import timedelta

    import torch.distributed as dist

    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    limit = timedelta(seconds=SECONDS // 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world, timeout=limit)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def _answer(function: Callable[..., Any], args: tuple[object, ...], target: Path) -> None:
    try:
        content = pickle.dumps(("returned", function(*args)))
    except BaseException:
        content = pickle.dumps(("raised", traceback.format_exc()))
    temporary = target.with_suffix(".part")
    temporary.write_bytes(content)
    temporary.replace(target)


def _read(target: Path) -> Any:
    if not target.exists():
        raise AssertionError(f"the process for {target.name} died without an answer")
    kind, value = pickle.loads(target.read_bytes())  # noqa: S301 (written by the line above)
    if kind == "raised":
        raise AssertionError(f"in the other process:\n{value}")
    return value
