"""The scripts that say in status.json that nobody lived to tell: each by itself, as many as there are nodes."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launched(status: Path) -> None:
    script("launch/outcome.py").main(str(status), "1", "137", "0", "0", "")


def requeued(status: Path) -> None:
    script("slurm/requeue.py").tell_death(status, {"outcome": "running", "step": 7}, 137)


@pytest.mark.parametrize("mine", [launched, requeued])
@pytest.mark.parametrize("others", [launched, requeued])
def test_two_nodes_tell_a_death_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mine: Callable[[Path], None],
    others: Callable[[Path], None],
) -> None:  # fmt: skip
    """Another node does all of it between this one's writing and renaming; it may have a process of the same number."""
    status, replace, beside = tmp_path / "status.json", Path.replace, []
    status.write_text('{"outcome": "running", "step": 7}')

    def interrupted(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        beside.append(self.name)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(socket, "gethostname", lambda: "another-node")
            status.write_text('{"outcome": "running", "step": 7}')
            others(status)
        assert json.loads(self.read_text())["outcome"] == "failed", "nobody else has touched it"
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    mine(status)
    assert capsys.readouterr().err == ""
    assert json.loads(status.read_text()) == {
        "outcome": "failed", "step": 7, "reason": "killed: no rank lived to tell why", "requeue": True, "exit_code": 137,
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    assert beside[0].startswith(".status.json."), "what a killed one leaves, the next start removes"
