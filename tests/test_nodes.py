"""Two machines without a scheduler: network namespaces joined by a virtual cable, and launch/node.sh on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.slurm.cluster import until

ROOT = Path(__file__).resolve().parent.parent
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ADDRESSES = ("10.98.7.1", "10.98.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, env=os.environ | {"PATH": PATH}, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that see each other, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip", path=PATH) is None:
        pytest.skip("needs root and ip (iproute2)")
    names = (f"kamui{os.getpid()}a", f"kamui{os.getpid()}b")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire0")
            for device in ("lo", "wire0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "del", name], env=os.environ | {"PATH": PATH}, capture_output=True, check=False
            )


def start(machine: str, number: int, *args: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "MAX_RESTARTS", "MASTER_PORT")} | {
        "NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": ADDRESSES[0], "NPROC": "1", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "wire0", "PATH": PATH, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, str(ROOT / "launch/node.sh"), *args],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_machines_train_as_one_does_and_stop_together(machines: tuple[str, str], tmp_path: Path) -> None:
    if not (ROOT / ".venv/bin/python").exists() and shutil.which("python3") != sys.executable:
        pytest.skip("node.sh finds another Python than this one")
    data = tiny.write_data(tmp_path / "data")
    toml = str(tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", data)))
    nodes = [start(machine, number, toml) for number, machine in enumerate(machines)]
    for node in nodes:
        out = node.communicate(timeout=150)[0]
        assert node.returncode == 0, out

    assert run_ranks(tiny.run, 2, tiny.config(tmp_path / "alone", data)) == [0, 0]
    assert tiny.same(tiny.weights(tmp_path / "run"), tiny.weights(tmp_path / "alone"))

    # One node is asked: both stop at the same step, and say so.
    nodes = [start(m, i, toml, "train.steps=100000", f"run.dir={tmp_path}/long") for i, m in enumerate(machines)]
    metrics = tmp_path / "long/metrics.jsonl"
    try:
        until(lambda: metrics.exists() and '"step"' in metrics.read_text(), "the first step")
    finally:
        os.killpg(nodes[1].pid, signal.SIGTERM)
    assert [node.wait(60) for node in nodes] == [75, 75]
    assert tiny.status(tmp_path / "long")["outcome"] == "stopped"
