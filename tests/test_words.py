"""Overrides stand anywhere on the command line of every command that takes them, as they do for training."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

import pytest

from kamui_dist import cli, command_line
from tests import tiny

COMMANDS = [
    (["submit"], ["c.toml", "a.b=1", "c.d=2"], [["--nodes", "2"], ["--time=1:00"], ["--dry-run"]]),
    (["inspect", "data"], ["c.toml", "a.b=1", "c.d=2"], [["--step", "3"], ["--text"]]),
    (["check"], ["c.toml", "a.b=1", "c.d=2"], [["--megabytes", "3"], ["--minutes=1"]]),
    (["diagnose"], ["runs/a", "watch.window=4", "runs/b"], [["--json"], ["--by", "tokens"]]),
]


def parsed(argv: list[str]) -> argparse.Namespace:
    return cli._parser(argv).parse_args(argv)


@pytest.mark.parametrize(("command", "words", "options"), COMMANDS, ids=["submit", "data", "check", "diagnose"])
def test_in_any_order(command: list[str], words: list[str], options: list[list[str]]) -> None:
    """Words among themselves keep theirs."""
    whole = vars(parsed([*command, *words, *itertools.chain(*options)]))
    given = [whole.get("config"), *whole.get("overrides", whole.get("runs", []))]
    assert [word for word in given if word is not None] == words
    # A place for each word among the options: before the first, ..., behind the last.
    for places in itertools.combinations_with_replacement(range(len(options) + 1), len(words)):
        line = list(command)
        for k in range(len(options) + 1):
            line += [word for word, place in zip(words, places, strict=True) if place == k]
            line += options[k] if k < len(options) else []
        assert vars(parsed(line)) == whole, line


@pytest.mark.parametrize("command", [c for c, *_ in COMMANDS], ids="-".join)
def test_an_option_that_does_not_exist_is_no_word(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed([*command, "--nodes=1", "--step=1", "--time=1", "c.toml", "--frobnicate", "a.b=1"])
    assert ended.value.code == 2
    assert "unrecognized arguments: " in capsys.readouterr().err


def test_every_command_that_takes_overrides_is_here() -> None:
    taking = {
        path.stem
        for path in (Path(cli.__file__).parent / "commands").glob("*.py")
        if re.search(r'metavar="section\.key=value"|watch\.key=value', path.read_text())
    }
    assert taking == {"_".join(command) for command, *_ in COMMANDS}
    assert "parse_intermixed_args" in Path(command_line.__file__).read_text(), "training has its own way"


def test_inspect_data_as_it_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "run", tiny.write_data(tmp_path / "data")))
    assert cli.main(["inspect", "data", "--step", "2", str(toml), "--world-size=1", "train.micro_batch=8"]) == 0
    assert capsys.readouterr().out.startswith("update 2: samples 16 to 31 of the run, global batch 16")
    assert cli.main(["inspect", "data", str(toml), "--step", "2", "train.micro_batch=5"]) == 2
    assert "train.micro_batch" in capsys.readouterr().err
