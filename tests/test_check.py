"""kamui-dist check: what it finds on real ranks, and whom it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kamui_dist.commands import preflight
from tests import tiny

SAME = {"uuid": "", "torch": "2.13", "nccl": "", "python": "3.12", "kamui_dist": "1", "device": "cpu", "code": "/x"}
ROWS = [SAME | {"host": host, "read": rate} for host, rate in [("a", 100.0), ("a", 110.0), ("b", 90.0), ("b", 100.0)]]
NAMES = [f"rank {r} ({row['host']})" for r, row in enumerate(ROWS)]


def check(*args: str, ranks: int = 1) -> tuple[int, str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, "-m", "kamui_dist.cli", "check", *args, "--megabytes=1", "--slow-factor=1000"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_slow_rank_is_named() -> None:
    assert preflight.slow(ROWS, NAMES, "read", "reads", 2.0) == []
    rows = [*ROWS[:3], ROWS[3] | {"read": 20.0}]
    [fault] = preflight.slow(rows, NAMES, "read", "reads", 2.0)
    assert fault == "rank 3 (b): reads 4.8 times slower than the others (20 against 95)"
    [fault] = preflight.slow(rows[2:], NAMES[2:], "read", "reads", 2.0)  # of two, the slower one
    assert fault.startswith("rank 3 (b)")
    assert preflight.slow([row | {"read": 0.0} for row in ROWS], NAMES, "read", "reads", 2.0) == []  # not measured


def test_a_rank_that_differs_is_named() -> None:
    assert preflight.differences(ROWS, NAMES) == []
    rows = [ROWS[0], ROWS[1], ROWS[2] | {"torch": "2.11"}, ROWS[3]]
    assert preflight.differences(rows, NAMES) == ["rank 2 (b): torch is '2.11', most have '2.13'"]
    same = [row | {"uuid": "gpu-1"} for row in ROWS]
    assert preflight.differences(same, NAMES) == [
        "rank 1 (a): uses the same GPU as rank 0 (a)", "rank 3 (b): uses the same GPU as rank 2 (b)",
    ]  # fmt: skip


@pytest.mark.slow
def test_four_ranks_on_the_mesh_of_a_config(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data")
    toml = tiny.write_toml(
        tmp_path / "c.toml", tiny.config(tmp_path / "run", data, parallel__replicate=2, parallel__shard=2)
    )
    code, out = check(str(toml), ranks=4)
    assert code == 0, out
    for part in (
        "HSDP 2 x 2 on 4 process(es)", "all-reduce     world of 4", "reduce-scatter shard of 2", "all-gather     replicate of 2",
        "parity: DDP 4 ", "parity: FSDP 4 ", "parity: HSDP 2 x 2 ", "check: all is well",
    ):  # fmt: skip
        assert part in out, out
    assert not (tmp_path / "run").exists()  # it leaves nothing behind


@pytest.mark.slow
def test_one_process_and_what_is_wrong(tmp_path: Path) -> None:
    data = tiny.write_data(tmp_path / "data")
    toml = str(tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", data)))
    code, out = check(toml)
    assert (code, out.splitlines()[-1]) == (0, "check: all is well"), out
    (tmp_path / "file").touch()
    code, out = check(toml, f"run.dir={tmp_path}/file/run")
    assert code == 1
    assert f"cannot write into {tmp_path}/file/run" in out
    assert "check: 1 fault(s)" in out
    code, out = check(toml, "parallel.shard=2", "parallel.replicate=1")
    assert (code, out.count("\n")) == (2, 1), out
