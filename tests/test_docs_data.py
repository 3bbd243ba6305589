"""docs/data.md: the commands that it shows are run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kamui_dist.tokenizer import train_bpe
from tests.corpora import AUSTEN

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


def blocks() -> list[str]:
    return re.findall(r"^<!-- run -->\n```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "austen").mkdir()
    for name in ("persuasion.txt", "emma.txt"):  # two of the six are enough
        text = (AUSTEN / name).read_text()
        (tmp_path / "data" / "austen" / name).write_text(text[:200_000])
    trained = tmp_path / "t.json"
    train_bpe(iter([(AUSTEN / "persuasion.txt").read_text()[:100_000]]), 400).save(trained)
    model = json.loads(trained.read_text())["model"]
    for folder in ("gpt2", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "gpt2" / "encoder.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "gpt2" / "vocab.bpe").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n"
    )
    trained.rename(tmp_path / "model" / "tokenizer.json")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert len(blocks()) >= 6
    for block in blocks():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    for name in ("austen-bpe", "crawl", "src", "persuasion-gpt2", "one", "sums", "chats", "messy"):
        header = json.loads((tmp_path / "data" / name / "train" / "dataset.json").read_text())
        assert header["tokens"] > 0
    assert header["skipped"] | {"bad_records": 1, "replaced_characters": 1} == header["skipped"]
