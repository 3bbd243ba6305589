"""The chaos command, short: a dozen faults of all sorts in a real training under torchrun, and nothing may be lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import chaos


@pytest.mark.slow
@pytest.mark.timeout(600)  # 204 s were measured at load 2 to 4; starting ranks takes most of it
def test_a_dozen_faults_and_nothing_is_lost(tmp_path, capfd):
    code = chaos.main(["--faults", "12", "--seed", "8", "--steps", "90", "--directory", str(tmp_path)])
    told = capfd.readouterr().out
    assert code == 0, told
    assert "12 faults" in told
    assert "nothing lost, all tensors and records bitwise equal" in told
    assert list(tmp_path.iterdir()) == []


def test_the_faults_are_those_of_the_seed():
    def told(seed: int, first: int = 1, count: int = 60) -> list[tuple[int, str, str, float]]:
        faults = chaos.deck(first, count, seed, [], chaos.DECK)
        return [(f.number, f.kind, f.aim, f.draw.random()) for f in faults]

    assert told(1) == told(1)
    assert told(1) != told(2)
    assert told(1)[40:] == told(1, 41, 20)  # a fault can be had again alone
    assert {kind for _, kind, *_ in told(1, count=len(chaos.DECK))} == {kind for kind, _ in chaos.DECK}


def test_what_differs_is_seen(tmp_path):
    """The comparison at the end, which must not be one that always says yes."""
    import shutil

    from tests import tiny

    data = tiny.write_data(tmp_path / "data")
    assert tiny.run(tiny.config(tmp_path / "a", data, data__val_path=str(data))) == 0
    assert chaos.differences(tmp_path / "a", tmp_path / "a") == []

    def changed(**overrides: object) -> str:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        assert tiny.run(tiny.config(tmp_path / "b", data, data__val_path=str(data), **overrides)) == 0
        return "; ".join(chaos.differences(tmp_path / "b", tmp_path / "a"))

    assert "final tensors differ" in (told := changed(optim__lr=0.1000001))
    assert "step record of step 1 differs" in told
    assert "other steps" in changed(train__steps=4)
    assert changed() == ""
    metrics = tmp_path / "b" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    twice = next(line for line in lines if json.loads(line)["kind"] == "step")
    metrics.write_text("".join(lines) + twice)
    assert "not each once" in "; ".join(chaos.differences(tmp_path / "b", tmp_path / "a"))


def test_only_marked_processes_are_found_and_killed():
    code = "import time; print(1, flush=True); time.sleep(60)"
    marks = ["chaos-test.1.", "chaos-test.11.", "other"]
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "KAMUI_CHAOS": mark}, stdout=subprocess.PIPE)
        for mark in marks
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        assert set(chaos.marked("chaos-test.")) == {processes[0].pid, processes[1].pid}
        assert chaos.kill_marked("chaos-test.1.") == 1
        assert processes[0].wait(10) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
