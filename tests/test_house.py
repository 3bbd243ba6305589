"""The house rules of the design that a machine can check: sizes, import arrows, and what never stands in a file."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {p.stem: p for p in sorted((ROOT / "kamui_dist").glob("*.py"))}
PREPARE = sorted((ROOT / "kamui_dist" / "prepare").glob("*.py"))
REPORT = sorted((ROOT / "kamui_dist" / "report").glob("*.py"))
ALL = [*SOURCES.values(), *sorted((ROOT / "kamui_dist" / "commands").glob("*.py")), *PREPARE, *REPORT]

# Each may import its own row and those below. A file that is not named here counts to the row of model and data.
LAYERS = [
    {"train"},
    {"saver"},
    {"start", "rundir", "banner", "rollback", "validation", "worst"},
    {"checkpoint", "parallel", "metrics", "evaluate", "monitor", "noise", "samples"},
    {"retention", "health", "staging"},
    {"storage", "tensors", "manifest"},
    {
        "distributed",
        "model",
        "data",
        "optim",
        "precision",
        "state",
        "shards",
        "shuffle",
        "tokenizer",
    },
    {"command_line"},
    {"plan"},
    {"resume_report"},
    {"config", "schedule", "watch", "signals", "lock"},
    {"rules_loss", "rules_norm", "rules_pace", "rules_start", "observation"},
    {"rules"},
    {"knobs", "findings"},
    {"job"},
    {"errors", "files"},
]
# Modules that have to load without torch, which takes seconds.
LIGHT = ["config", "knobs", "findings", "schedule", "watch", "signals", "plan", "state", "command_line", "errors", "files",
         "cli", "lock", "job", "watchdog", "resume_report", "incident", "evidence", "memory_advice"]  # fmt: skip


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, at_top: bool = False) -> set[str]:
    """Dotted names of what a file imports; `at_top`: only what importing it does."""
    parsed = tree(path)
    nodes = list(ast.walk(parsed))
    if at_top:
        inner = {id(n) for f in nodes if isinstance(f, ast.FunctionDef | ast.Lambda) for n in ast.walk(f)}
        typing_only = {
            id(n)
            for i in nodes
            if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)
            for b in i.body
            for n in ast.walk(b)
        }
        nodes = [n for n in nodes if id(n) not in inner | typing_only]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: Path) -> set[str]:
    """Our modules that a file imports, by short name."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("kamui_dist.")} & (
        SOURCES.keys() | {"commands"}
    )


@functools.cache
def names(path: Path) -> set[str]:
    """Every identifier and attribute in the code; comments and strings do not count."""
    nodes = list(ast.walk(tree(path)))
    found = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return found | {a.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}


def test_the_loop_fits_a_screen_and_the_file_one_sitting() -> None:
    text = SOURCES["train"].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    loops = [
        n for n in ast.walk(tree(SOURCES["train"])) if isinstance(n, ast.For) and getattr(n.target, "id", "") == "step"
    ]
    [loop] = loops
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 100
    assert text.splitlines()[loop.lineno - 1].startswith("    for step in range(state.step, ")
    body = "\n".join(text.splitlines()[loop.lineno : loop.end_lineno])
    places = [body.index(f"# {number}. {word}") for number, word in enumerate(
        ["batch", "forward", "backward", "update", "log", "evaluate", "checkpoint"], 1)]  # fmt: skip
    assert places == sorted(places), "seven sections, in order"


def test_most_files_are_short() -> None:
    lengths = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in ALL}
    assert sum(n < 250 for n in lengths.values()) > 0.7 * len(lengths), lengths
    assert max(lengths.values()) < 450, lengths


