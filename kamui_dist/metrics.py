"""One record a step -> metrics.jsonl (the source of truth), the console, TensorBoard (board.py); throughput, MFU, memory.
Rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import torch

from kamui_dist import distributed, status
from kamui_dist.board import Board, verbatim
from kamui_dist.evaluate import Validation
from kamui_dist.files import Appender
from kamui_dist.history import finite_or_null, forget_after, read_records
from kamui_dist.retention import access
from kamui_dist.state import State
from kamui_dist.watch import Finding

__all__ = ["Metrics", "forget_after", "mfu", "peak_flops", "peak_memory_gib", "peak_of", "read_records"]

# Dense bf16 and fp16 FLOP/s of one device, from the makers' data sheets (without sparsity). The longest entry whose words are
# all in the device's name counts; a device that is not here has no MFU.
PEAK_FLOPS = {
    "A100": 312e12, "A800": 312e12, "A30": 165e12, "A10G": 70e12, "A40": 149.7e12, "L4": 121e12, "L40S": 362e12,
    "H100": 989.4e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H800": 989.4e12, "H800 PCIe": 756e12, "H200": 989.4e12,
    "H200 NVL": 835e12, "GH200": 989.4e12, "H20": 148e12, "B200": 2250e12, "V100": 125e12, "V100 PCIE": 112e12,
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
    """metrics.jsonl, console and TensorBoard on rank 0; on every other rank each call does nothing.

    resumed: the step that the run goes on from; records of later ones are taken out first, and those of its own validation if
    it `evaluates` that again. hparams: for TensorBoard, see board.py.
    `lost` says what is gone with them: updates, and seconds of training, validations and checkpoints. Making one is collective; it
    raises UserError, on every rank, if the files cannot be read and written.
    """

    def __init__(
        self, run_dir: Path, enabled: bool, every: int, total_steps: int, tensorboard: bool, resumed: int,
        hparams: dict[str, bool | float | str] | None = None, evaluates: bool = False,
    ) -> None:  # fmt: skip
        self.enabled = enabled
        self.lost = (0, 0.0)
        self.every, self.total_steps, self.resumed = every, total_steps, resumed
        self.live = sys.stdout.isatty()
        self.pace: float | None = None  # seconds a step including everything, for the ETA
        self.last = (time.monotonic(), resumed)
        self.warned = False
        self.ours = lambda: status.is_home(run_dir)
        self.findings_path = run_dir / "findings.jsonl"
        self.findings_file: Appender | None = None  # made when there is something to say
        self.board: Board | None = None
        with distributed.together(), access(run_dir, "written"):
            if enabled:
                path = run_dir / "metrics.jsonl"
                self.lost = forget_after(path, resumed, evaluates)
                forget_after(self.findings_path, resumed, evaluates)
                self.file = Appender(path, key=_which, ours=self.ours)
        if enabled and tensorboard:
            with self._tensorboard():
                self.board = Board(run_dir / "tensorboard", resumed, hparams)

    def write(self, kind: str, **values: Any) -> None:
        """One record. Non-finite numbers become null. A step's points go to TensorBoard every `log.every` steps."""
        if not self.enabled:
            return
        clean = finite_or_null(values)
        self.file.write(json.dumps({"kind": kind, **clean, "time": round(time.time(), 3)}, allow_nan=False) + "\n")
        if (clean.get("mfu") or 0.0) > 1.0 and not self.warned:
            self.warned = True
            self.say(f"warning: mfu {values['mfu']:.2f} is above 1, which no device reaches; log.peak_flops is too low")
        if self.board and (kind != "step" or self.due(values.get("step", 0))):
            with self._tensorboard():
                self.board.record(kind, clean)

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """A disk that is full is no reason to end a run: then there are no more points, and one line says so."""
        try:
            yield
        except OSError as error:
            self.board = None
            self.say(f"warning: TensorBoard's file cannot be written ({error}); no more points until the next start")

    def text(self, tag: str, text: str, step: int | None = None) -> None:
        """Markdown, for TensorBoard only. step None: the one that the run goes on from."""
        if self.enabled and self.board:
            with self._tensorboard():
                self.board.text(tag, text, self.resumed if step is None else step)

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
                values |= {"best": improved, "best_val_loss": state.best_val_loss}
                best = (
                    "no best yet"
                    if state.best_val_loss is None
                    else f"best {state.best_val_loss:.4f} at step {state.best_step}"
                )
                told.append("best so far" if improved else best)
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

    def sample(self, step: int, prompt: str, text: str | None) -> None:
        """What the model wrote (samples.py); None: nothing was asked for."""
        if not self.enabled or text is None:
            return
        self.write("sample", step=step, prompt=prompt, text=text)
        # A bar stands where the prompt ends.
        self.text("samples", verbatim(f"{prompt}\0{text}").replace("\0", "**&#124;**"), step)
        before, wrote = " ".join(prompt.split())[-40:], " ".join(text.split())
        self.say(f"sample: step {step} | ...{before} | {wrote[:120]}{'...' if len(wrote) > 120 else ''}")

    def findings(self, findings: list[Finding]) -> None:
        if not (self.enabled and findings):
            return
        self.findings_file = self.findings_file or Appender(self.findings_path, patient=True, ours=self.ours)
        self.findings_file.write("".join(json.dumps(f.record()) + "\n" for f in findings))
        for finding in findings:
            self.say(f"watch: {finding}")
            self.text("findings", verbatim(str(finding)), finding.step)

    def say(self, line: str) -> None:
        if self.enabled:
            print(("\r\033[K" if self.live else "") + line, flush=True)

    def sync(self) -> None:
        """Before a checkpoint is published: its records must not be the part that a power failure takes."""
        if self.enabled:
            self.file.sync()
            if self.findings_file:
                self.findings_file.sync()

    def close(self) -> None:
        if self.enabled:
            self.file.close()
            if self.findings_file:
                self.findings_file.close()
            if self.board:
                with self._tensorboard():
                    self.board.close()


def _which(line: bytes) -> Hashable:
    """What makes a record this one, though somebody has edited it."""
    try:
        record = json.loads(line)
        return tuple(record.get(name) for name in ("kind", "step", "set", "time"))
    except (ValueError, AttributeError, RecursionError):
        return line


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
