"""The config: every fault told at once with the key to change; what is printed reads back; no torch; the shipped files."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamui_dist import command_line, config, knobs
from kamui_dist.config import Config, load, to_toml
from kamui_dist.errors import UserError
from kamui_dist.model import GPT, parameter_counts
from kamui_dist.plan import make_plan

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write(tmp_path, "[train]\nsteps = 10\n")


def write(directory: Path, text: str) -> Path:
    path = directory / "given.toml"
    path.write_text(text, encoding="utf-8")
    return path


def value(path: Path, *overrides: str, of: str) -> Any:
    section, name = of.split(".")
    return getattr(getattr(load(path, list(overrides))[0], section), name)


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load(path, list(overrides))
    return str(error.value).splitlines()


# ---- unknown keys (faults.md G01)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.learing_rate", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("optim.wieght_decay", "optim.weight_decay"),
        ("train.lr", "optim.lr"),
        ("model.steps", "train.steps"),
        ("optim.grad-clip", "optim.grad_clip"),
        ("optim.max_norm", "optim.grad_clip"),
        ("trian.steps", "train.steps"),
        ("trainer.max_steps", "train.steps"),
        ("train.batch_size", "train.micro_batch"),
        ("train.max_iters", "train.steps"),
        ("train.gradient_accumulation_steps", "train.grad_accum_steps"),
        ("train.warmup_steps", "schedule.warmup"),
        ("train.seed", "run.seed"),
        ("model.n_embd", "model.d_model"),
        ("model.n_head", "model.n_heads"),
        ("model.block_size", "model.context_length"),
        ("model.seq_len", "model.context_length"),
        ("log.save_every", "checkpoint.every"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(tmp_path: Path, key: str, nearest: str) -> None:
    section, name = key.split(".")
    path = write(tmp_path, f"[train]\nsteps = 10\n{'' if section == 'train' else f'[{section}]'}\n{name} = 1\n")
    [in_file] = faults(path)
    # A section that is unknown is one fault, whatever is in it.
    if section in Config.model_fields:
        assert f"unknown key {key}; did you mean {nearest}?" in in_file
    else:
        assert f"unknown key {section}" in in_file
    assert str(path) in in_file
    [on_command_line] = faults(write(tmp_path, "[train]\nsteps = 10\n"), f"{key}=1")
    assert f"unknown key {key}; did you mean {nearest}?" in on_command_line
    assert f"{key}=1" in on_command_line or "command line" in on_command_line


def test_unknown_sections_and_keys_outside_of_sections(tmp_path: Path, empty: Path) -> None:
    [line] = faults(empty, "zzz.qqq=1")
    assert "unknown key zzz.qqq" in line
    assert all(section in line for section in Config.model_fields)
    assert "unknown key chekpoint; did you mean [checkpoint]?" in faults(write(tmp_path, "[chekpoint]\nevery = 3\n"))[0]
    assert "unknown key lr; did you mean optim.lr?" in faults(write(tmp_path, "lr = 1e-3\n[train]\nsteps = 1\n"))[0]
    assert "model" in faults(write(tmp_path, "[[model]]\nn_layers = 3\n"))[0]  # a list of tables is no section


# ---- numbers (G02), booleans (G03), lists (G05)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3e-4", 0.0003), ("1e-5", 1e-5), ("5E-6", 5e-6), ("3.0e-4", 0.0003), ('"3e-4"', 0.0003), ("'3e-4'", 0.0003),
        (".5", 0.5), ("1", 1.0), ("0", 0.0),
    ],
)  # fmt: skip
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, empty: Path, text: str, number: float) -> None:
    found = value(empty, f"optim.lr={text}", of="optim.lr")
    assert (found, type(found)) == (number, float)
    if text != ".5":  # which TOML has not
        found = value(write(tmp_path, f"[optim]\nlr = {text}\n"), of="optim.lr")
        assert (found, type(found)) == (number, float)


def test_whole_numbers(empty: Path) -> None:
    for text, number in (("1e3", 1000), ("1_000", 1000), ("1000.0", 1000), ('"1000"', 1000), ("0x10", 16)):
        found = value(empty, f"train.steps={text}", of="train.steps")
        assert (found, type(found)) == (number, int)
    assert value(empty, f"run.seed={2**63 - 1}", of="run.seed") == 2**63 - 1  # not by way of a float


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=abc", "optim.lr=true", "optim.lr=nan", "optim.lr=inf", "optim.lr=-inf", 'optim.lr="nan"', "optim.lr=1e400",
        "optim.lr=[1]", "optim.lr={a=1}", "optim.lr=-1", "optim.lr=none",
        "train.steps=1.5", "train.steps=0", "train.steps=-5", "train.steps=abc", "train.steps=true", "train.steps=nan",
        "train.steps=inf", "train.steps=1e30",
        "run.deterministic=maybe", "run.deterministic=2", "run.deterministic=none",
        "run.device=tpu", "run.precision=bf17", "schedule.kind=cosin", "parallel.tensor=2", "run.seed=-1",
        "model.dropout=1", "watch.spike_factor=1", 'run.dir=""',
        "data.path=3", "model.factory_args=3", "model.factory_args={at=1979-05-27}", "model.factory_args={a=[nan]}",
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_with_the_key_and_the_value(tmp_path: Path, empty: Path, override: str) -> None:
    key, _, text = override.partition("=")
    [line] = faults(empty, override)
    assert line.startswith(f"{key} = ")
    assert "(command line): " in line
    if text not in ("none", "1e400", "1e30") and not text.startswith("{"):
        assert text.strip('"') in line.replace("True", "true")
    if text not in ("abc", "maybe", "tpu", "bf17", "cosin", "none"):  # bare words are for the command line
        path = write(tmp_path, "[{}]\n{} = {}\n".format(*key.split("."), text))
        assert faults(path)[0].startswith(f"{key} = ")
        assert str(path) in faults(path)[0]


def test_what_would_be_valid_is_said(empty: Path) -> None:
    assert "'bf16', 'fp16' or 'fp32'" in faults(empty, "run.precision=bf17")[0]
    assert "greater than or equal to 1" in faults(empty, "train.steps=0")[0]
    assert "less than 1" in faults(empty, "model.dropout=1.5")[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *((t, True) for t in ("true", "True", "1", "yes", "on")),
        *((t, False) for t in ("false", "False", "0", "no", "off")),
    ],
)
def test_booleans_from_the_command_line(empty: Path, text: str, wanted: bool) -> None:
    assert value(empty, f"run.deterministic={text}", of="run.deterministic") is wanted
    assert value(empty, f"log.tensorboard={text}", of="log.tensorboard") is wanted


def test_lists_and_tables_from_the_command_line(empty: Path) -> None:
    found = value(empty, 'model.factory_args={betas=[0.9,0.95], name="a b"}', of="model.factory_args")
    assert found == {"betas": [0.9, 0.95], "name": "a b"}
    for malformed in ("model.factory_args={betas=[0.9,", "model.factory_args=[0.9", "model.factory={a", 'data.path="x'):
        [line] = faults(empty, malformed)
        assert repr(malformed) in line
        assert "TOML" in line


# ---- the command line's form


def test_overrides_of_another_form(empty: Path) -> None:
    for wrong in ("train.steps", "train.steps=", "train.steps=  ", "steps=3", "=3", "train.=3", "optim.lr:3"):
        [line] = faults(empty, wrong)
        assert wrong in line
    assert "section.key=value" in faults(empty, "train.steps=")[0]


def test_strings_from_the_command_line(empty: Path) -> None:
    for text, wanted in (
        ("runs/a", "runs/a"),
        ('"runs/a b"', "runs/a b"),
        ("a=b", "a=b"),
        ("ü/x", "ü/x"),
        ("a#b", "a#b"),
    ):
        assert value(empty, f"data.path={text}", of="data.path") == wanted


def test_later_overrides_win_and_all_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[optim]\nlr = 1.0\nbeta1 = 0.5\n[train]\nsteps = 1\n")
    cfg, notes = load(path, ["optim.lr=2.0", "train.micro_batch=3", "optim.lr=4.0"])
    assert (cfg.optim.lr, cfg.optim.beta1, cfg.optim.beta2, cfg.train.micro_batch) == (4.0, 0.5, 0.95, 3)
    assert notes == []


def test_none_unsets(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[run]\ndir = "x"\nmax_minutes = 5\n[data]\nval_path = "v"\n[train]\nsteps = 5\nglobal_batch = 8\n'
    )
    cfg, notes = load(path, ["data.val_path=none", "run.max_minutes=null", "train.global_batch=None", "run.dir=none"])
    assert (cfg.data.val_path, cfg.run.max_minutes, cfg.train.global_batch) == (None, None, None)
    assert cfg.run.dir == "runs/given", "without one, the name of the config file: never the working directory"
    assert cfg.train.steps == 5
    assert notes == []


def test_one_of_several_keys_replaces_another_one_of_the_file_with_a_note(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 5\nglobal_batch = 8\nmicro_batch = 2\n")
    cfg, notes = load(path, ["train.epochs=2", "train.grad_accum_steps=3"])
    assert (cfg.train.steps, cfg.train.epochs) == (None, 2.0)
    assert (cfg.train.global_batch, cfg.train.grad_accum_steps) == (None, 3)
    assert notes == [
        f"train.epochs=2 (command line) replaces train.steps = 5 ({path})",
        f"train.grad_accum_steps=3 (command line) replaces train.global_batch = 8 ({path})",
    ]
    make_plan(cfg, 1, windows=100)
    # Unsetting one replaces none.
    cfg, notes = load(path, ["train.tokens=none"])
    assert (cfg.train.steps, notes) == (5, [])
    # Two of them on the command line contradict each other.
    cfg, _ = load(path, ["train.epochs=2", "train.tokens=1e6"])
    with pytest.raises(
        UserError, match=r"exactly one of train.steps, train.tokens, train.epochs .*tokens = 1000000.0, .*epochs = 2"
    ):
        make_plan(cfg, 1, windows=100)
    cfg, _ = load(path, ["train.global_batch=8", "train.grad_accum_steps=2"])
    with pytest.raises(UserError, match=r"train.global_batch \(8\) and train.grad_accum_steps \(2\)"):
        make_plan(cfg, 1)


# ---- the file


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [line] = faults(Path("missing.toml"))
    assert line == f"there is no config file {tmp_path / 'missing.toml'}"  # absolute (G06)
    assert f"{tmp_path} is a directory" in faults(Path())[0]
    for text in ("[train]\nsteps 10\n", "[train\n", "[train]\nsteps =\n", "[a]\n[a]\n", "\0"):
        path = write(tmp_path, text)
        [line] = faults(path)
        assert f"{path} is not a readable TOML file" in line
    assert "line 2" in faults(write(tmp_path, "[train]\nsteps =\n"))[0]
    path.write_bytes(b"\xff\xfe[train]")
    assert len(faults(path)) == 1
    (tmp_path / "below.toml").write_text("")
    assert len(faults(tmp_path / "below.toml" / "x.toml")) == 1


def test_all_faults_at_once_each_one_line(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[optim]\nlr = -1\nlearing_rate = 3\n[model]\nn_layers = 0\nnorm = 'batch'\n[modle]\nx = 1\n"
    )
    found = faults(
        path, "train.steps=0", "nonsense", "run.devcie=cpu", "parallel.param_dtype=int8", "model.factory_args={a=[1"
    )
    for part in ("optim.lr = -1", "optim.learing_rate", "model.n_layers = 0", "model.norm = 'batch'", "modle",
                 "train.steps = 0", "nonsense", "run.devcie", "parallel.param_dtype = 'int8'", "factory_args"):  # fmt: skip
        assert sum(part in line for line in found) == 1, (part, found)
    assert len(found) == 10


# ---- what is written reads back


def everything() -> st.SearchStrategy[Config]:
    """Configs with random values in every section that to_toml could get wrong."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    positive = st.floats(min_value=5e-324, allow_infinity=False)
    leaves = (
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | text
        | st.just("")
    )
    values = st.recursive(
        leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(text | st.just(""), v, max_size=3)
    )
    return st.builds(
        Config,
        run=st.builds(knobs.Run, dir=text, seed=st.integers(0, 2**63 - 1), max_minutes=st.none() | positive, debug=st.booleans()),
        model=st.builds(knobs.Model, factory=st.none() | text, factory_args=st.dictionaries(text, values, max_size=3),
                        n_kv_heads=st.none() | st.integers(1, 100), norm=st.sampled_from(["layernorm", "rmsnorm"])),
        data=st.builds(knobs.Data, path=st.none() | text, val_path=st.none() | text),
        optim=st.builds(knobs.Optim, lr=positive, eps=positive),
        parallel=st.builds(knobs.Parallel, shard=st.integers(-1, 8)) | st.builds(knobs.Parallel, replicate=st.integers(-1, 8)),
        train=st.builds(knobs.Train, tokens=st.none() | st.floats(1, 1e300), steps=st.none() | st.integers(1, 2**60)),
        eval=st.builds(knobs.Eval, batches=st.integers(0, 9)),
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(everything(), st.booleans())
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, cfg: Config, meanings: bool) -> None:
    path = tmp_path_factory.mktemp("toml", numbered=True) / "config.toml"
    path.write_text(to_toml(cfg, meanings), encoding="utf-8")
    again, notes = load(path, [])
    assert again == cfg
    assert notes == []
    json.dumps(again.model_dump())  # as a checkpoint keeps it


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_effective_config_of_a_run_starts_the_same_run(tmp_path: Path, path: Path) -> None:
    cfg, _ = load(path, ["eval.batches=0", "parallel.reshard_after_forward=false"])
    copy = tmp_path / "config.toml"
    copy.write_text(to_toml(cfg), encoding="utf-8")
    again, _ = load(copy, [])
    assert again == cfg
    assert again.run.dir == f"runs/{path.stem}", "and not runs/config"
    world, _ = STRATEGY.get(path.stem, (2, ""))
    assert make_plan(again, world) == make_plan(cfg, world)


