"""What the command line may judge before the checkpoint of a run is read, and what it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kamui_dist import command_line
from kamui_dist.config import to_toml
from tests import tiny
from tests.test_config import handlers  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4 steps of 16 windows, as a new run would have; their warmup is 5."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tokens: dict[str, Any] = {"train__tokens": 64 * tiny.T, "schedule__kind": "cosine", "schedule__warmup": 5}
    path = tmp_path / "given.toml"
    path.write_text(to_toml(tiny.config(tmp_path / "run", tiny.write_data(tmp_path / "data"), **tokens)))
    return path


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, list[str]]:
    """Exit code, stdout, and the lines on stderr."""
    with pytest.raises(SystemExit) as end:
        command_line.begin([*arguments])
    told = capsys.readouterr()
    return end.value.code, told.out, told.err.splitlines()


@pytest.mark.parametrize("what", [[], ["--check"], ["--print-schedule"]])
def test_a_new_run_that_is_shorter_than_its_warmup_is_refused_at_once(
    toml: Path, what: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "error: schedule.warmup (5 steps) is longer than the run (4 steps); shorten it"
    assert ended(capsys, str(toml), *what) == (2, "", [line])
    assert ended(capsys, str(toml), *what, f"run.dir={'a' * 300}") == (2, "", [line])
    (toml.parent / "run" / "checkpoints" / "quarantine").mkdir(parents=True)
    assert ended(capsys, str(toml), *what) == (2, "", [line]), "there is no checkpoint to go on from"


def test_of_a_run_that_goes_on_nobody_knows_yet_how_long_it_is(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toml.parent / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    cfg, _ = command_line.begin([str(toml)])
    assert cfg.schedule.warmup == 5
    code, out, err = ended(capsys, str(toml), "--print-schedule")
    assert (code, err) == (0, [])
    assert [int(n) for n in re.findall(r"update (\d+): ", out)] == [1, 2, 4]
    # What does not depend on it is told at once all the same.
    assert ended(capsys, str(toml), "schedule.warmup=1.5")[0] == 2
    assert ended(capsys, str(toml), "train.global_batch=10")[0] == 2
