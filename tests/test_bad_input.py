"""What a user can get wrong: one clear line on stderr with the key and both numbers, exit code 2, nothing made, nobody waiting.

Most of it is the real command line called in this process (importing torch costs seconds); some are real processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from kamui_dist import cli, command_line, distributed, train
from kamui_dist.config import to_toml
from kamui_dist.errors import UserError
from kamui_dist.mixture import SAMPLED
from tests import tiny
from tests.ranks import run_ranks
from tests.test_config import handlers  # noqa: F401 - a fixture

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(autouse=True)
def launched_by_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


class Place:
    """A directory with data, a config that trains for 2 steps, and a way to start it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.monkeypatch, self.capsys = path, monkeypatch, capsys
        self.data = tiny.write_data(path / "data")
        self.run_dir = path / "runs" / "a"
        cfg = tiny.config(self.run_dir, self.data, train__steps=2)
        self.toml = path / "given.toml"
        self.toml.write_text(to_toml(cfg))

    def start(self, *arguments: str) -> tuple[int, list[str]]:
        """As `python -m kamui_dist.train given.toml ARGUMENTS`: (exit code, lines on stderr)."""
        self.capsys.readouterr()
        try:
            command = command_line.begin([str(self.toml), *arguments])
            self.monkeypatch.setattr(train, "COMMAND", command, raising=False)
            code = train.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, self.capsys.readouterr().err.splitlines()

    def refused(self, *arguments: str, parts: tuple[str, ...] = (), lines: int = 1) -> list[str]:
        code, err = self.start(*arguments)
        assert code == 2, (code, err)
        assert len(err) == lines, err
        assert all(line.startswith("error: ") for line in err), err
        assert all(part in "\n".join(err) for part in parts), (parts, err)
        return err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


def nothing_made(place: Place) -> None:
    assert not (place.path / "runs").exists()


def test_the_config_that_the_others_break_is_good(place: Place) -> None:
    assert place.start("--check") == (0, [])
    nothing_made(place)
    assert place.start() == (0, [])
    assert tiny.status(place.run_dir)["outcome"] == "finished"
    assert place.start() == (0, []), "nothing left to do"


# ---- the config


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["optim.lr=nan"], ("optim.lr", "nan", "finite")),
        (["optim.lr=inf"], ("optim.lr", "inf", "finite")),
        (["run.device=tpu"], ("run.device", "'tpu'", "'cpu' or 'cuda'")),
        (["run.device=cuda:7"], ("run.device", "'cuda:7'")),
        (["train.global_batch=10"], ("train.global_batch (10)", "4 x 1 = 4", "8 or 12")),
        (["parallel.shard=2"], ("parallel.shard (2)", "(1)")),
        (["parallel.replicate=3", "--world-size", "4"], ("parallel.replicate (3)", "(4)")),
        (["parallel.shard=3", "--world-size", "4", "--check"], ("parallel.shard (3)", "(4)")),
        (["train.steps=0"], ("train.steps = 0", "1")),
        (["train.steps=-5"], ("train.steps = -5", "1")),
        (["train.epochs=2", "train.tokens=100"], ("train.epochs = 2", "train.tokens = 100")),
        (["optim.learing_rate=1"], ("optim.learing_rate", "optim.lr")),
        (["train.steps"], ("'train.steps'", "section.key=value")),
        (["model.d_model=15"], ("model.d_model (15)", "model.n_heads (2)")),
        (["--print", "run.dri"], ("run.dri",)),
    ],
)  # fmt: skip
def test_configs(place: Place, arguments: list[str], parts: tuple[str, ...]) -> None:
    place.refused(*arguments, parts=parts)
    nothing_made(place)


def test_all_faults_of_a_config_at_once(place: Place) -> None:
    err = place.refused("optim.lr=nan", "train.step=3", "run.device=tpu", lines=3)
    assert len({line.split()[1] for line in err}) == 3