def test_every_knob_has_a_meaning_and_is_printed() -> None:
    text = to_toml(Config(), meanings=True)
    for key in config.KEYS:
        section, name = key.split(".")
        fields = typing.cast(Any, Config.model_fields[section].annotation).model_fields
        field = fields.get(name) or fields[f"{name}_"]  # `async` is a word of Python's
        assert field.description, key
        assert f"# {field.description}" in text
        assert f"\n{name} = " in text or f"\n# {name} is unset" in text
    assert "cosine | wsd" in text
    assert "[>= 0, < 1]" in text
    for target in config.ALIASES.values():
        assert target in config.KEYS


# ---- the shipped configs

PARAMETERS = {  # without padding of the vocabulary; the published numbers
    "gpt2_124m": 124_439_808,
    "gpt2_1558m_fsdp": 1_557_611_200,
    "llama_1b_fsdp": 1_235_814_400,
    "llama_8b_hsdp": 8_030_261_248,
}
STRATEGY = {"llama_8b_hsdp": (16, "HSDP 2 x 8"), "llama_1b_fsdp": (8, "FSDP 8"), "gpt2_1558m_fsdp": (8, "FSDP 8")}
VOCAB = {"austen_tiny": 4096, "austen_small": 4096, "char_debug": 256}  # where the data say it


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_config_builds_with_the_right_shape(path: Path) -> None:
    cfg, _ = load(path, [])
    model = cfg.model.model_copy(update={"vocab_size": cfg.model.vocab_size or VOCAB[path.stem]})
    with torch.device("meta"):
        padded = GPT(model)
        exact = GPT(model.model_copy(update={"vocab_multiple": 1}))
    if path.stem in PARAMETERS:
        assert parameter_counts(exact)[0] == PARAMETERS[path.stem]
    if path.stem == "gpt2_124m":
        assert padded.padded_vocab == 50304
    if path.stem == "austen_small":
        assert parameter_counts(padded)[0] == pytest.approx(10e6, rel=0.05)
    world, strategy = STRATEGY.get(path.stem, (8, "DDP 8") if path.stem == "gpt2_124m" else (2, "DDP 2"))
    assert make_plan(cfg, world).strategy == strategy
    if path.stem in PARAMETERS:
        assert make_plan(cfg, world).tokens_per_step == pytest.approx({"gpt2_124m": 5e5}.get(path.stem, 1e6), rel=0.05)


