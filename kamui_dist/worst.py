"""Which sequences of a step have the highest loss, and the incident of a finding, which all ranks write together.

    path = worst.write_incident(run_dir, finding, state, module, micro_batches, positions, train_data, cfg, device)

The losses are those of a forward pass now, without gradients and without dropout, and so with the weights of now: those of the
step itself where its update was left out (non-finite, stop, rollback, skip). A model whose forward knows `per_sequence` does one
pass a micro-batch, any other one pass a sequence.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kamui_dist import distributed, evidence, health, incident, parallel, precision, tokenizer
from kamui_dist.batches import IGNORE, Batch, Gaps, positions_of, rank_positions
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.evidence import Section
from kamui_dist.findings import Finding
from kamui_dist.mixture import TrainingData
from kamui_dist.plan import Plan
from kamui_dist.state import State

SHOWN = 8  # sequences whose text is told


@dataclass(frozen=True)
class Sequence:
    """One of the global batch, and its loss."""

    rank: int
    micro_batch: int
    row: int
    position: int  # in the data order; negative: padding
    loss: float  # nats a target; NaN where there is no target
    targets: int
    finite: bool  # the sum over its targets, also where there is none

    @property
    def badness(self) -> tuple[bool, float]:
        """To sort by: what is not finite is worst."""
        return not self.finite, self.loss if math.isfinite(self.loss) else -math.inf


def step_positions(cfg: Config, plan: Plan, first_sample: int, gaps: Gaps = ()) -> np.ndarray:
    """Where in the data order this rank's sequences of a step lie: int64 (A, B); -1: padding. first_sample: samples that the run
    had seen before the step. gaps: as of batches.positions_of."""
    first = 0 if cfg.train.overfit_one_batch else first_sample
    rank, ranks = distributed.rank(), distributed.world_size()
    samples = rank_positions(first, cfg.train.micro_batch, plan.grad_accum_steps, rank, ranks)
    limit = samples.max() + 1 if plan.total_samples is None else plan.total_samples
    return np.where(samples < limit, positions_of(samples, gaps), -1)


@torch.no_grad()
def sequence_losses(
    module: nn.Module, micro_batches: list[Batch], device: torch.device, compute: str
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each sequence of this rank's micro-batches, summed over its targets, float64 (A, B), and the number of its
    targets, int64 (A, B). Every rank takes part (FSDP). Leaves weights, buffers' updates and the model's mode as they were."""
    whole = "per_sequence" in inspect.signature(module.forward).parameters
    sums = []
    with parallel.evaluating(module):
        for x, y, *documents in micro_batches:
            with precision.autocast(device, compute):
                if whole:
                    losses = module(x, y, *documents, per_sequence=True)  # (B,)
                else:
                    rows = [[t[i : i + 1] for t in (x, y, *documents)] for i in range(len(x))]
                    losses = torch.stack([module(*row) for row in rows])
            sums.append(losses.double())
    targets = torch.stack([(y != IGNORE).sum(1) for _, y, *_ in micro_batches])  # (A, B)
    return torch.stack(sums).cpu().numpy(), targets.cpu().numpy()


class Incidents:
    """What an incident of the loop needs, but for the step."""

    def __init__(
        self, run_dir: Path, cfg: Config, plan: Plan, module: nn.Module, data: TrainingData, device: torch.device
    ) -> None:
        self.run_dir, self.cfg, self.plan = run_dir, cfg, plan
        self.module, self.data, self.device = module, data, device
        self.last: Path | None = None  # that was written, on rank 0

    def write(
        self, findings: Iterable[Finding], skipped_in_a_row: int, loss: float, state: State, micro_batches: list[Batch],
        first_sample: int, gaps: Gaps,
    ) -> None:  # fmt: skip
        """Collective: writes an incident if one of the findings is worth it. first_sample: of the step."""
        # fp16 looks for its scale by gradients that overflow, of losses that do not.
        scaling = self.cfg.run.precision == "fp16" and math.isfinite(loss)
        if (finding := incident.worth(findings, skipped_in_a_row == 1 and not scaling)) is None:
            return
        positions = step_positions(self.cfg, self.plan, first_sample, gaps)
        path = write_incident(
            self.run_dir, finding, state, self.module, micro_batches, positions, self.data, self.cfg, self.device
        )
        self.last = path or self.last


def write_incident(
    run_dir: Path, finding: Finding, state: State, module: nn.Module, micro_batches: list[Batch], positions: np.ndarray,
    data: TrainingData, cfg: Config, device: torch.device,
) -> Path | None:  # fmt: skip
    """Collective: all ranks, with the same finding. micro_batches and positions (A, B): this rank's of the step, see
    step_positions. Returns the directory on rank 0, None if it could not be written, and on the other ranks."""
    sums, targets = sequence_losses(module, micro_batches, device, cfg.run.precision)
    broken = health.non_finite(parallel.local_weights(module))[:SHOWN]
    told = distributed.gather_objects((positions, sums, targets, broken))
    sequences = [sequence for rank, (p, s, t, _) in enumerate(told) for sequence in _sequences(rank, p, s, t)]
    worst = sorted(sequences, key=lambda s: s.badness, reverse=True)[:SHOWN]
    # The tokens as the model has seen them, and not as the files have them: only their ranks know these.
    mine = [s for s in worst if s.rank == distributed.rank()]
    tokens = {(s.rank, s.micro_batch, s.row): micro_batches[s.micro_batch][0][s.row].tolist() for s in mine}
    seen = {place: row for part in distributed.gather_objects(tokens) for place, row in part.items()}
    if not distributed.is_main():
        return None
    names = {rank: names for rank, (*_, names) in enumerate(told) if names}

    def write() -> Path | None:
        places = _Places(data, cfg)
        _, files = evidence.collect(run_dir)
        sections: list[Section] = [
            ("the sequences of the step", _verdict(sequences, names)),
            ("with the highest loss (all: windows.json, text: worst.txt)", [places.line(s) for s in worst]),
            ("the run", [f"samples {state.samples:,}, tokens {state.tokens:,}"]),
        ]
        files |= {"report.txt": evidence.report(run_dir, finding, sections), "windows.json": places.windows(sequences)}
        files["worst.txt"] = "\n".join(places.text(s, seen[s.rank, s.micro_batch, s.row]) for s in worst)
        return incident.publish(run_dir, finding, files)

    return incident.patiently(write)  # the run may go on after it


