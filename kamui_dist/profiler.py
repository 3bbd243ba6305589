"""Where the time of some steps goes, and on CUDA the memory: log.profile_steps, log.memory_history.

torch.profiler over those steps, on rank 0, and only there: what it costs slows the others too, since they wait. The trace is
for Perfetto (ui.perfetto.dev) and chrome://tracing; TensorBoard's plugin for such traces is no longer maintained.
"""

from __future__ import annotations

import gzip
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity

from kamui_dist.knobs import Log

ROWS = 12  # of the table
WAITING = "Python, and waiting"
_HISTORY = 100_000  # allocations and frees that are remembered; the older ones are forgotten


class Profiler:
    """`profiler.step(n)` at the top of each step, n counted from 1 as in metrics.jsonl, then `close()`.

    Records the steps log.profile_steps = [first, last] ([first]: that one), once, if it is enabled (on rank 0); a run that begins
    after `first` records nothing. The step before is a warm-up, where there is one: the first events of a profiler are late.
    `say` takes each text for the user. What goes wrong with a file is told and ends no run.
    """

    def __init__(
        self, log: Log, run_dir: Path, device: torch.device, enabled: bool, say: Callable[[str], None] = print
    ) -> None:
        steps = log.profile_steps if enabled else []
        self.first, self.last = (steps[0], steps[-1]) if steps else (0, 0)  # (0, 0): nothing to do, or done
        self.run_dir, self.device, self.say = run_dir, device, say
        self.history = log.memory_history and device.type == "cuda"
        self._profile: torch.profiler.profile | None = None
        if self.history:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_HISTORY)
        elif log.memory_history and enabled:
            say("note: log.memory_history has no effect on the CPU: it records what CUDA's allocator does")

    def step(self, n: int) -> None:
        """Step n begins."""
        if not self.last:
            return
        if self._profile is None:
            if n > self.first:
                self.say(f"note: log.profile_steps = {self.first}: the run goes on after it, nothing is recorded")
                self.first, self.last = 0, 0
            elif n >= self.first - 1:
                self._begin(n)
        elif n <= self.last:
            self._profile.step()
        else:
            self._finish()

    def close(self) -> None:
        """After the last step, however the loop was left."""
        if self._profile is not None and self._profile.step_num >= self.first:
            self._finish()
        elif self.last:
            if self._profile is not None:
                self._profile.stop()
            self.say(f"note: log.profile_steps: step {self.first} was never reached, nothing is recorded")
        if self.history:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.first, self.last, self.history, self._profile = 0, 0, False, None

    def _begin(self, n: int) -> None:
        first, warm = self.first, n < self.first

        def schedule(step: int) -> ProfilerAction:
            return ProfilerAction.WARMUP if warm and step < first else ProfilerAction.RECORD

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        # Neither shapes, stacks nor FLOPs (which need the shapes): they cost most, and shapes keep tensors alive.
        self._profile = torch.profiler.profile(activities=activities, schedule=schedule)
        self._profile.step_num = n  # the marks ProfilerStep#n in the trace
        self._profile.start()

    def _finish(self) -> None:
        assert self._profile is not None
        profile, name = self._profile, f"steps-{self.first}-{self.last}"
        first, asked, newest = self.first, self.last, self._profile.step_num  # a run may end before the last one
        steps, self._profile = newest - first + 1, None
        self.first, self.last = 0, 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the kernels of the last step belong to it
        profile.stop()
        assert profile.profiler is not None
        results = profile.profiler.kineto_results
        events = [] if results is None else results.events()
        missing = "" if newest == asked else f" ({first} to {asked} were asked for, the run ended before)"
        told = f"step {first}" if steps == 1 else f"steps {first} to {newest}"
        self.say(f"profile of {told}{missing}, rank 0, {table(events, steps)}")
        aside, target = self.run_dir / "profile" / f".{name}.tmp", self.run_dir / "profile" / name
        try:
            for old in (aside, target):
                shutil.rmtree(old, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            aside.mkdir()
            _export(profile, aside / "rank-0.pt.trace.json")
            if self.history:
                dump_memory(aside / "memory-rank-0.pickle")
            aside.rename(target)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            self.say(f"warning: the trace could not be written to {target}: {error}")
            return
        self.say(f"profile: {target}/rank-0.pt.trace.json.gz (open it in ui.perfetto.dev or chrome://tracing)")
        if self.history:
            self.say(f"profile: {target}/memory-rank-0.pickle (open it in pytorch.org/memory_viz; only there)")


def _export(profile: torch.profiler.profile, path: Path) -> None:
    """Writes `path`.gz. By ourselves, since torch would compress at the highest level, which takes most of the whole time."""
    profile.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    path.unlink()


def dump_memory(path: Path) -> None:
    """What CUDA's allocator holds, and what it did lately if log.memory_history is on. A pickle by torch, which only a viewer
    reads: this project never does. Raises OSError."""
    torch.cuda.memory._dump_snapshot(str(path))


def table(events: Iterable[Any], steps: int) -> str:
    """The operators that took most time by themselves, without those that they called: on the GPU if something ran there, else
    on the CPU. events: of torch's kineto_results; key_averages() would take half a minute for half a million of them. steps:
    that they come from.
    """
    events = list(events)
    on_gpu = [e for e in events if e.device_type() != DeviceType.CPU and not e.is_user_annotation()]
    host = [e for e in events if e.device_type() == DeviceType.CPU and not e.is_async() and e.name()[0] != "["]
    spent, calls = _of_kernels(on_gpu, host) if on_gpu else _of_operators(host)
    total = sum(spent.values()) or 1
    lines = [
        f"by time on {'the GPU' if on_gpu else 'the CPU'}, {total / 1e6 / steps:.2f} ms a step:",
        f"  {'operator':<44} {'self ms a step':>14} {'share':>7} {'calls a step':>13}",
    ]
    top = sorted(spent, key=lambda name: -spent[name])
    for name in top[:ROWS]:
        short = name if len(name) <= 44 else f"{name[:41]}..."
        told = f"{spent[name] / 1e6 / steps:>14.3f} {spent[name] / total:>7.1%} {calls[name] / steps:>13,.0f}"
        lines.append(f"  {short:<44} {told}")
    if rest := top[ROWS:]:
        other = sum(spent[name] for name in rest)
        lines.append(f"  {f'{len(rest)} others':<44} {other / 1e6 / steps:>14.3f} {other / total:>7.1%}")
    return "\n".join(lines)


def _of_operators(host: list[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Nanoseconds and calls by name. An event's own time is its duration less that of the events right under it: those of its
    thread that begin and end within it.
    """
    spent, calls = defaultdict[str, int](int), defaultdict[str, int](int)
    ordered = sorted((e.start_thread_id(), e.start_ns(), -e.duration_ns(), e.name()) for e in host)
    open_: list[tuple[int, int, str]] = []  # (thread, end, name) of the events around the next one
    for thread, start, minus, name in ordered:
        name = WAITING if name.startswith("ProfilerStep#") else name
        while open_ and (open_[-1][0] != thread or open_[-1][1] <= start):
            open_.pop()
        if open_:
            spent[open_[-1][2]] += minus
        spent[name] -= minus
        calls[name] += not (open_ and open_[-1][2] == name)  # one overload calls another
        open_.append((thread, start - minus, name))
    return spent, calls


def _of_kernels(on_gpu: list[Any], host: list[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """As above, of what ran on the GPU, by the operator that launched it; by its own name if none did. Calls are launches."""
    operators = {e.correlation_id(): e.name() for e in host if e.correlation_id() and not e.linked_correlation_id()}
    spent, calls = defaultdict[str, int](int), defaultdict[str, int](int)
    for e in on_gpu:
        name = operators.get(e.linked_correlation_id(), e.name())
        spent[name] += e.duration_ns()
        calls[name] += 1
    return spent, calls