def test_imports_go_one_way() -> None:
    row = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    assert set(row) <= set(SOURCES), "a file of the layers is gone"
    row = {name: row.get(name, row["data"]) for name in SOURCES}
    for name, path in SOURCES.items():
        if name not in ("__init__", "cli"):
            up = {other for other in own(path) if row[other] < row[name]}
            # --check opens the data: asked for inside a function, when torch may be loaded.
            assert up <= ({"start", "sources"} if name == "command_line" else set()), f"{name} imports upwards: {up}"
    assert own(SOURCES["cli"]) <= {"errors"}
    for path in PREPARE:  # text to shards: no torch, nothing of training
        assert own(path) <= {"errors", "files", "shards", "stream", "tokenizer", "bpe_files"}, path
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path
    for path in REPORT:  # records to words and pictures: no torch, and nothing that needs it
        assert own(path) <= {"errors", "files", "findings", "knobs", "config", "plan", "watch"}, path
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path
    readers = {p.stem for p in SOURCES.values() if any(n.startswith("kamui_dist.report.") for n in imports(p))}
    assert readers <= {"train"}, "only the end of a run and the commands print reports"


def test_nobody_imports_train_or_the_commands() -> None:
    for path in ALL:
        assert "train" not in own(path), path
        if path.parent.name != "commands":
            assert "commands" not in own(path), path


def test_who_knows_what() -> None:
    for word in ("DistributedDataParallel", "fully_shard", "FSDPModule"):
        assert [p.stem for p in ALL if word in names(p)] == ["parallel"], word
    # Checkpoints read and write shards: the design's arrow is for the wrappers, and DTensor's type is what a shard is.
    assert {p.stem for p in ALL if "DTensor" in names(p)} <= {"parallel", "storage", "tensors"}
    assert [p.stem for p in ALL if "init_process_group" in names(p)] == ["distributed"]
    assert [p.stem for p in ALL if "init_device_mesh" in names(p)] == ["distributed"]
    assert [
        p.stem for p in ALL if "autocast" in names(p) and p.stem != "precision" and "torch.autocast" in p.read_text()
    ] == []


def test_slurm_is_known_to_shell_and_one_file_only() -> None:
    """How ranks are started is the shell's business. When the job ends is the run's, however it was started."""
    assert [path.stem for path in ALL if "SLURM" in path.read_text(encoding="utf-8")] == ["job"]


def test_light_modules_import_no_torch() -> None:
    heavy = {"torch", "numpy", "tensorboard", "safetensors", "tokenizers"}
    for name in LIGHT:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            module = waiting.pop()
            seen.add(module)
            found = imports(SOURCES[module], at_top=True)
            assert not {n.split(".")[0] for n in found} & heavy, f"{module}, which {name} imports"
            ours = {n.split(".")[1] for n in found if n.startswith("kamui_dist.")} & SOURCES.keys()
            waiting += list(ours - seen)


def tracked() -> list[Path]:
    """The files of the repository; of a copy without git, the files that are there."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines() if done.returncode == 0 else [str(p.relative_to(ROOT)) for p in ALL]
    return [ROOT / line for line in lines if (ROOT / line).is_file()]


def test_no_address_of_this_machine_stands_in_a_file() -> None:
    """Nothing that is true only where the project was written: its directories, or a package index that is not everybody's."""
    # Written so that this file is not among the finds.
    forbidden = re.compile(
        "/wo"
        + "rk/|sha"
        + r"red/|//py"
        + r"pi\.|(index-"
        + r"url|find-"
        + r"links)[ =]+(?!https://download\.pytorch\.org/)"
    )
    for path in tracked():
        if path.parent.name == "austen":
            continue  # the novels
        text = path.read_text(encoding="utf-8", errors="replace")
        found = forbidden.search(text)
        assert found is None, f"{path}: {found}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_a_config_says_what_it_is(path: Path) -> None:
    """What it is, then data, command, hardware and result, before the first section."""
    header = path.read_text(encoding="utf-8").partition("\n[")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    assert len(header[0]) > 20
    for word in ("data:     ", "command:  ", "hardware: ", "result:   "):
        assert sum(line.startswith(f"# {word}") for line in header) == 1, word
    assert any(path.name in line or "demo.sh" in line for line in header)
    assert "measured" in "".join(line for line in header if "result:" in line) or "loss" in "".join(header)


def test_the_configs_name_only_scripts_that_exist() -> None:
    for path in (ROOT / "configs").glob("*.toml"):
        for script in re.findall(r"\./(launch/\w+\.sh)", path.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{path.name}: {script}"


def test_every_file_is_on_the_map() -> None:
    told = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert [name for name in SOURCES if name != "__init__" and f"`{name}.py`" not in told] == []