def test_no_config_file(place: Place) -> None:
    place.toml.unlink()
    place.refused(parts=(f"no config file {place.toml}",))


def test_options_that_do_not_exist(place: Place) -> None:
    for arguments in (["--world-size", "0"], ["--world-size", "two"], ["--frobnicate"]):
        code, err = place.start(*arguments)
        assert code == 2
        assert arguments[0] in err[-1]
        assert err[0].startswith("usage:")


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [("0", None), ("1", None), (None, "2"), ("2", "2"), ("-1", "2"), ("a", "2"), ("0", "b"), ("0", "0"), ("", "1")],
)  # fmt: skip
def test_half_of_a_launcher(place: Place, rank: str | None, world_size: str | None) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            place.monkeypatch.setenv(name, value)
    code, err = place.start()
    assert code == 2
    [line] = err
    assert f"RANK = {rank}" in line
    assert f"WORLD_SIZE = {world_size}" in line
    assert line.startswith("error: ")
    nothing_made(place)


def test_what_every_rank_finds_the_first_of_a_node_tells(place: Place) -> None:
    place.monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, local_rank, lines in (("0", "0", 1), ("1", "1", 0), ("2", "0", 1), ("3", "1", 0)):
        place.monkeypatch.setenv("RANK", rank)
        place.monkeypatch.setenv("LOCAL_RANK", local_rank)
        code, err = place.start("optim.lr=nan")
        assert (code, len(err)) == (2, lines)
        if rank == "2":  # another node: its file may be another one
            assert err[0].startswith("error: rank 2: optim.lr")


# ---- data


def other_header(data: Path, **changes: Any) -> None:
    file = data / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def shard(data: Path) -> Path:
    return next(data.glob("*.bin"))


def linked(trained: Path) -> None:
    [path] = (trained / "checkpoints").glob("step-*")
    path.rename(trained / "moved")
    path.symlink_to(trained / "moved")


@pytest.mark.parametrize(
    ("break_it", "arguments", "parts"),
    [
        (None, ["data.path=none"], ("data.path", "kamui-dist prepare")),
        (None, ["data.path=nowhere"], ("data.path", "/nowhere", "no such directory")),
        (None, ["data.val_path=nowhere"], ("data.val_path", "/nowhere")),
        (None, ["data.path=given.toml"], ("data.path", "given.toml")),
        (lambda d: (d / "dataset.json").unlink(), [], ("data.path", "no dataset.json", "/data")),
        (lambda d: shard(d).unlink(), [], ("data.path", ".bin")),
        (lambda d: os.truncate(shard(d), 100), [], ("data.path", "100 bytes", "1026 bytes")),
        (lambda d: other_header(d, dtype="int8"), [], ("data.path", "'int8'", "uint16")),
        (lambda d: other_header(d, dtype="uint32"), [], ("data.path", "1026 bytes", "2052 bytes")),
        (lambda d: other_header(d, tokens=7), [], ("data.path", "tokens is 7", "513")),
        (lambda d: (d / "dataset.json").write_text("{"), [], ("data.path", "not JSON")),
        (None, ["model.vocab_size=10"], ("model.vocab_size (10)", "data.path", "(65)")),
        (None, ["model.context_length=600"], ("data.path", "513 tokens", "601")),
    ],
)
def test_data(
    place: Place, break_it: Callable[[Path], Any] | None, arguments: list[str], parts: tuple[str, ...]
) -> None:
    place.monkeypatch.chdir(place.path)
    if break_it is not None:
        break_it(place.data)
    for option in ([], ["--check"]):
        place.refused(*arguments, *option, parts=parts)
    nothing_made(place)


