"""The command, killed or ended while images are made and while the mask is learned, loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import processes

from modelfence.artifact import read_history
from modelfence.cli.main import main
from modelfence.methods.state import load_state

QUICK = {
    "data.train_size": "60",
    "method.steps": "60",  # many more than are taken before the kill is noticed
    "method.batch_size": "16",
    "method.generated": "64",
    "method.translated": "64",
    "method.generator_steps": "6",
    "method.synthesis_batch": "16",
    "method.evaluate_every": "1",
    "method.learning_rate": "0.004",
    "method.precision": "fp32",
}
SETTINGS = {
    "source-free": (["--unauthorized", "font_digits"], {"method.restyled": "64"}),
    "data-free": ([], {"method.drawings": "64", "method.neighbours": "2048", "method.outside": "0.1"}),
}


def command(folder: Path, source: Path, setting: str, *more: str) -> None:
    """Run it in a process of its own."""
    domains, values = SETTINGS[setting]
    sets = [part for name, value in {**QUICK, **values}.items() for part in ("--set", f"{name}={value}")]
    os.chdir(folder)
    main(["protect", "--model", str(source), *domains, *sets, "--output", "out", *more], standalone_mode=False)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_command_killed_at_any_stage_goes_on_to_the_same_files(tmp_path: Path, source: Path, setting: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    processes.finish(processes.start(command, whole, source, setting))
    expected = (whole / "out/model.safetensors").read_bytes()

    made, state = killed / "out/unfinished", killed / "out/unfinished/state.safetensors"

    def parts() -> list[Path]:
        return sorted(path for path in made.rglob("*.safetensors") if path != state and not path.name.startswith("."))

    kept: dict[Path, int] = {}
    for stage in (made.is_dir, parts, state.is_file):
        process = processes.start(command, killed, source, setting, *(["--resume"] if made.is_dir() else []))
        processes.wait_until(stage, process)
        os.kill(process.pid, signal.SIGKILL)
        processes.finish(process)
        assert process.exitcode == -signal.SIGKILL
        assert not (killed / "out/model.safetensors").exists()
        files = {path: path.stat().st_ino for path in parts()}
        assert kept.items() <= files.items()  # found, not made anew
        kept = files
    assert kept
    learned = load_state(state)[1]["history"]
    processes.finish(processes.start(command, killed, source, setting, "--resume"))
    assert (killed / "out/model.safetensors").read_bytes() == expected
    history = read_history(killed / "out")
    assert len(history) > len(learned) > 0
    for now, then in zip(history, learned, strict=False):
        assert now["seconds"] == then["seconds"]  # not learned anew
    assert (killed / "out/mask/mask.safetensors").read_bytes() == (whole / "out/mask/mask.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ended_while_images_are_made_says_how_to_go_on(
    tmp_path: Path, source: Path, number: signal.Signals
) -> None:
    """Between the first message of a generator's fit and its last, as a scheduler does it."""
    values = {**QUICK, "method.restyled": "64", "method.generator_steps": "400"}
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    arguments = ["protect", "--model", str(source), "--unauthorized", "font_digits", *sets, "--output", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "modelfence", *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + processes.SECONDS
    while not (tmp_path / "out/unfinished").is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=processes.SECONDS)
    assert process.returncode == 130, said
    assert "what was done is in out: go on with --resume" in said.splitlines()[-1]
    assert (tmp_path / "out/unfinished/run.toml").is_file()
