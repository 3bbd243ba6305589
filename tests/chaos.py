"""Kills, stops, delays and damages a real training again and again, and shows in the end that nothing was lost:

    python -m tests.chaos --faults 100 --seed 1                     2 ranks under torchrun, a tiny model on the CPU
    python -m tests.chaos --faults 40 --directory /nfs/scratch   on the file system where your runs will be
    python -m tests.chaos --ranks 8 --launch 'launch/local.sh {config}' run.device=cuda parallel.shard=-1
        [--steps N] [--first N] [--kinds kill-rank,flip] [section.key=value ...]

First the run is done once undisturbed. Then faults come in an order drawn from the seed, each at a moment drawn from the seed:
at random, or aimed at what appears in the run directory (a save, a publication, a deletion, a validation, a restore). After each
the same command is started again; checkpoint.async changes from start to start. A run that is over before all faults came is
compared, and another one begins. A line for each fault tells at which step it struck, how the attempt ended, and from where the
next one went on. Exit code 0 only if, each time,
- a start went on from the newest checkpoint that is whole, and no more steps were lost than checkpoint.every allows (with async
  twice as many), and none on a request to stop;
- no process was left behind, none that lived on after a killed one had to be killed too, and status.json said how it ended;
- a second start was refused, and what was damaged was put into quarantine;
- in the end all tensors, every step's record and every validation equal the undisturbed run's, bit for bit, each step once.

Where all checkpoints are damaged the run must refuse to start; the tool then puts the copies back. Processes are found by a mark in
their environment, on this machine only, and only those are ever signalled. Full disks need root, for a tmpfs. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kamui_dist.manifest import CheckpointError, remove, step_directories, verify
from kamui_dist.metrics import read_records
from kamui_dist.model import GPT

ROOT = Path(__file__).parent.parent
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node={ranks} -m kamui_dist.train {config}"
LAUNCH = f"{shlex.quote(sys.executable)} {TORCHRUN}"
EVERY, EVAL_EVERY = 5, 7  # steps between checkpoints, and validations

# What happens, and when. A cycle of faults goes once through this in an order drawn from the seed.
AIMED = ["step", "save", "publish", "evaluation"]  # "any" is one of these, or "restore"
DECK = [
    *(("kill-rank", aim) for aim in (*AIMED, "prune", "restore", "start-up")),
    *(("kill-all", aim) for aim in (*AIMED, "prune", "restore", "start-up")),
    ("kill-launcher", "any"), ("SIGTERM", "any"), ("SIGUSR1", "any"), ("delay", "any"), ("second-start", "step"),
    ("flip", ""), ("truncate", ""), ("no-manifest", ""), ("damage-all", ""), ("cut-metrics", ""), ("leftovers", ""),
]  # fmt: skip
FULL = [
    ("full-emptied", "step"),
    ("full-killed", "save"),
    ("full-stopped", "step"),
    ("full-at-start", ""),
    ("full-emptied", "save"),
]
# Findings that tell of the disk and of the machine's speed, and not of what was trained.
OF_THE_MACHINE = {
    "disk-full", "save-failed", "throughput-drop", "data-starvation", "slow-rank", "memory-growth", "out-of-memory",
}  # fmt: skip
DAMAGE = {"flip", "truncate", "no-manifest", "damage-all", "cut-metrics", "leftovers"}


class Paced(GPT):
    """The library's model, slowed down while the file factory_args.pace says so: seconds of one forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with contextlib.suppress(OSError, ValueError):
            time.sleep(float(Path(str(self.cfg.factory_args["pace"])).read_text()))
        return super().forward(*args, **kwargs)


def paced(cfg: Any) -> GPT:
    import torch

    with torch.device("meta"):
        return Paced(cfg)


# ---- processes