def test_an_empty_corpus_and_one_too_small(place: Place) -> None:
    (place.path / "empty.txt").touch()
    (place.path / "small.txt").write_text("ab")
    out = place.path / "prepared"
    prepare = [
        "prepare",
        str(place.path / "empty.txt"),
        "--tokenizer",
        "bytes",
        "--val-fraction",
        "0",
        "--out",
        str(out),
    ]
    assert cli.main(prepare) == 2
    [line] = place.capsys.readouterr().err.splitlines()
    assert "empty" in line
    assert not out.exists()
    prepare[1] = str(place.path / "small.txt")
    assert cli.main(prepare) == 0
    place.refused(f"data.path={out}/train", parts=("data.path", f"{out}/train", "tokens", "9"))
    nothing_made(place)


def test_validation_data_of_another_tokenizer(place: Place) -> None:
    other = tiny.write_data(place.path / "val")
    other_header(other, vocab_size=66)
    place.refused(f"data.val_path={other}", parts=("data.val_path", "66", "65"))
    nothing_made(place)


def test_a_token_beyond_the_vocabulary(place: Place) -> None:
    """Found at the start where many are so, in some windows; a single one could be found by reading all the data: when it comes."""
    good = np.fromfile(shard(place.data), dtype="<u2")
    np.full_like(good, 200).tofile(shard(place.data))
    place.refused(parts=("data.path", "token id 200", "65", "model.vocab_size"))
    nothing_made(place)
    one_bad_token(place, row=0)
    place.refused(parts=("data.path", "token id 999", "65", "model.vocab_size"))
    assert tiny.status(place.run_dir) | {"pid": 0} == {
        "outcome": "failed", "step": 0, "reason": tiny.status(place.run_dir)["reason"], "requeue": False, "exit_code": 2,
        "pid": 0,
        "restarts": 0,
    }  # fmt: skip
    assert tiny.steps_saved(place.run_dir) == []


def one_bad_token(place: Place, row: int) -> None:
    """In row `row` of the first update, or one of the next three; none of those that a start looks at."""
    tiny.write_data(place.data, windows=1500)
    looked_at = set(np.linspace(0, 1499, SAMPLED).astype(int).tolist())
    of_the_step = [tiny.window_of(place.data, 1, r) for r in range(row, row + 4)]
    window = next(w for w in of_the_step if w not in looked_at)
    ids = np.fromfile(shard(place.data), dtype="<u2")
    ids[window * tiny.T + 3] = 999
    ids.tofile(shard(place.data))


# ---- the machine


