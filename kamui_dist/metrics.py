"""One record a step -> metrics.jsonl (the source of truth), console, TensorBoard; throughput, MFU, memory. Rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kamui_dist.evaluate import Validation
from kamui_dist.files import Appender, write_text
from kamui_dist.state import State
from kamui_dist.watch import Finding

# Dense bf16 and fp16 FLOP/s of one device, from the makers' data sheets (without sparsity). The longest entry whose words are
# all in the device's name counts; a device that is not here has no MFU.
PEAK_FLOPS = {
    "A100": 312e12, "A800": 312e12, "A30": 165e12, "A10G": 70e12, "A40": 149.7e12, "L4": 121e12, "L40S": 362e12,
    "H100": 989.4e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H800": 989.4e12, "H800 PCIe": 756e12, "H200": 989.4e12,
    "H200 NVL": 835e12, "GH200": 989.4e12, "H20": 148e12, "B200": 2250e12, "V100": 125e12, "V100 PCIE": 112e12,
}  # fmt: skip

TAGS = {
    "loss": "train/loss", "loss_average": "train/loss_average", "spike": "train/spike", "lr": "train/lr",
    "grad_norm_pre_clip": "train/grad_norm_pre_clip", "grad_norm_post_clip": "train/grad_norm_post_clip",
    "skipped": "train/skipped", "tokens": "train/tokens", "epoch": "train/epoch", "loss_scale": "train/loss_scale",
    "val_loss": "val/loss", "val_perplexity": "val/perplexity", "val_bits_per_byte": "val/bits_per_byte",
    "tokens_per_sec": "perf/tokens_per_sec",
    "mfu": "perf/mfu", "step_seconds": "perf/step_seconds", "data_seconds": "perf/data_seconds",
    "save_seconds": "perf/save_seconds", "eval_seconds": "perf/eval_seconds", "peak_memory_gib": "memory/peak_gib",
}  # fmt: skip


def peak_flops(device: torch.device, precision: str, override: float | None) -> float | None:
    """FLOP/s of one device, or None where it is not known: no MFU is better than a wrong one."""
    # Products of a run in fp32 have another peak, which the table does not hold.
    if override is not None or device.type != "cuda" or precision == "fp32":
        return override
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """From the table, by the name that the driver gives; None for an unknown device, or a slice of one (MIG)."""
    words = name.replace("-", " ").split()
    known = [k for k in PEAK_FLOPS if all(part in words for part in k.split())]
    return PEAK_FLOPS[max(known, key=len)] if known and "MIG" not in words else None


def mfu(tokens_per_sec: float, flops_per_token: float, peak: float | None, world_size: int) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): all ranks' tokens over all ranks' peak."""
    return None if peak is None else tokens_per_sec * flops_per_token / (peak * world_size)