def marked(mark: str) -> dict[int, dict[str, str]]:
    """pid -> environment of the living processes that were started with this mark, or one that begins with it."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            text = (folder / "environ").read_bytes()
            if f"KAMUI_CHAOS={mark}".encode() in text and process_state(int(folder.name)) not in "ZX":
                pairs = (entry.partition("=") for entry in text.decode(errors="replace").split("\0"))
                found[int(folder.name)] = {name: value for name, _, value in pairs}
    return found


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_marked(mark: str) -> int:
    """Until none is left; returns how many there were."""
    killed = set()
    while pids := marked(mark):
        for pid in pids:
            send(pid, signal.SIGKILL)
        killed |= set(pids)
        time.sleep(0.01)
    return len(killed)


class Attempt:
    """One start of the command, and the processes that came of it."""

    def __init__(self, command: list[str], mark: str, log: Path, ranks: int) -> None:
        self.mark, self.log, self.count = mark, log, ranks
        self.began, self.clock = time.time(), time.monotonic()
        env = {**os.environ, "KAMUI_CHAOS": mark, "PYTHONUNBUFFERED": "1"}
        env.setdefault("OMP_NUM_THREADS", "1")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._ranks: dict[int, int] = {}

    def ranks(self) -> dict[int, int]:
        """rank -> pid of those that are there; looked up until all are, and when one has gone."""
        if len(self._ranks) < self.count or not all(Path(f"/proc/{pid}").exists() for pid in self._ranks.values()):
            self._ranks = {}
            for pid, env in marked(self.mark).items():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if env.get("RANK", "").isdecimal() and b"kamui_dist.train" in words:
                        self._ranks.setdefault(int(env["RANK"]), pid)
        return self._ranks

    def text(self) -> str:
        return self.log.read_text(errors="replace")


# ---- what a run says of itself


class Records:
    """Follows metrics.jsonl while it grows, is cut and replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode = self.offset = 0
        self.starts: list[int] = []  # at which step each start went on
        self.step = 0

    def poll(self) -> None:
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.inode or found.st_size < self.offset:
                    self.__init__(self.path)  # type: ignore[misc]
                    self.inode = found.st_ino
                if found.st_size == self.offset:
                    return
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record["kind"] in ("start", "resume"):
                    self.starts.append(record["step"])
                elif record["kind"] == "step":
                    self.step = record["step"]