def test_a_run_directory_that_cannot_be_written(place: Place) -> None:
    (place.path / "file").touch()
    place.refused(f"run.dir={place.path}/file/run", parts=("run.dir", f"{place.path}/file/run", "Not a directory"))
    place.refused(f"run.dir={place.path}/file", parts=("run.dir", f"{place.path}/file"))
    place.refused("run.dir=/proc/1/run", parts=("run.dir", "/proc/1/run"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(place: Place) -> None:
    place.refused("run.device=cuda", parts=("run.device", "'cuda'", "no CUDA device"))
    nothing_made(place)


# ---- model.factory


def nonsense(cfg: Any) -> Any:
    return cfg.factory_args["returns"]


def nothing_to_train(cfg: Any) -> nn.Module:
    return nn.ReLU()


def on_meta(cfg: Any) -> nn.Module:
    return nn.Linear(2, 2, device="meta")


class Wrong(tiny.Trap):
    """Its forward gives something else than the loss; with factory_args.mode only in this mode."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.gives, self.mode = cfg.factory_args["gives"], cfg.factory_args.get("mode")

    def forward(self, x: Any, y: Any) -> Any:
        loss = super().forward(x, y)
        logits = self.head(self.layers[0](x))
        if self.mode == ("eval" if self.training else "train"):
            return loss
        return {
            "tuple": (loss, logits), "output": OrderedDict(loss=loss, logits=logits), "logits": logits, "float": loss.item(),
            "detached": loss.detach(), "one": loss[None], "none": None, "loss": loss,
        }[self.gives]  # fmt: skip


wrong = Wrong


HERE = "tests.test_bad_input"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model.factory=no_such_module:make"], ("no_such_module:make", "No module named")),
        (["model.factory=kamui_dist.model:no_such"], ("kamui_dist.model:no_such", "no attribute 'no_such'")),
        (["model.factory=kamui_dist.model"], ("kamui_dist.model", "package.module:function")),
        (["model.factory=:"], (":", "package.module:function")),
        (["model.factory=os:sep"], ("os:sep", "str")),
        (
            [f"model.factory={HERE}:nonsense", "model.factory_args={returns=3}"],
            (f"{HERE}:nonsense", "int", "nn.Module"),
        ),
        ([f"model.factory={HERE}:nothing_to_train"], (f"{HERE}:nothing_to_train", "without parameters")),
        ([f"model.factory={HERE}:on_meta"], (f"{HERE}:on_meta", "meta", "init_parameter")),
    ],
)
def test_factories(place: Place, arguments: list[str], parts: tuple[str, ...]) -> None:
    place.refused(*arguments, parts=("model.factory", *parts))
    nothing_made(place)


@pytest.mark.parametrize(
    ("gives", "parts"),
    [
        ("tuple", ("returned tuple of a tensor of shape (), a tensor of shape (4, 8, 65);",)),
        ("output", ("returned OrderedDict with loss, logits;",)),
        ("logits", ("returned a tensor of shape (4, 8, 65);",)),
        ("one", ("returned a tensor of shape (1,);",)),
        ("float", ("returned float;",)),
        ("none", ("returned None;",)),
        ("detached", ("returned a tensor of shape () without gradient;",)),
    ],
)
def test_what_a_model_returns(place: Place, gives: str, parts: tuple[str, ...]) -> None:
    """Known when it has returned it for the first time."""
    wanted = ("cross-entropy summed over the targets, a tensor of shape (), with gradient", f"'{HERE}:wrong'")
    arguments = (f"model.factory={HERE}:wrong", f"model.factory_args={{gives='{gives}'}}")
    place.refused(*arguments, parts=("model.factory", *wanted, *parts))
    status = tiny.status(place.run_dir)
    assert (status["outcome"], status["step"], status["requeue"], status["exit_code"]) == ("failed", 0, False, 2)
    assert place.start(arguments[0], "model.factory_args={gives='loss'}")[0] == 0, "put right, the same command goes on"


def test_what_a_model_returns_in_eval_mode(place: Place) -> None:
    """The look into the layers is the first to see it, or a validation."""
    arguments = (f"model.factory={HERE}:wrong", "model.factory_args={gives='logits', mode='eval'}")
    place.refused(*arguments, parts=("in eval mode returned a tensor of shape (1, 8, 65);",))
    validates = (f"data.val_path={place.data}", "eval.every=1", "log.detail_every=0", f"run.dir={place.path}/b")
    place.refused(*arguments, *validates, parts=("in eval mode returned a tensor of shape (4, 8, 65);",))


class Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


class Odd(tiny.Trap):
    """With state that is out of the ordinary, by factory_args.has."""

    odd: Any

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.has = cfg.factory_args["has"]
        match self.has:
            case "expanded":
                self.register_buffer("odd", torch.ones(1, 4).expand(3, 4))
            case "complex":
                self.register_buffer("odd", torch.ones(3, dtype=torch.complex64))
            case "uint16":
                self.odd = nn.Parameter(torch.ones(3, dtype=torch.uint16), requires_grad=False)
            case "late":
                self.register_buffer("odd", None)
            case "growing":
                self.register_buffer("odd", torch.zeros(1))
            case "transient":
                self.register_buffer("odd", None, persistent=False)
            case "integers":
                self.odd = nn.Parameter(torch.arange(3), requires_grad=False)
            case "empty":
                self.odd = nn.Linear(4, 0)
            case "extra state":
                self.odd = Counting(4, 4)
            case "scalar":
                self.odd = nn.Parameter(torch.ones(()))
            case "empty block":
                self.odd = nn.ModuleList([nn.Linear(4, 0, bias=False)])

    def forward(self, x: Any, y: Any) -> Any:
        if self.has in ("late", "transient"):
            self.odd = torch.ones(2)
        if self.has == "growing" and self.training:
            self.odd = torch.cat([self.odd, torch.ones(1)])
        return super().forward(x, y)


odd = Odd


def has(what: str) -> tuple[str, str]:
    return f"model.factory={HERE}:odd", f"model.factory_args={{has='{what}'}}"


@pytest.mark.parametrize("what", ["expanded", "transient"])
def test_a_model_with_odd_state_resumes(place: Place, what: str) -> None:
    assert place.start(*has(what)) == (0, [])
    assert place.start(*has(what), "train.steps=3") == (0, [])
    assert tiny.status(place.run_dir)["step"] == 3


def test_state_that_is_not_saved_is_told(place: Place) -> None:
    code, [warning] = place.start(*has("extra state"))
    assert code == 0
    assert warning.startswith("warning: model.factory: state of odd (get_extra_state) is not saved")


@pytest.mark.parametrize("what", ["complex", "uint16"])
def test_a_model_that_no_checkpoint_can_store(place: Place, what: str) -> None:
    place.refused(*has(what), parts=("model.factory: ", f"odd is torch.{what}", "bfloat16"))
    nothing_made(place)


@pytest.mark.parametrize(
    ("what", "change"),
    [("late", "odd went from None to (2,) float32"), ("growing", "odd went from (1,) float32 to (9,) float32")],
)
@pytest.mark.parametrize("aside", ["true", "false"])
def test_a_model_whose_state_changes_shape(place: Place, what: str, change: str, aside: str) -> None:
    place.refused(*has(what), f"checkpoint.async={aside}", parts=("model.factory", change, "persistent=False"))
    assert tiny.steps_saved(place.run_dir) == []
    assert not list((place.run_dir / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("what", ["integers", "empty", "empty block"])
def test_parameters_that_have_no_norm(place: Place, what: str) -> None:
    assert place.start(*has(what), "log.detail_every=1")[0] == 0
    details = [r for r in map(json.loads, (place.run_dir / "metrics.jsonl").open()) if r["kind"] == "detail"]
    assert len(details) == 2
    assert all("odd" not in r["layers"] and "head" in r["layers"] for r in details)


def _elsewhere(base: Path) -> list[str]:
    """Rank 1's node has a copy of its own, with the same header."""
    told = []
    cfg = tiny.config(base / "run", base / f"node-{distributed.rank()}", data__val_path=str(base / "val"))
    for key, path in (("val_path", base / f"node-{distributed.rank()}"), ("path", base / "val")):
        setattr(cfg.data, key, str(path))
        with pytest.raises(UserError) as caught:
            tiny.run(cfg.model_copy(deep=True))
        told.append(str(caught.value))
    sharded = {"model__factory": f"{HERE}:odd", "model__factory_args": {"has": "scalar"}, "parallel__shard": 2}
    with pytest.raises(UserError) as caught:
        tiny.run(tiny.config(base / "run", base / "val", **sharded))
    return [*told, str(caught.value)]


@pytest.mark.slow
def test_what_two_ranks_cannot_train_on(place: Place) -> None:
    for name in ("val", "node-0", "node-1"):
        tiny.write_data(place.path / name)
    ids = np.fromfile(shard(place.path / "node-1"), dtype="<u2")
    np.where(ids == 5, 6, ids).astype("<u2").tofile(shard(place.path / "node-1"))
    first, second = run_ranks(_elsewhere, 2, place.path)
    assert first == second
    training, validation, scalar = first
    assert f"training data of rank 1 ({place.path}/node-1) is not that of rank 0" in training
    assert f"validation set val of rank 1 ({place.path}/node-1) is not that of rank 0" in validation
    assert "training data" not in validation
    assert "parallel.shard (2): odd has no dimension" in scalar
    nothing_made(place)


def _returned(base: Path, data: Path) -> list[tuple[str, bool]]:
    told = []
    for name, mesh in (("ddp", {}), ("fsdp", {"parallel__shard": -1, "parallel__replicate": 1})):
        for gives in ("tuple", "logits", "detached"):
            changes = {"model__factory": f"{HERE}:wrong", "model__factory_args": {"gives": gives}, **mesh}
            with pytest.raises(UserError) as caught:
                tiny.run(tiny.config(base / f"{name}-{gives}", data, **changes))
            told.append((str(caught.value), caught.value.agreed))
    return told


@pytest.mark.slow
def test_what_a_model_returns_on_two_ranks(place: Place) -> None:
    first, second = run_ranks(_returned, 2, place.path, place.data)
    assert first == second, "nobody waits for the other"
    assert len(first) == 6
    assert all("model.factory" in text and agreed for text, agreed in first), first


# ---- checkpoints


@pytest.fixture
def trained(place: Place) -> Path:
    """The directory of a finished run beside the one that is to come."""
    done = place.path / "done"
    assert place.start(f"run.dir={done}") == (0, [])
    return done


def damage(trained: Path) -> None:
    file = next((trained / "checkpoints").glob("step-*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("break_it", "arguments", "parts"),
    [
        (None, ["checkpoint.init_from={}/nowhere"], ("/nowhere", "does not exist")),
        (None, ["checkpoint.init_from={}/config.toml"], ("config.toml", ".safetensors")),
        (None, ["checkpoint.init_from={}/tensorboard-not"], ("does not exist",)),
        (None, ["checkpoint.init_from={}/.."], ("missing",)),
        (damage, ["checkpoint.init_from={}"], ("damaged", "step-00000002")),
        (linked, ["checkpoint.init_from={}"], ("step-00000002 is a link",)),
        (
            lambda d: next(d.glob("checkpoints/step-*/manifest.json")).write_text("{}"),
            ["checkpoint.init_from={}"],
            ("manifest",),
        ),
        (None, ["checkpoint.init_from={}", "model.d_ff=24"], ("[32, 16]", "[24, 16]", "mlp.up.weight")),
        (None, ["checkpoint.init_from={}", "model.n_layers=3"], ("blocks.2.", "only in the model")),
        (
            None,
            ["checkpoint.init_from={}/checkpoints/step-00000002", "model.context_length=16"],
            ("position", "[8, 16]", "[16, 16]"),
        ),
    ],
)
def test_init_from_a_run(
    place: Place, trained: Path, break_it: Callable[[Path], Any] | None, arguments: list[str], parts: tuple[str, ...]
) -> None:
    if break_it is not None:
        break_it(trained)
    files = hashes(trained)
    place.refused(*(a.format(trained) for a in arguments), parts=("checkpoint.init_from", *parts))
    nothing_made(place)
    assert hashes(trained) == files, "another run's files are never touched"


def test_init_from_a_file(place: Place, trained: Path) -> None:
    weights = {name: t.clone() for name, t in tiny.weights(trained).items()}
    file = place.path / "weights.safetensors"
    safetensors.torch.save_file(weights, file)
    assert place.start(f"checkpoint.init_from={file}", f"run.dir={place.path}/good") == (0, [])
    for _ in range(2):  # once in the run directory there is a checkpoint, the file is needed no more
        file.unlink(missing_ok=True)
        assert place.start(f"checkpoint.init_from={file}", f"run.dir={place.path}/good", "train.steps=3") == (0, [])

    given = f"checkpoint.init_from={file}"
    place.refused(given, parts=("checkpoint.init_from", str(file), "does not exist"))
    file.write_bytes(b"no weights")
    place.refused(given, parts=("checkpoint.init_from", str(file), "not a whole safetensors file"))
    safetensors.torch.save_file({**weights, "strange": torch.ones(1)}, file)
    place.refused(given, parts=("checkpoint.init_from", "strange is only in the file"))
    safetensors.torch.save_file({n: t for n, t in weights.items() if n != "final_norm.weight"}, file)
    place.refused(given, parts=("checkpoint.init_from", "final_norm.weight is only in the model"))
    safetensors.torch.save_file({**weights, "final_norm.weight": torch.ones(17)}, file)
    place.refused(given, parts=("checkpoint.init_from", "final_norm.weight has shape [17] there, [16] here"))
    os.truncate(file, file.stat().st_size - 100)
    place.refused(given, parts=("checkpoint.init_from", "not a whole safetensors file"))
    nothing_made(place)


def hashes(directory: Path) -> dict[str, str]:
    files = [f for f in sorted(directory.rglob("*")) if f.is_file() and f.name != "status.json"]
    return {str(f.relative_to(directory)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model.context_length=16"], ("model.context_length is 16", "has 8")),
        (["model.d_ff=24"], ("model.d_ff is 24", "has 32")),
        (["model.n_layers=3"], ("model.n_layers is 3", "has 2")),
        (["model.position=rope"], ("model.position is rope", "has learned")),
        (["optim.name=adamw"], ("optim.name is adamw", "has the state of sgd")),
    ],
)
def test_a_checkpoint_of_another_model(place: Place, arguments: list[str], parts: tuple[str, ...]) -> None:
    assert place.start() == (0, [])
    files = hashes(place.run_dir)
    place.refused("train.steps=4", *arguments, parts=(*parts, str(place.run_dir)))
    assert hashes(place.run_dir) == files
    assert place.start("train.steps=3") == (0, [])


def test_other_data_under_the_same_run(place: Place) -> None:
    assert place.start() == (0, [])
    other = tiny.write_data(place.path / "other", seed=1)
    place.refused("train.steps=4", f"data.path={other}", parts=("data.path", "data.allow_change=true"))
    assert place.start("train.steps=4", f"data.path={other}", "data.allow_change=true") == (0, [])


# ---- real processes


def remaining(mark: str) -> list[int]:
    """Processes that have `mark` in their command line, but this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words and b"kamui_dist.train" in words:
                found.append(int(entry.name))
    return found


def torchrun(place: Place, *arguments: str, ranks: int = 2) -> tuple[int, str]:
    """Ends within a minute, and no worker remains."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "kamui_dist.train",
        str(place.toml), *arguments,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    end = time.monotonic() + 5
    while remaining(str(place.toml)) and time.monotonic() < end:
        time.sleep(0.1)
    assert remaining(str(place.toml)) == []
    return process.returncode, out


def errors(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_two_ranks_find_the_same_fault(place: Place) -> None:
    code, out = torchrun(place, "parallel.shard=2", "model.d_model=1", "model.n_heads=1", "model.d_ff=1")
    assert code != 0
    [line] = errors(out)
    assert "parallel.shard (2)" in line
    assert "rows (1)" in line
    assert "Traceback (most recent call last):\n  File" not in out.split("error: ")[0]
    nothing_made(place)


@pytest.mark.slow
def test_one_of_two_ranks_has_a_fault(place: Place) -> None:
    """A token that only rank 1 reads: rank 1 tells it, and rank 0 is not left waiting."""
    one_bad_token(place, row=4)  # the first micro-batch of rank 1
    code, out = torchrun(place)
    assert code != 0
    told = errors(out)
    assert any("rank 1" in line and "token id 999" in line and "65" in line for line in told), out
    assert tiny.steps_saved(place.run_dir) == []
    status = tiny.status(place.run_dir)
    assert (status["outcome"], status["requeue"], status["exit_code"]) == ("failed", False, 2), "it would fail again"


@pytest.mark.slow
def test_one_process_as_a_user_starts_it(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kamui_dist.train", str(place.toml), "data.path=/nowhere"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: data.path: no such directory: /nowhere; make it with `kamui-dist prepare`\n"
    nothing_made(place)
