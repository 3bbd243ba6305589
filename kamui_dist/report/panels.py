"""Which figures a run has, and what is drawn in each: from records to charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kamui_dist.report import ledger
from kamui_dist.report.drawn import Drawn
from kamui_dist.report.figures import Chart, Figure, Line
from kamui_dist.report.logs import ATTEMPTS
from kamui_dist.report.series import as_float, binned, column, moving_average

BINS = 160  # of what is stacked
WIDE, NARROW = 860, 640  # pixels
_STEP_TIME = [
    ("waiting for data", 1), ("compute", 0), ("waiting for ranks", 4), ("update", 5), ("validation", 2), ("checkpoint", 3),
    ("other", 7),
]  # fmt: skip
_LAYERS = [
    ("update_ratio", "update / weight", "norms, by layer", None),
    ("activation_rms", "activation rms", "of the blocks' outputs", None),
    ("grad_norm", "gradient norm by layer", "before clipping", None),
    ("attention_logit_max", "largest attention logit", "by layer", False),
]


def one(drawn: Drawn) -> list[Figure]:
    """The figures of one run, the main one first. What its log does not have is not there."""
    figures = [main(drawn)]
    for name, charts in [
        ("lr", _lr(drawn)), ("throughput", _throughput(drawn)), ("mfu", _mfu(drawn)), ("time", _step_time(drawn)),
        ("memory", _memory(drawn)), ("ranks", _ranks(drawn)), ("sources", _sources(drawn)), ("scale", _loss_scale(drawn)),
        ("noise", _noise(drawn)), *_layers(drawn),
    ]:  # fmt: skip
        if charts and charts[0].lines:
            figures.append(Figure(name, charts, drawn.x_title, width=NARROW))
    return figures


def main(drawn: Drawn) -> Figure:
    """Loss and gradient norm with the findings marked, and a panel for what else these are about."""
    steps = drawn.run.of("step")
    loss = drawn.smoothed("loss", "training", 0)
    sets = sorted({str(r.get("set", "val")) for r in drawn.run.of("eval")})
    for k, name in enumerate(sets):
        evals = [r for r in drawn.run.of("eval") if str(r.get("set", "val")) == name]
        x, y = drawn.place(column(evals, "step")), column(evals, "val_loss")
        if np.isfinite(y).any():
            label = "validation" if len(sets) == 1 else f"validation: {name}"
            loss += [Line(label, x, y, 1 + k % 6), Line("", x, y, 1 + k % 6, "dots")]
    spikes = [r for r in steps if r.get("spike")]
    if spikes:
        loss.append(Line("spike", drawn.place(column(spikes, "step")), column(spikes, "loss"), "bad", "dots"))
    skipped = [r for r in steps if r.get("skipped") or r.get("loss") is None]
    if skipped:
        x = drawn.place(column(skipped, "step"))
        loss.append(Line("not finite", x, np.full(len(x), np.nan), "bad", "rug"))
    norm = drawn.line("step", "grad_norm_post_clip", "after clipping", 5)  # the lower one: seen where they differ
    norm += drawn.smoothed("grad_norm_pre_clip", "before clipping", 3)
    if norm and drawn.clip:
        ends = norm[0].x[[0, -1]]
        norm.append(Line("optim.grad_clip", ends, np.full(2, drawn.clip), "muted", "dash"))
    charts = [Chart("loss", "nats a token", loss)] + ([Chart("gradient norm", "", norm)] if norm else [])
    charts += _of_findings(drawn)
    return Figure("main", charts, drawn.x_title, drawn.marks(), WIDE, 220 if len(charts) > 1 else 300)


def _of_findings(drawn: Drawn) -> list[Chart]:
    """What findings on time and memory speak of, which neither the loss nor the norm shows."""
    shown_by = {
        "data-starvation": _step_time, "slow-rank": _ranks, "throughput-drop": _throughput, "memory-growth": _memory,
    }  # fmt: skip
    found = {row.finding.kind for row in drawn.rows}
    return [chart for kind, charts in shown_by.items() if kind in found for chart in charts(drawn) if chart.lines]


def _lr(drawn: Drawn) -> list[Chart]:
    return [Chart("learning rate", "", drawn.line("step", "lr", ""), log=False, zero=True)]


def _throughput(drawn: Drawn) -> list[Chart]:
    return [Chart("throughput", "tokens / s", drawn.smoothed("tokens_per_sec", "step", 0), log=False, zero=True)]


def _mfu(drawn: Drawn) -> list[Chart]:
    return [
        Chart(
            "model FLOPs utilisation",
            "share of peak",
            drawn.smoothed("mfu", "step", 2),
            log=False,
            zero=True,
        )
    ]


def _memory(drawn: Drawn) -> list[Chart]:
    lines = drawn.line("step", "memory_gib", "now", 0) + drawn.line("step", "peak_memory_gib", "peak", 3, "dash")
    return [Chart("memory", "GiB, most of any rank", lines, log=False)]


def _ranks(drawn: Drawn) -> list[Chart]:
    lines = drawn.line("step", "own_seconds", "slowest rank", 1) + drawn.line("step", "median_own_seconds", "median", 0)
    several = any((r.get("world_size") or 1) > 1 for r in drawn.run.records if r["kind"] in ATTEMPTS)
    return [Chart("own time of ranks", "seconds a step", lines if several else [], zero=True)]


def _loss_scale(drawn: Drawn) -> list[Chart]:
    return [Chart("loss scale", "fp16", drawn.line("step", "loss_scale", "", 4), log=True)]


def _noise(drawn: Drawn) -> list[Chart]:
    lines = drawn.line("detail", "noise_scale_tokens", "noise scale", 6)
    batch = [r for r in drawn.run.of("step") if r.get("targets")]
    if lines and batch:
        lines.append(
            Line("batch", drawn.place(column(batch, "step")), column(batch, "targets"), "muted", "dash"),
        )
    return [Chart("gradient noise scale", "tokens", lines, log=True)]


def _sources(drawn: Drawn) -> list[Chart]:
    names: dict[str, None] = {}
    steps = [r for r in drawn.run.of("step") if isinstance(r.get("sources"), dict)]
    for r in steps:
        names |= dict.fromkeys(r["sources"])
    lines = []
    for k, name in enumerate(names):
        values = [r["sources"].get(name) for r in steps]
        y = np.array([_inner(v, "loss") for v in values])
        if np.isfinite(y).any():
            x = drawn.place(column(steps, "step"))
            lines.append(Line(name, x, moving_average(y, drawn.averaged(len(y))), k % 8))
    return [Chart("loss by source", "moving average", lines)]


def _inner(value: Any, name: str) -> float:
    return as_float(value.get(name) if isinstance(value, dict) else None)


def _layers(drawn: Drawn) -> list[tuple[str, list[Chart]]]:
    """A line a layer, coloured from the first to the last."""
    details = [r for r in drawn.run.of("detail") if isinstance(r.get("layers"), dict)]
    names = list(dict.fromkeys(name for r in details for name in r["layers"]))  # in the order of the model
    charts = []
    for field, title, unit, log in _LAYERS:
        values = {name: np.array([_inner(r["layers"].get(name), field) for r in details]) for name in names}
        values = {name: y for name, y in values.items() if np.isfinite(y).any()}
        listed = {0, len(values) // 2, len(values) - 1} if len(values) > 8 else range(len(values))
        x = drawn.place(column(details, "step"))
        lines = [
            Line(name, x, y, f"d{round(9 * k / max(1, len(values) - 1))}", listed=k in listed)
            for k, (name, y) in enumerate(values.items())
        ]
        charts.append((field.replace("_", "-"), [Chart(title, unit, lines, log=log)]))
    return charts


def _step_time(drawn: Drawn) -> list[Chart]:
    """Means over parts of the run; validations and checkpoints are spread over the steps of their part."""
    steps = drawn.run.of("step")
    if not any(r.get("step_seconds") for r in steps):
        return []
    told = any("compute_seconds" in r for r in steps)
    values = {name: np.zeros(len(steps)) for name, _ in _STEP_TIME}
    place = {r["step"]: k for k, r in enumerate(steps)}
    for k, r in enumerate(steps):
        parts = ledger.split(r)
        values["waiting for data"][k], values["waiting for ranks"][k] = parts["data"], parts["meet"]
        rest = parts.get("productive", 0.0) + parts.get("skipped", 0.0)
        compute = min(rest, r.get("compute_seconds") or 0.0) if told else rest
        update = min(rest - compute, r.get("update_seconds") or 0.0)
        values["compute"][k], values["update"][k], values["other"][k] = compute, update, rest - compute - update
    for kind, field, name in (("eval", "eval_seconds", "validation"), ("checkpoint", "stall_seconds", "checkpoint")):
        for r in drawn.run.of(kind):
            if r["step"] in place:
                values[name][place[r["step"]]] += r.get(field) or 0.0
    x, means = binned(drawn.place(column(steps, "step")), values, BINS)
    words = {} if told else {"compute": "rest of the step"}
    lines = [Line(words.get(name, name), x, means[name], colour) for name, colour in _STEP_TIME if means[name].any()]
    return [Chart("where a step's time goes", "seconds a step", lines, log=False, stacked=True)]


def several(drawn: Sequence[Drawn]) -> list[Figure]:
    """The figures of several runs, a colour a run."""
    kinds = [
        ("main", "loss", "nats a token, moving average", "step", "loss", None),
        ("validation", "validation loss", "nats a token", "eval", "val_loss", None),
        ("norm", "gradient norm before clipping", "", "step", "grad_norm_pre_clip", None),
        ("lr", "learning rate", "", "step", "lr", False),
        ("throughput", "throughput", "tokens / s", "step", "tokens_per_sec", False),
        ("mfu", "model FLOPs utilisation", "share of peak", "step", "mfu", False),
        ("time", "step time", "seconds", "step", "step_seconds", None),
        ("memory", "memory", "GiB, most of any rank", "step", "memory_gib", False),
    ]  # fmt: skip
    figures = []
    for name, title, unit, kind, field, log in kinds:
        lines: list[Line] = []
        for k, d in enumerate(drawn):
            if kind == "eval":
                lines += d.line(kind, field, d.run.name, k % 8) + d.line(kind, field, "", k % 8, "dots")
            elif field in ("lr", "memory_gib"):
                lines += d.line(kind, field, d.run.name, k % 8)
            else:
                lines += d.smoothed(field, "", k % 8, d.run.name)[-2 if len(drawn) < 4 else -1 :]
        if not lines:
            continue
        zero = name in ("throughput", "mfu", "lr", "time")
        marks = [m for d in drawn for m in d.marks() if m.label] if name == "main" else []
        wide = name == "main"
        figures.append(Figure(
            name, [Chart(title, unit, lines, log=log, zero=zero)], drawn[0].x_title, marks,
            WIDE if wide else NARROW, 360 if wide else 170,
        ))  # fmt: skip
    return figures