def intact(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints that verify, lowest step first."""
    good = []
    for step, path in step_directories(run / "checkpoints"):
        with contextlib.suppress(CheckpointError, OSError):
            verify(path)
            good.append((step, path))
    return good


def names(run: Path) -> set[str]:
    try:
        return set(os.listdir(run / "checkpoints"))  # noqa: PTH208 - polled: no Path for every entry
    except FileNotFoundError:
        return set()


def differences(run: Path, reference: Path) -> list[str]:
    """What a run that is over has other than the undisturbed one."""
    from tests import tiny

    faults = []
    for kind in ("step", "eval"):
        here, there = tiny.records(run, kind), tiny.records(reference, kind)
        if [r["step"] for r in here] != [r["step"] for r in there]:
            faults.append(f"the {kind} records are of other steps than the undisturbed run's, or not each once")
        elif here != there:
            a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
            faults.append(
                f"{kind} record of step {a['step']} differs: {[(k, a.get(k), b.get(k)) for k in b if a.get(k) != b[k]]}"
            )
    if not tiny.same(tiny.weights(run, prefix=""), tiny.weights(reference, prefix="")):
        faults.append("the final tensors differ from the undisturbed run's")
    found, expected = (
        [r for r in map(json.loads, read_lines(path / "findings.jsonl")) if r["kind"] not in OF_THE_MACHINE]
        for path in (run, reference)
    )
    if [(r["kind"], r["step"]) for r in found] != [(r["kind"], r["step"]) for r in expected]:
        faults.append("the findings differ from the undisturbed run's")
    if stray := sorted(name for name in names(run) if name.startswith(".tmp-")):
        faults.append(f"unfinished directories were left: {', '.join(stray)}")
    if tiny.status(run)["outcome"] != "finished":
        faults.append(f"status.json says {tiny.status(run)['outcome']}")
    return faults


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ---- faults


@dataclass
class Fault:
    number: int
    kind: str
    aim: str
    draw: random.Random
    what: str = ""
    step: int = 0
    ended: str = ""


def deck(first: int, count: int, seed: int, kinds: list[str], cards: list[tuple[str, str]]) -> list[Fault]:
    cards = [card for card in cards if not kinds or card[0] in kinds]
    faults = []
    for number in range(first, first + count):
        cycle, place = divmod(number - 1, len(cards))
        order = random.Random(f"{seed}, cycle {cycle}").sample(cards, len(cards))
        draw = random.Random(f"{seed}, fault {number}")
        kind, aim = order[place]
        aim = draw.choice([*AIMED, "restore"]) if aim == "any" else aim
        faults.append(Fault(number, kind, aim, draw))
    return faults


class Ended(Exception):
    """The attempt ended while a moment in it was waited for."""


@dataclass
class Options:
    launch: str
    ranks: int
    steps: int
    seed: int
    overrides: list[str]
    scratch: Path
    config: Path
    reference: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    startup_seconds: float = 5.0
    attempts: int = 0

    @property
    def pace(self) -> Path:
        return self.scratch / "pace"

    def start(self, run: Path, async_: bool) -> Attempt:
        self.attempts += 1
        words = [str(self.config), f"run.dir={run}", f"checkpoint.async={str(async_).lower()}", *self.overrides]
        command = []
        for word in shlex.split(self.launch):
            command += words if word == "{config}" else [word.replace("{ranks}", str(self.ranks))]
        return Attempt(
            command, f"{self.mark}.{self.attempts}.", self.scratch / f"attempt-{self.attempts:04d}.log", self.ranks
        )


class Campaign:
    """Faults on one run directory, one after another."""

    def __init__(self, options: Options, base: Path) -> None:
        self.options, self.base = options, base
        self.round = 0
        self.problems: list[str] = []
        self.survived = 0
        self.attempt: Attempt | None = None
        self.fault: Fault | None = None
        self.told: list[Fault] = []  # faults whose line waits for the next start to go on
        self.checks: list[Callable[[], None]] = []  # once the next start has gone on
        self.choice = random.Random(f"{options.seed}, settings")
        self.known: list[int] = []  # processes of the attempt
        self.lenient = False  # the disk was full: a checkpoint may be missing
        self._new_round()

    def _new_round(self) -> None:
        self.round += 1
        self.run = self.base / f"run-{self.round}"
        self.records = Records(self.run / "metrics.jsonl")

    def problem(self, text: str) -> None:
        number = "" if self.fault is None else f"fault {self.fault.number} ({self.fault.kind} {self.fault.aim}): "
        self.problems.append(number + text)
        print(f"     PROBLEM {number}{text}", flush=True)
        if self.attempt is not None:
            print("\n".join(f"       | {line[:200]}" for line in self.attempt.text().splitlines()[-12:]), flush=True)

    # -- attempts

    def start(self) -> Attempt:
        """The same command again, if none runs."""
        if self.attempt is None:
            good = intact(self.run)
            self.expected = good[-1][0] if good else 0
            self.records = Records(self.run / "metrics.jsonl")
            self.records.poll()
            self.before = len(self.records.starts)
            self.lock = self._lock()
            self.async_ = self.choice.random() < 0.5
            self.attempt = self.options.start(self.run, self.async_)
            self.resumed: int | None = None
            self.known = []
        return self.attempt

    def _lock(self) -> int:
        try:
            return (self.run / "lock.json").stat().st_ino
        except FileNotFoundError:
            return 0

    def until(self, test: Callable[[], bool], seconds: float = 120.0) -> None:
        """Raises Ended if the attempt ends before `test()` is true."""
        assert self.attempt is not None
        end = time.monotonic() + seconds
        while True:
            over = self.attempt.process.poll() is not None
            self.records.poll()
            if test():
                return
            if over:
                raise Ended
            if time.monotonic() > end:
                raise TimeoutError(f"nothing happened for {seconds:.0f} s")
            time.sleep(0.0005)

    def loop(self) -> Attempt:
        """Until the attempt trains; checks from where."""
        attempt = self.start()
        if self.resumed is None:
            self.until(lambda: len(self.records.starts) > self.before)
            self._has_resumed()
        return attempt

    def _has_resumed(self) -> None:
        self.resumed = self.records.starts[-1]
        if self.resumed != self.expected:
            self.problem(
                f"went on from step {self.resumed}, but the newest whole checkpoint was of step {self.expected}"
            )
        for check in self.checks:
            check()
        self.checks.clear()
        self._tell(f"went on from step {self.resumed}")

    def _tell(self, then: str) -> None:
        for fault in self.told:
            aim = f" at {fault.aim}" if fault.aim else ""
            print(
                f"{fault.number:4d}  {fault.kind}{aim}: {fault.what}; step {fault.step}; {fault.ended}; {then}",
                flush=True,
            )
        self.told.clear()

    def end(self, seconds: float = 90.0) -> str:
        """Waits until the attempt and all its processes have ended by themselves; returns how."""
        attempt = self.attempt
        assert attempt is not None
        began = time.monotonic()
        try:
            attempt.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.problem(f"the launcher was still there after {seconds:.0f} s")
        while (left := marked(attempt.mark)) and time.monotonic() - began < seconds:
            time.sleep(0.01)
        took = time.monotonic() - began
        if left:
            self.problem(f"processes were left: {sorted(left)}")
            kill_marked(attempt.mark)
        code = attempt.process.wait()
        self.records.poll()
        if self.resumed is None and len(self.records.starts) > self.before:
            self._has_resumed()
        good = intact(self.run)
        newest = good[-1][0] if good else 0
        floor = max(self.resumed or 0, self.expected)
        if self.resumed is not None and not self.lenient:
            due = (self.records.step - 1) // EVERY * EVERY - (EVERY if self.async_ else 0)
            floor = max(floor, due)
        if newest < floor:
            self.problem(
                f"trained to step {self.records.step} from {self.resumed}, but the newest whole checkpoint is {newest}"
            )
        self.outcome = self._outcome()
        self.attempt = None
        return f"ended with {code}, {self.outcome}, {took:.1f} s later; newest checkpoint {newest}"

    def _outcome(self) -> str:
        assert self.attempt is not None
        try:
            if (self.run / "status.json").stat().st_mtime >= self.attempt.began - 0.01:
                return str(json.loads((self.run / "status.json").read_text())["outcome"])
        except FileNotFoundError:
            pass
        return "no status"

    def kill_all(self, draw: random.Random) -> bool:
        assert self.attempt is not None
        pids, self.known = self.known or sorted(marked(self.attempt.mark)), []
        draw.shuffle(pids)
        hit = [send(pid, signal.SIGKILL) for pid in pids]
        kill_marked(self.attempt.mark)
        return any(hit)

    def quiet(self, draw: random.Random) -> None:
        """No attempt runs any more."""
        if self.attempt is not None:
            self.kill_all(draw)
            self.end()

    # -- moments

    def reach(self, fault: Fault) -> Attempt:
        """Until the moment that the fault is aimed at."""
        draw = fault.draw
        if fault.aim in ("start-up", "restore"):
            self.quiet(draw)
            attempt = self.start()
            if fault.aim == "start-up":
                time.sleep(draw.uniform(0.05, self.options.startup_seconds))
            else:
                self.until(lambda: self._lock() not in (0, self.lock))
                time.sleep(draw.uniform(0.0, 0.6))
            return attempt
        attempt = self.loop()
        self.known = sorted(marked(attempt.mark))  # looked up now: it takes longer than some moments last
        attempt.ranks()
        step = self.records.step if self.records.step > (self.resumed or 0) else (self.resumed or 0)
        step += draw.randint(1, 12)
        self.until(lambda: self.records.step >= step)
        late = 0.03
        if fault.aim == "save":
            self.until(lambda: any(name.startswith(".tmp-step-") for name in names(self.run)))
            late = 0.02
        elif fault.aim == "publish":
            before = names(self.run)
            self.until(lambda: any(name.startswith("step-") for name in names(self.run) - before))
            late = 0.005
        elif fault.aim == "prune":
            before = {name for name in names(self.run) if name.startswith("step-")}
            self.until(lambda: bool(before - names(self.run)))
            late = 0.002
        elif fault.aim == "evaluation":
            step = self.records.step
            self.until(lambda: self.records.step > step and self.records.step % EVAL_EVERY == 0)
            late = 0.01
        time.sleep(draw.uniform(0.0, late))
        return attempt

    # -- kinds

    def strike(self, fault: Fault) -> None:
        """Does it, and waits for what comes of it. Raises Ended if the run was over before."""
        self.fault = fault
        if fault.kind in DAMAGE:
            self._damage(fault)
        elif fault.kind.startswith("full-"):
            self._full(fault)
        elif fault.kind == "second-start":
            self._second_start(fault)
        else:
            attempt = self.reach(fault)
            self.records.poll()
            fault.step = self.records.step
            getattr(self, "_" + fault.kind.lower().replace("-", "_"))(fault, attempt)

    def _rank(self, fault: Fault, attempt: Attempt) -> tuple[int, int]:
        ranks = attempt.ranks()
        if not ranks and fault.aim == "start-up":  # the launcher has not come so far
            self.until(lambda: len(attempt.ranks()) == self.options.ranks)
            ranks = attempt.ranks()
        if not ranks:
            raise Ended
        rank = fault.draw.choice(sorted(ranks))
        return rank, ranks[rank]

    def _kill_rank(self, fault: Fault, attempt: Attempt) -> None:
        rank, pid = self._rank(fault, attempt)
        if not send(pid, signal.SIGKILL):
            raise Ended
        fault.what = f"rank {rank} killed"
        trained = self.resumed is not None
        fault.ended = self.end()
        if "forcefully exiting via 9" in attempt.text():
            self.problem(f"{fault.what}: another rank did not hear that it is to end")
        # At the end of the run the others may have left before.
        if trained and self.outcome == "running" and self.records.step < self.options.steps:
            self.problem(f"{fault.what}: status.json still says running")

    def _kill_all(self, fault: Fault, attempt: Attempt) -> None:
        if not self.kill_all(fault.draw):
            raise Ended
        fault.what = "all killed"
        fault.ended = self.end()

    def _kill_launcher(self, fault: Fault, attempt: Attempt) -> None:
        _, pid = self._rank(fault, attempt)
        with contextlib.suppress(OSError):
            above = parent(pid)
            if above in marked(attempt.mark) and send(above, signal.SIGKILL):
                fault.what = "the ranks' launcher killed"
                self._stops(fault)
                return
        raise Ended

    def _sigterm(self, fault: Fault, attempt: Attempt) -> None:
        rank, pid = self._rank(fault, attempt)
        if not send(pid, getattr(signal, fault.kind)):
            raise Ended
        fault.what = f"{fault.kind} to rank {rank}"
        self._stops(fault)

    _sigusr1 = _sigterm

    def _stops(self, fault: Fault) -> None:
        """A request: it must end with a checkpoint of the last step."""
        fault.ended = self.end()
        good = intact(self.run)
        if self.outcome not in ("stopped", "finished"):
            self.problem(f"{fault.what}: the outcome is {self.outcome}, not stopped")
        elif self.resumed is not None and self.records.step > (good[-1][0] if good else 0):
            # One that has not begun has not taken out the records of the updates that are to be done again, either.
            self.problem(f"{fault.what}: stopped after step {self.records.step}, the newest checkpoint is of {good}")

    def _delay(self, fault: Fault, attempt: Attempt) -> None:
        rank, pid = self._rank(fault, attempt)
        seconds = fault.draw.uniform(0.2, 1.5)
        if not send(pid, signal.SIGSTOP):
            raise Ended
        try:
            time.sleep(seconds)
        finally:
            send(pid, signal.SIGCONT)
        fault.what = f"rank {rank} held for {seconds:.1f} s"
        self._went_on(fault)

    def _went_on(self, fault: Fault) -> None:
        """The attempt must go on."""
        self.loop()
        step = self.records.step
        with contextlib.suppress(Ended):  # at the end of the run
            self.until(lambda: self.records.step > step)
        assert self.attempt is not None
        if self.attempt.process.poll() is not None and self._outcome() != "finished":
            self.problem(f"{fault.what}: the attempt ended, {self._outcome()}")
        fault.ended = "went on"

    def _second_start(self, fault: Fault) -> None:
        self.reach(fault)
        self.options.pace.write_text("0.25")
        try:
            fault.step = self.records.step
            second = self.options.start(self.run, self.async_)
            code = second.process.wait(120)
            if code == 0 or "is in use by process" not in second.text():
                self.problem(f"the second start ended with {code}: {second.text()[-500:]}")
            if kill_marked(second.mark):
                self.problem("processes of the second start were left")
        finally:
            self.options.pace.write_text("0")
        fault.what = f"refused with {code}"
        self._went_on(fault)

    def _damage(self, fault: Fault) -> None:
        """Between two attempts. Before that there must be something to damage, and something to fall back on."""
        while len(intact(self.run)) < 2 or self.told or self.attempt is not None:
            self.loop()
            if len(step_directories(self.run / "checkpoints")) < 2:
                self.until(lambda: len(step_directories(self.run / "checkpoints")) >= 2)
            self.quiet(fault.draw)
        self.records.poll()
        fault.step = self.records.step
        fault.ended = f"newest checkpoint {intact(self.run)[-1][0]}"
        draw, checkpoints = fault.draw, self.run / "checkpoints"
        newest = intact(self.run)[-1]
        if fault.kind == "cut-metrics":
            fault.what = self._cut_metrics(draw, newest[0])
        elif fault.kind == "leftovers":
            fault.what = self._leftovers(draw, newest[0])
        elif fault.kind == "damage-all":
            copies = self.options.scratch / "copies"
            shutil.copytree(checkpoints, copies, ignore=shutil.ignore_patterns("quarantine", ".tmp-*"))
            good = intact(self.run)
            for _, path in step_directories(checkpoints):
                damage(path, draw.choice(["flip", "truncate", "no-manifest"]), draw)
            self.expected_refusal()
            for _, path in good:
                shutil.copytree(copies / path.name, path)
            shutil.rmtree(copies)
            fault.what = f"{len(good)} checkpoints damaged, refused, copies put back"
        else:
            fault.what = damage(newest[1], fault.kind, draw)

            def check() -> None:
                if not list((checkpoints / "quarantine").glob(f"{newest[1].name}*/reason.txt")):
                    self.problem(f"the damaged {newest[1].name} is not in quarantine")

            self.checks.append(check)

    def expected_refusal(self) -> None:
        attempt = self.start()
        self.expected = 0
        self.end()
        if attempt.process.returncode == 0 or "refusing to start from zero" not in attempt.text():
            self.attempt = attempt
            self.problem(f"all checkpoints are damaged, and the start ended with {attempt.process.returncode}")
            self.attempt = None

    def _cut_metrics(self, draw: random.Random, newest: int) -> str:
        """As a crash does: what was written since the newest checkpoint, which synced the file, may be cut anywhere."""
        path = self.run / "metrics.jsonl"
        data, kept, place = path.read_bytes(), 0, 0
        for line in data.splitlines(keepends=True):
            place += len(line)
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                kept = place if record["kind"] in ("start", "step", "eval") and record["step"] <= newest else kept
        cut = draw.randint(kept, len(data))
        tail = b'{"kind": "step", "step": 99' if cut == len(data) else b""
        path.write_bytes(data[:cut] + tail)
        return f"metrics.jsonl cut by {len(data) - cut} of {len(data)} bytes" + (
            ", half a record added" if tail else ""
        )

    def _leftovers(self, draw: random.Random, newest: int) -> str:
        left = []
        for name in draw.sample(
            [f".tmp-step-{newest + EVERY:08d}", f".tmp-pruned-step-{max(1, newest - 99):08d}"], draw.randint(1, 2)
        ):
            path = self.run / "checkpoints" / name
            if not path.exists():
                path.mkdir()
                (path / "chaos.safetensors").write_bytes(draw.randbytes(draw.randint(0, 5000)))
                left.append(path)
        (self.run / ".metrics.jsonl.tmp").write_bytes(draw.randbytes(99))
        (self.run / ".status.json.tmp").write_bytes(b'{"outc')

        def check() -> None:
            if there := [path.name for path in left if (path / "chaos.safetensors").exists()]:
                self.problem(f"not removed at the start: {', '.join(there)}")

        self.checks.append(check)
        return f"{', '.join(path.name for path in left)} and two half files left behind"

    # -- a disk that fills

    def _fill(self, leave: int) -> None:
        ballast = self.base / "ballast"
        handle = os.open(ballast, os.O_RDWR | os.O_CREAT)
        try:
            chunk, place = 1 << 22, 0
            while chunk >= 4096:
                found = os.statvfs(self.base)
                if found.f_bavail * found.f_frsize - leave < chunk:
                    chunk //= 2
                    continue
                try:
                    os.posix_fallocate(handle, place, chunk)
                    place += chunk
                except OSError:
                    chunk //= 2
        finally:
            os.close(handle)

    def _full(self, fault: Fault) -> None:
        draw, ballast = fault.draw, self.base / "ballast"
        leave = draw.choice([0, 0, 16 << 10, 512 << 10])
        fault.what = f"disk full but for {leave >> 10} KiB"
        try:
            if fault.kind == "full-at-start":
                if self.attempt is not None or not intact(self.run):
                    self.loop()
                    if not intact(self.run):
                        self.until(lambda: bool(step_directories(self.run / "checkpoints")))
                self.quiet(draw)
                self.records.poll()
                fault.step = self.records.step
                self._fill(leave)
                self.lenient = True
                self.start()
                with contextlib.suppress(Ended):
                    self.until(lambda: len(self.records.starts) > self.before or "step " in self._console())
                    time.sleep(draw.uniform(0.0, 1.0))
                    self.kill_all(draw)
                fault.ended = self.end()
                return
            attempt = self.reach(fault)
            self.lenient = True
            self._fill(leave)
            fault.step = self.records.step
            seen = attempt.text().count("watch: disk-full") + attempt.text().count("watch: save-failed")
            self.until(lambda: attempt.text().count("disk-full") + attempt.text().count("save-failed") > seen)
            if fault.kind == "full-killed":
                time.sleep(draw.uniform(0.0, 0.3))
                self.kill_all(draw)
                fault.ended = self.end()
            elif fault.kind == "full-stopped":
                rank, pid = self._rank(fault, attempt)
                send(pid, signal.SIGTERM)
                fault.what += f", SIGTERM to rank {rank}"
                fault.ended = self.end()
                if self.outcome not in ("failed", "stopped"):
                    self.problem(f"a stop on a full disk was told as {self.outcome}")
            else:
                time.sleep(draw.uniform(0.0, 0.3))
                ballast.unlink()
                before = names(self.run)
                with contextlib.suppress(Ended):
                    self.until(lambda: any(name.startswith("step-") for name in names(self.run) - before))
                self._went_on(fault)
        finally:
            ballast.unlink(missing_ok=True)
            if self.attempt is None:
                self.lenient = False

    def _console(self) -> str:
        assert self.attempt is not None
        return self.attempt.text()

    # -- all of them

    def endure(self, faults: list[Fault]) -> None:
        for fault in faults:
            for _ in range(4):
                try:
                    self.strike(fault)
                except (Ended, TimeoutError) as error:
                    self._over(error)
                    continue
                self.survived += 1
                self.told.append(fault)
                if fault.ended == "went on":
                    self._tell("no restart")
                break
            else:
                self.problem("the run ended four times before this fault could strike")
        self.finish()

    def _over(self, error: Exception) -> None:
        """An attempt came to its end before its fault did: the run is finished, or it failed for a reason of its own."""
        assert self.attempt is not None
        if isinstance(error, TimeoutError):
            self.problem(f"{error}")
            kill_marked(self.attempt.mark)
        attempt, how = self.attempt, self.end()
        if self.outcome == "finished":
            self.compare()
        elif not isinstance(error, TimeoutError):
            self.attempt = attempt
            self.problem(f"the attempt {how} before the fault")
            self.attempt = None

    def finish(self) -> None:
        """No more faults: the run must come to its end."""
        for _ in range(3):
            self.lenient = False
            try:
                self.loop()
                assert self.attempt is not None
                self.attempt.process.wait(60 + self.options.steps)
                self.fault = None
                how = self.end()
            except (Ended, subprocess.TimeoutExpired) as error:
                how = f"{type(error).__name__}: {self.end(1.0)}"
            if self.outcome == "finished":
                self._tell("went on to the end")
                self.compare()
                return
            self.problem(f"without a fault the attempt {how}")

    def compare(self) -> None:
        found = differences(self.run, self.options.reference)
        for text in found:
            self.problem(f"run {self.round}: {text}")
        starts = len([r for r in read_records(self.run / "metrics.jsonl") if r["kind"] in ("start", "resume")])
        if not found:
            print(
                f"      run {self.round} of {self.options.steps} steps, {starts} starts: equal to the undisturbed run",
                flush=True,
            )
            remove(self.run)
        self._new_round()


def damage(checkpoint: Path, kind: str, draw: random.Random) -> str:
    """Damages one file of a checkpoint; returns what was done."""
    if kind == "no-manifest":
        (checkpoint / "manifest.json").unlink()
        return f"the manifest of {checkpoint.name} removed"
    path = draw.choice(sorted(checkpoint.iterdir()))
    place = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        if kind == "truncate":
            file.truncate(place)
            return f"{checkpoint.name}/{path.name} cut to {place} bytes"
        file.seek(place)
        byte = file.read(1)[0] ^ (1 << draw.randrange(8))
        file.seek(place)
        file.write(bytes([byte]))
    return f"a bit of {checkpoint.name}/{path.name} flipped at byte {place}"


def write_config(scratch: Path, steps: int) -> Path:
    """A model of bytes with dropout, AdamW and validation: 30,000 parameters."""
    from tests import tiny

    data = tiny.write_data(scratch / "data", windows=1024, length=16)
    val = tiny.write_data(scratch / "val", windows=64, length=16, seed=1)
    cfg = tiny.config(
        Path("unset"), data, data__val_path=str(val), model__factory="tests.chaos:paced", model__dropout=0.1,
        model__factory_args={"pace": str(scratch / "pace")}, model__d_model=32, model__d_ff=64, model__context_length=16,
        optim__name="adamw", optim__lr=3e-3, optim__weight_decay=0.1, schedule__kind="cosine", schedule__warmup=0.1,
        train__steps=steps, train__global_batch=8, train__micro_batch=2, eval__every=EVAL_EVERY, eval__batches=2,
        checkpoint__every=EVERY, checkpoint__keep=3,
    )  # fmt: skip
    return tiny.write_toml(scratch / "chaos.toml", cfg)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[str]:
    """A tmpfs at `path`; yields "", or why there is none."""
    path.mkdir()
    if os.geteuid() != 0:
        yield "a tmpfs needs root"
        return
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        yield done.stderr.strip() or f"mount ended with {done.returncode}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def undisturbed(options: Options) -> None:
    attempt = options.start(options.reference, async_=False)
    records = Records(options.reference / "metrics.jsonl")
    while attempt.process.poll() is None and not records.starts:
        records.poll()
        time.sleep(0.01)
    options.startup_seconds = time.monotonic() - attempt.clock
    if attempt.process.wait() or not (options.reference / "status.json").exists():
        sys.exit(f"the undisturbed run failed:\n{attempt.text()[-3000:]}")
    seconds = time.monotonic() - attempt.clock
    print(
        f"undisturbed: {options.steps} steps in {seconds:.1f} s, of it {options.startup_seconds:.1f} s until training began; "
        f"a checkpoint every {EVERY} steps, a validation every {EVAL_EVERY}", flush=True,
    )  # fmt: skip


def chaos(args: argparse.Namespace) -> int:
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="kamui-chaos-", dir=args.directory)).absolute()
    steps = args.steps or min(3000, max(60, 12 * args.faults))
    options = Options(
        args.launch,
        args.ranks,
        steps,
        args.seed,
        args.overrides,
        scratch,
        write_config(scratch, steps),
        scratch / "undisturbed",
    )
    options.pace.write_text("0")
    problems: list[str] = []
    survived, skipped = 0, ""
    wanted = args.kinds.split(",") if args.kinds else []
    full_cards = [card for card in FULL if not wanted or card[0] in wanted]
    other_cards = [card for card in DECK if not wanted or card[0] in wanted]
    try:
        with small_disk(scratch / "small") as missing:
            # The last of the faults are on a disk that fills: another one, since what is slow on a real disk is not on a tmpfs.
            full = args.faults // 8 if full_cards else 0
            full = 0 if missing else args.faults if not other_cards else full
            if missing and full_cards:
                skipped = f"; full disks were SKIPPED: {missing}"
                print(skipped.strip("; "), flush=True)
            undisturbed(options)
            parts = [
                (scratch, 1, args.faults - full, other_cards),
                (scratch / "small", args.faults - full + 1, full, full_cards),
            ]
            for base, first, count, cards in parts:
                numbers = deck(first, count, args.seed, wanted, cards) if cards else []
                if faults := [fault for fault in numbers if fault.number >= args.first]:
                    campaign = Campaign(options, base)
                    try:
                        campaign.endure(faults)
                    finally:
                        problems += campaign.problems
                        survived += campaign.survived
    except (KeyboardInterrupt, SystemExit):
        kill_marked(options.mark)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        kill_marked(options.mark)
    print(
        f"{survived} faults, {options.attempts} starts on {args.ranks} ranks, {time.monotonic() - began:.0f} s, seed {args.seed}: "
        + (f"{len(problems)} PROBLEMS" if problems else "nothing lost, all tensors and records bitwise equal") + skipped
    )  # fmt: skip
    if problems:
        print("\n".join(f"  {text}" for text in problems))
        print(
            f"again: python -m tests.chaos --faults {args.faults} --seed {args.seed} --steps {steps} --ranks {args.ranks} "
            f"--first N   (N: the fault to begin with)\nwhat is left, and the log of each start: {scratch}"
        )
        return 1
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of the run (default: 12 for each fault, 60 to 3000)")
    parser.add_argument("--first", type=int, default=1, help="leave out the faults before this one")
    parser.add_argument(
        "--kinds", help="only these, with commas: " + ", ".join(dict.fromkeys(kind for kind, _ in [*DECK, *FULL]))
    )
    parser.add_argument("--directory", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument(
        "--launch", default=LAUNCH, help="command; {ranks} and {config} are filled in (default: torchrun)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in training, for all attempts")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    return chaos(args)


if __name__ == "__main__":
    sys.exit(main())
