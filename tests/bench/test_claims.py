import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelfence.bench import claims
from modelfence.bench.claims import claimed, is_claimed
from modelfence.errors import ArtifactError


def test_a_claim_holds_inside_the_block_and_is_gone_after(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    with claimed(path) as mine:
        assert mine
        assert is_claimed(path)
        with claimed(path) as again:
            assert not again
        assert is_claimed(path)
    assert not is_claimed(path)
    assert list(path.parent.iterdir()) == []


def test_a_claim_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claimed(tmp_path / "x"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_dead_process_s_claim_is_taken_over_by_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    code = "import os, sys; from modelfence.bench.claims import claimed; from pathlib import Path\n"
    code += "with claimed(Path(sys.argv[1])) as mine: print(mine, flush=True); os._exit(9)"
    dead = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (dead.stdout.strip(), dead.returncode) == ("True", 9)
    assert [one.name for one in tmp_path.iterdir()] == ["x.json.claim-0"]
    assert not is_claimed(path)
    with claimed(path) as mine, claimed(path) as second:
        assert (mine, second) == (True, False)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["x.json.claim-0", "x.json.claim-1"]
    assert list(tmp_path.iterdir()) == []


def test_a_living_process_s_claim_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    code = "import sys; from modelfence.bench.claims import claimed; from pathlib import Path\n"
    code += "with claimed(Path(sys.argv[1])) as mine: print(mine, flush=True); sys.stdin.readline()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as other:
        assert other.stdout.readline().strip() == "True"
        assert is_claimed(path)
        with claimed(path) as mine:
            assert not mine
        other.communicate("\n")
    assert not is_claimed(path)


def test_two_that_took_over_at_different_times_don_t_both_hold_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One saw a dead claim; before it takes that over, another did, finished, and a third began anew."""
    path = tmp_path / "x.json"
    dead = tmp_path / "x.json.claim-0"
    dead.write_text(json.dumps({"machine": claims._machine(), "process": os.getpid(), "started": "before"}))
    seen = iter([[dead]])
    real = claims._claims
    monkeypatch.setattr(claims, "_claims", lambda path: next(seen, None) or real(path))
    stale = iter([True])
    judged = claims._is_stale
    monkeypatch.setattr(claims, "_is_stale", lambda claim: next(stale, False) or judged(claim))
    dead.write_text(json.dumps(claims._me()))  # the third one's
    with claimed(path) as mine:
        assert not mine
    assert [one.name for one in tmp_path.iterdir()] == ["x.json.claim-0"]


def test_the_claim_of_a_successor_is_left(tmp_path: Path) -> None:
    later = tmp_path / "x.json.claim-1"
    with claimed(tmp_path / "x.json") as mine:
        assert mine
        later.write_text(json.dumps({"machine": ["elsewhere"], "process": 1, "started": "1"}))
    assert list(tmp_path.iterdir()) == [later]


@pytest.mark.parametrize(("age", "stale"), [(10, False), (claims.SILENCE + 10, True)])
def test_another_machine_s_claim_is_stale_once_it_is_silent(tmp_path: Path, age: float, stale: bool) -> None:
    claim = tmp_path / "x.json.claim-3"
    claim.write_text(json.dumps({"machine": ["elsewhere"], "process": os.getpid(), "started": "1"}))
    moment = time.time() - age
    os.utime(claim, (moment, moment))
    with claimed(tmp_path / "x.json") as mine:
        assert mine is stale


def test_a_reused_process_number_doesn_t_keep_a_claim(tmp_path: Path) -> None:
    with claimed(tmp_path / "x") as mine:
        assert mine
        owner = json.loads((tmp_path / "x.claim-0").read_text())
    (tmp_path / "x.claim-0").write_text(json.dumps({**owner, "started": "before this one"}))
    assert not is_claimed(tmp_path / "x")


def test_a_claim_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.01)
    with claimed(tmp_path / "x"):
        os.utime(tmp_path / "x.claim-0", (0, 0))
        limit = time.monotonic() + 20
        while (tmp_path / "x.claim-0").stat().st_mtime == 0 and time.monotonic() < limit:
            time.sleep(0.01)
        assert (tmp_path / "x.claim-0").stat().st_mtime > 0


def test_a_claim_that_can_t_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"claim-0: can't be written"), claimed(tmp_path / "file" / "x"):
        pass