def _sequences(rank: int, positions: np.ndarray, sums: np.ndarray, targets: np.ndarray) -> list[Sequence]:
    out = []
    for (m, row), position in np.ndenumerate(positions):
        total, count = float(sums[m, row]), int(targets[m, row])
        loss = total / count if count else math.nan
        out.append(Sequence(rank, m, row, int(position), loss, count, math.isfinite(total)))
    return out


def _verdict(sequences: list[Sequence], broken: dict[int, list[str]]) -> list[str]:
    """In words: is it the data, the weights, or neither?"""
    counted = [s for s in sequences if s.targets or not s.finite]
    bad = [s for s in counted if not s.finite]
    lines = [f"weights that are not finite on rank {rank}: {', '.join(names)}" for rank, names in broken.items()]
    if not counted:
        return [*lines, "none has a target"]
    if len(bad) == len(counted):
        return [*lines, f"all {len(bad)} are not finite: it is the weights, or the model, and not some of the data"]
    if bad:
        return [*lines, f"{len(bad)} of {len(counted)} are not finite: look at these, the others are fine"]
    losses = [s.loss for s in counted]
    spread = f"mean {np.mean(losses):.4g}, median {np.median(losses):.4g}, highest {max(losses):.4g} nats a target"
    return [*lines, f"all {len(counted)} are finite now: {spread}"]


class _Places:
    """Says where sequences come from. Rank 0."""

    def __init__(self, data: TrainingData, cfg: Config) -> None:
        self.data, self.cfg, self.T = data, cfg, cfg.model.context_length

    def _window(self, position: int) -> tuple[int, int]:
        """(source, window)."""
        sources, windows = self.data.place(np.array([position], dtype=np.int64), self.cfg.run.seed)
        return int(sources[0]), int(windows[0])

    def line(self, s: Sequence) -> str:
        at = f"rank {s.rank}, micro-batch {s.micro_batch}, row {s.row}: "
        if s.position < 0:
            return f"{at}padding"
        source, window = self._window(s.position)
        path, byte = self.data.streams[source].locate(window * self.T)
        name = self.data.names[source]
        return f"{at}loss {s.loss:.4g}, {s.targets} targets, window {window} of {name} (position {s.position}; {path} byte {byte})"

    def windows(self, sequences: list[Sequence]) -> str:
        """[{"rank", "micro_batch", "sequences": [{"position", "source", "window", "targets", "loss", "non_finite"}]}], a row of the
        micro-batch each: loss null and "nan" or "inf" in non_finite where it is not a number, {} for padding."""
        positions = np.array([max(s.position, 0) for s in sequences], dtype=np.int64)
        sources, windows = self.data.place(positions, self.cfg.run.seed)
        grouped: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for s, source, window in zip(sequences, sources.tolist(), windows.tolist(), strict=True):
            row: dict[str, Any] = {"position": s.position, "source": self.data.names[source], "window": window}
            row |= {"targets": s.targets, "loss": s.loss if math.isfinite(s.loss) else None}
            if not s.finite:
                row["non_finite"] = str(s.loss)
            grouped.setdefault((s.rank, s.micro_batch), []).append(row if s.position >= 0 else {})
        return "[\n" + ",\n".join(
            json.dumps({"rank": rank, "micro_batch": m, "sequences": rows}) for (rank, m), rows in grouped.items()
        ) + "\n]\n"  # fmt: skip

    def text(self, s: Sequence, tokens: list[int]) -> str:
        """tokens: the inputs (T,), as the model has seen them."""
        note = ""
        if s.position >= 0:
            source, window = self._window(s.position)
            try:
                there = self.data.streams[source].read(np.array([window]), self.T)[0, :-1].tolist()
                note = "" if there == tokens else "NOT what the file holds at this place now\n"
            except UserError as error:
                note = f"{error}\n"
        return f"==== {self.line(s)}\n{note}{self._decode(tokens)}\n"

    def _decode(self, tokens: list[int]) -> str:
        """The text, with control characters made visible; the ids where there is no tokenizer."""
        try:
            if self.data.tokenizer is not None:
                text = tokenizer.load(self.data.tokenizer).decode(tokens)
                return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
        except UserError as error:
            return f"{error}\ntoken ids: {' '.join(map(str, tokens))}"
        return f"token ids: {' '.join(map(str, tokens))}"