def peak_memory_gib(device: torch.device) -> float:
    """The most this rank has held so far: CUDA's allocator, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


class Metrics:
    """metrics.jsonl, console and TensorBoard on rank 0; on every other rank each call does nothing."""

    def __init__(
        self, run_dir: Path, enabled: bool, every: int, total_steps: int, tensorboard: bool, resumed: int
    ) -> None:
        self.enabled = enabled
        self.first_set: str | None = None
        if not enabled:
            return
        self.every, self.total_steps = every, total_steps
        self.live = sys.stdout.isatty()
        self.pace: float | None = None  # seconds a step including everything, for the ETA
        self.last = (time.monotonic(), resumed)
        self.warned = False
        self.findings_path = run_dir / "findings.jsonl"
        self.findings_file: Appender | None = None  # made when there is something to say
        path = run_dir / "metrics.jsonl"
        forget_after(path, resumed)
        forget_after(self.findings_path, resumed)
        self.file = Appender(path)
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: what an earlier attempt wrote after our checkpoint is dropped, so that no curve zigzags.
            self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed + 1)

    def write(self, kind: str, **values: Any) -> None:
        """One record. Non-finite numbers become null. A step's points go to TensorBoard every `log.every` steps."""
        if not self.enabled:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.file.write(json.dumps({"kind": kind, **clean, "time": round(time.time(), 3)}, allow_nan=False) + "\n")
        if (clean.get("mfu") or 0.0) > 1.0 and not self.warned:
            self.warned = True
            self.say(f"warning: mfu {values['mfu']:.2f} is above 1, which no device reaches; log.peak_flops is too low")
        step = values.get("step", 0)
        if self.board and (kind != "step" or self.due(step)):
            with self._tensorboard():
                self._points(clean, step)

    def _points(self, values: dict[str, Any], step: int) -> None:
        assert self.board is not None
        # The first validation set is val/..., another one val_<name>/...
        other = f"val_{values['set']}/" if values.get("set", self.first_set) != self.first_set else None
        for name, value in values.items():
            if name in TAGS and value is not None and (other is None or TAGS[name].startswith("val/")):
                self.board.add_scalar(TAGS[name].replace("val/", other or "val/"), float(value), step)
        for name, source in (values.get("sources") or {}).items():
            self.board.add_scalar(f"data/tokens_{name}", float(source["tokens"]), step)
            if source.get("loss") is not None:
                self.board.add_scalar(f"train/loss_{name}", float(source["loss"]), step)

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """A disk that is full is no reason to end a run: then there are no more points, and one line says so."""
        try:
            yield
        except OSError as error:
            self.board = None
            self.say(f"warning: TensorBoard's file cannot be written ({error}); no more points until the next start")

    def text(self, tag: str, text: str, step: int = 0) -> None:
        if self.enabled and self.board:
            with self._tensorboard():
                self.board.add_text(tag, text, step)

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step in (1, self.total_steps)

    def console(self, step: int, loss: float, lr: float, norm: float, tokens_per_sec: float, mfu: float | None) -> None:
        """The line of a step: printed every `log.every` steps; in between, on a terminal, one live line."""
        if not self.enabled:
            return
        now = time.monotonic()
        recent = (now - self.last[0]) / max(1, step - self.last[1])
        if self.due(step) or self.pace is None:
            self.pace = recent if self.pace is None else 0.5 * self.pace + 0.5 * recent
            self.last = (now, step)
        if not (self.due(step) or self.live):
            return
        line = (
            f"step {step:>{len(str(self.total_steps))}}/{self.total_steps} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f}"
            f" | {tokens_per_sec:,.0f} tok/s" + (f" | mfu {mfu:.1%}" if mfu is not None else "")
            + f" | eta {_clock(self.pace * (self.total_steps - step))}"
        )  # fmt: skip
        if self.live:
            print(f"\r\033[K{line}", end="\n" if self.due(step) else "", flush=True)
        else:
            print(line, flush=True)

    def evaluations(self, state: State, results: list[Validation], improved: bool) -> None:
        """A record for each validation set; the first decides what is best."""
        for result in results:
            first = result is results[0]
            values: dict[str, Any] = {"set": result.name, "val_loss": result.loss, "val_perplexity": result.perplexity}
            told = [f"eval: step {state.step}"] + ([result.name] if len(results) > 1 else [])
            told += [f"val loss {result.loss:.4f}", f"perplexity {result.perplexity:.2f}"]
            if result.bits_per_byte is not None:
                values["val_bits_per_byte"] = result.bits_per_byte
                told.append(f"{result.bits_per_byte:.4f} bits a byte")
            if first:
                self.first_set, values["best"] = result.name, improved
                told.append("best so far" if improved else f"best {state.best_val_loss} at step {state.best_step}")
            self.write("eval", step=state.step, tokens=state.tokens, **values, eval_seconds=result.seconds)
            self.say(" | ".join([*told, f"{result.seconds:.1f} s"]))

    def checkpoint(self, state: State, seconds: float, **measured: Any) -> None:
        """`seconds`: from its step until it was published. measured: see saver.py."""
        self.write("checkpoint", step=state.step, tokens=state.tokens, save_seconds=seconds, **measured)
        line = f"checkpoint: step {state.step} saved in {seconds:.2f} s"
        if measured:
            line += (
                f" ({measured['bytes'] / 1e6:.1f} MB, written at {measured['mb_per_second']:.0f} MB/s; weights finite and equal "
                f"on all replicas, checked in {measured['check_seconds'] / seconds:.1%} of the time)"
            )
            line += f"; training was held for {measured['stall_seconds']:.3f} s" if measured["aside"] else ""
        self.say(line)

    def findings(self, findings: list[Finding]) -> None:
        if not (self.enabled and findings):
            return
        self.findings_file = self.findings_file or Appender(self.findings_path)
        self.findings_file.write("".join(json.dumps(f.record()) + "\n" for f in findings))
        for finding in findings:
            self.say(f"watch: {finding}")
            self.text("findings", str(finding), finding.step)

    def say(self, line: str) -> None:
        if self.enabled:
            print(("\r\033[K" if self.live else "") + line, flush=True)

    def sync(self) -> None:
        """Before a checkpoint is published: its records must not be the part that a power failure takes."""
        if self.enabled:
            self.file.sync()
            if self.board:
                with self._tensorboard():
                    self.board.flush()

    def close(self) -> None:
        if self.enabled:
            self.file.close()
            if self.findings_file:
                self.findings_file.close()
            if self.board:
                with self._tensorboard():
                    self.board.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


def forget_after(path: Path, step: int) -> None:
    """Takes out the records of updates that a resume from `step` does again, so that none is visible twice."""
    if path.exists():
        history = ("start", "resume")  # of attempts, not of updates
        kept = [r for r in read_records(path) if r["kind"] in history or r.get("step", 0) <= step]
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
