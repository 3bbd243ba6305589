"""What [data] and [eval] name, opened and checked together; validation sets; and `kamui-dist inspect data`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kamui_dist import cli, config, knobs
from kamui_dist.errors import UserError
from kamui_dist.plan import make_plan
from kamui_dist.shards import HEADER, TokenDataset
from kamui_dist.sources import open_datasets
from kamui_dist.tokenizer import BytesTokenizer
from tests import tiny
from tests.test_data import write
from tests.test_documents import write_documents


def nano(path: Path, tokens: int = 200, top: int = 60, dtype: str = "<u2") -> Path:
    np.random.default_rng(0).integers(1, top, tokens).astype(dtype).tofile(path)
    return path


# ---- config


def test_sources_in_a_file_and_on_the_command_line(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        '[train]\nsteps = 2\n[[data.sources]]\npath = "data/austen/train"\n[[data.sources]]\npath = "x/owt_val.bin"\nweight = 2.5\n'
        'dtype = "uint32"\n[[eval.sets]]\nname = "code"\npath = "code/val"\n'
    )
    cfg, _ = config.load(path, [])
    assert [(s.label, s.weight, s.dtype) for s in cfg.data.sources] == [
        ("austen", 1.0, None),
        ("owt_val", 2.5, "uint32"),
    ]
    for meanings in (False, True):  # --print-config is a config
        (tmp_path / "b.toml").write_text(config.to_toml(cfg, meanings))
        assert config.load(tmp_path / "b.toml", [f"run.dir={cfg.run.dir}"])[0] == cfg
    make_plan(cfg, 1)
    cfg, _ = config.load(path, ['data.sources=[{path="p", weight=3, name="q"}]'])
    assert [(s.label, s.weight) for s in cfg.data.sources] == [("q", 3.0)]
    cfg, notes = config.load(path, ["data.path=z"])
    assert (cfg.data.path, cfg.data.sources, len(notes)) == ("z", [], 1)
    assert [knobs.label(p) for p in ("data/austen/train", "/a/b c/*.bin", "train", "./x.npy")] == [
        "austen",
        "b_c",
        "train",
        "x",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[data.sources]]\npath='a'\nweight=0", r"data.sources\[0\].weight = 0 .*greater than 0"),
        ("[[data.sources]]\npath='a'\nweight=-1.5", r"data.sources\[0\].weight = -1.5 .*greater than 0"),
        ("[[data.sources]]\npath='a'\nweihgt=1", r"unknown key data.sources\[0\].weihgt; there are path, weight, name"),
        ("[[data.sources]]\nweight=1", r"data.sources\[0\].path is missing"),
        ("[[data.sources]]\npath='a'\nname='a b'", r"data.sources\[0\].name = 'a b'"),
        ("[data]\npath='b'\n[[data.sources]]\npath='a'", "data.path = 'b' and data.sources are both given"),
        ("[[data.sources]]\npath='a/x'\n[[data.sources]]\npath='b/x'", "data.sources: 2 are named 'x'; give each a name"),
        ("[data]\nval_path='v'\n[[eval.sets]]\npath='a'\nname='val'", r"eval.sets: 2 are named 'val' \(data.val_path is"),
        ("[data]\ndtype='int8'", "data.dtype = 'int8'"),
    ],
)  # fmt: skip
def test_faults_in_the_config(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(f"[train]\nsteps=1\n{text}\n")
    with pytest.raises(UserError, match=message):
        make_plan(config.load(tmp_path / "a.toml", [])[0], 1)


# ---- vocabulary and tokenizer


def test_foreign_data_need_a_vocabulary(tmp_path):
    cfg = tiny.config(tmp_path / "run", nano(tmp_path / "a.bin"))
    with pytest.raises(
        UserError, match=rf"model.vocab_size is unset, and data.path: {tmp_path}/a.bin \(nanoGPT\) does not say"
    ):
        open_datasets(cfg)
    cfg.model.vocab_size = 60
    data, _ = open_datasets(cfg)
    assert data.windows == 24
    assert tiny.run(cfg) == 0
    cfg = tiny.config(tmp_path / "small", tmp_path / "a.bin", model__vocab_size=50)
    with pytest.raises(
        UserError, match=r"a.bin holds token id 5\d at byte \d+, but the vocabulary has 50 ids \(0 to 49\)"
    ):
        tiny.run(cfg)
    # Beside data that do say, theirs is taken.
    ours = tiny.write_data(tmp_path / "ours")
    cfg = tiny.config(
        tmp_path / "m", ours, data__path=None, data__sources=[{"path": str(ours)}, {"path": str(tmp_path / "a.bin")}]
    )
    open_datasets(cfg)
    assert cfg.model.vocab_size == tiny.VOCAB


def test_tokenizers_must_agree(tmp_path):
    one, other = write(tmp_path / "one", np.arange(50)), write(tmp_path / "other", np.arange(50))
    header = json.loads((other.path / HEADER).read_text()) | {"tokenizer": {"name": "b.json", "fingerprint": "g"}}
    (other.path / HEADER).write_text(json.dumps(header))
    sources = [{"path": str(one.path)}, {"path": str(other.path)}]
    for change in (
        {"data__path": None, "data__sources": sources},
        {"eval__sets": [{"name": "x", "path": str(other.path)}]},
    ):
        cfg = tiny.config(tmp_path / "run", one.path, **change)
        with pytest.raises(
            UserError, match=r"\((other|x)\) has another tokenizer than data.*: b.json with 257 ids against bytes"
        ):
            open_datasets(cfg)


# ---- validation sets


def test_each_validation_set_has_its_own_loss_perplexity_and_bits(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = tiny.write_data(tmp_path / "data")
    val = tiny.write_data(tmp_path / "val", windows=20, seed=5)
    header = json.loads((val / HEADER).read_text()) | {"text_bytes": 4 * 161}
    (val / HEADER).write_text(json.dumps(header))
    sets = [{"name": "web", "path": str(nano(tmp_path / "web.bin"))}]
    args: dict[str, Any] = {"eval__sets": sets, "eval__every": 2, "eval__batches": 0, "log__tensorboard": True}
    run = tmp_path / "run"
    assert tiny.run(tiny.config(run, data, data__val_path=str(val), **args)) == 0
    evals = tiny.records(run, "eval")
    assert [(r["step"], r["set"]) for r in evals] == [(s, name) for s in (2, 4, 5) for name in ("val", "web")]
    for r in evals:
        assert r["val_perplexity"] == pytest.approx(math.exp(r["val_loss"]))
        assert ("val_bits_per_byte" in r, "best" in r) == ((True, True) if r["set"] == "val" else (False, False))
    first = evals[0]
    assert first["val_bits_per_byte"] == pytest.approx(first["val_loss"] / math.log(2) / 4)  # 4 bytes of text a token
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["val_loss"] == min(r["val_loss"] for r in evals if r["set"] == "val")
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    scalars = {tag: [e.value for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    for tag, name in (("val/loss", "val"), ("val_web/loss", "web")):
        assert scalars[tag] == pytest.approx([r["val_loss"] for r in evals if r["set"] == name])
    assert "val/bits_per_byte" in scalars
    assert "val_web/bits_per_byte" not in scalars
    # Without data.val_path the first of the sets decides.
    assert tiny.run(tiny.config(tmp_path / "sets", data, eval__patience=9, **args)) == 0
    assert all("best" in r for r in tiny.records(tmp_path / "sets", "eval"))


def test_masked_sets_count_the_bytes_of_their_targets(tmp_path):
    dataset = write_documents(tmp_path / "a", [20, 21], mask=np.arange(41) % 4 == 0)
    header = dataset.header | {"target_tokens": 11, "target_text_bytes": 33}
    (tmp_path / "a" / HEADER).write_text(json.dumps(header))
    assert TokenDataset(tmp_path / "a").bytes_per_target == 3.0


# ---- inspect data


def inspect(capsys: Any, *args: object) -> list[str]:
    assert cli.main(["inspect", "data", *map(str, args)]) == 0
    return capsys.readouterr().out.splitlines()


def windows(lines: list[str]) -> list[int]:
    return [int(m[1]) for line in lines if (m := re.search(r" window (\d+),", line))]


def test_inspect_prints_what_a_step_saw_also_after_a_change_of_the_batch(tmp_path, capsys):
    data = tiny.write_data(tmp_path / "data", windows=50)
    run = tmp_path / "run"
    traces: list[list[int]] = []
    for steps, batch in ((3, 16), (6, 8)):  # goes on at the next unseen window (B10)
        tiny.Tracing.seen = []
        assert tiny.run(tiny.config(run, data, train__steps=steps, train__global_batch=batch), loader=tiny.Tracing) == 0
        traces += tiny.Tracing.seen[: steps - len(traces)]
    capsys.readouterr()
    per_step = [sum(len(row) for row in [t]) for t in traces]
    assert per_step == [16, 16, 16, 8, 8, 8]
    for step, trace in enumerate(traces, 1):
        lines = inspect(capsys, run, "--step", step)
        assert windows(lines) == trace
    assert lines[0] == "update 6: samples 64 to 71 of the run, global batch 8 (as recorded), seed 7"
    assert f"epoch 1 window {traces[-1][0]}, {data}/00000.bin byte {16 * traces[-1][0]}, tokens" in lines[1]
    # A config that has not run: the plan decides. Ranks divide the step between them.
    fresh = tiny.write_toml(tmp_path / "c.toml", tiny.config(tmp_path / "none", data))
    assert windows(inspect(capsys, fresh, "--step", 2)) == traces[1]
    assert "global batch 16 (as planned; the run ends at 5), seed 7" in inspect(capsys, fresh, "--step", 6)[0]
    parts = [windows(inspect(capsys, fresh, "--step", 2, "--rank", r, "--world-size", 2)) for r in (0, 1)]
    assert parts[0] == traces[1][:4] + traces[1][8:12]
    assert parts[1] == traces[1][4:8] + traces[1][12:]


def test_inspect_names_documents_and_text_and_padding(tmp_path, capsys):
    text = "One document. And another one."
    ids = BytesTokenizer().encode(text)
    dataset = write(tmp_path / "data", ids)
    header = dataset.header | {"documents": 2, "documents_index": {"file": "documents.bin", "sha256": "", "bytes": 16}}
    (dataset.path / "documents.bin").write_bytes(np.array([13, 30], dtype="<u8").tobytes())
    (dataset.path / HEADER).write_text(json.dumps(header))
    cfg = tiny.config(tmp_path / "run", dataset.path, train__epochs=1, train__micro_batch=2, train__global_batch=2)
    toml = tiny.write_toml(tmp_path / "c.toml", cfg)
    lines = inspect(capsys, toml, "--step", 1, "--text") + inspect(capsys, toml, "--step", 2, "--text")
    assert {line.partition("| ")[2] for line in lines if "    | " in line} == {text[0:9], text[8:17], text[16:25]}
    assert any("tokens 8 to 16, documents 0 to 1" in line for line in lines)
    assert any("tokens 16 to 24, document 1" in line for line in lines)
    assert lines[-1] == "sample 3: padding, beyond train.epochs"
    for args, message in (
        (["--step", "0"], "--step 0: updates count from 1"),
        (["--step", "1", "--rank", "2"], "--rank 2: ranks of 1 are 0 to 0"),
    ):
        assert cli.main(["inspect", "data", str(toml), *args]) == 2
        assert message in capsys.readouterr().err