def test_all_configs_of_the_project_are_there() -> None:
    assert {p.stem for p in SHIPPED} >= {*PARAMETERS, *VOCAB}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_print_config_in_process(path: Path, capsys: pytest.CaptureFixture[str], handlers: None) -> None:
    for option in ("--print-config", "--print-schedule"):
        with pytest.raises(SystemExit) as ended:
            command_line.begin([str(path), option])
        assert ended.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "steps" in out or "updates" in out
    with pytest.raises(SystemExit):
        command_line.begin([str(path), "--print", "run.dir", "run.dir=runs/here"])
    assert capsys.readouterr().out == "runs/here\n"


@pytest.fixture
def handlers() -> typing.Iterator[None]:
    """`begin` installs the trainer's signal handlers; give pytest its own back."""
    import signal

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(n) for n in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60, **options
    )


def test_config_and_print_config_need_no_torch() -> None:
    script = """
import sys
import kamui_dist.config
from kamui_dist import command_line
try:
    command_line.begin(["configs/gpt2_124m.toml", "--print-config", "train.micro_batch=4"])
except SystemExit as ended:
    assert ended.code == 0
heavy = [m for m in ("torch", "numpy", "tensorboard", "safetensors", "tokenizers") if m in sys.modules]
print("heavy:", heavy)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")
    assert "\nmicro_batch = 4\n" in done.stdout


def test_the_printed_config_is_a_config_and_its_reader_may_leave(tmp_path: Path) -> None:
    done = python("-m", "kamui_dist.train", "configs/llama_8b_hsdp.toml", "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "# HSDP 2 x 8, 16 process(es): 8 micro-batch(es) a step, 128 sequences = 1,048,576 tokens a step\n"
    )
    again, _ = load(write(tmp_path, done.stdout), [])
    assert again == load(ROOT / "configs/llama_8b_hsdp.toml", [])[0]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.train", "configs/llama_8b_hsdp.toml", "--print-config"],
        stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_print_config_answers_fast() -> None:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert python("-m", "kamui_dist.train", "configs/gpt2_124m.toml", "--print-config").returncode == 0
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 1.5, seconds
