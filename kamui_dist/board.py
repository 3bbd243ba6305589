"""TensorBoard: a view of the records, in event files that rank 0 writes. Nothing of the run depends on them.

    RUN/tensorboard/              one curve a field; texts; the charts of the Custom Scalars tab; the run's row in HParams
    RUN/tensorboard/by_tokens/    the losses over tokens seen, for runs whose batches differ: a run of its own for TensorBoard

TensorBoard has no axis but `step`. So the second directory counts in tokens, and has tags of its own, so that curves over steps
and curves over tokens never share a chart.

When a run goes back to an earlier step (a resume, a rollback), the new event files begin with a note to forget later points. Only a
server with `--load_fast=false` reads that note; another drops, tag by tag, what is not earlier than the next point that comes.
Either way no curve goes back.
"""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from kamui_dist import hparams

_RUN = {
    "world_size": "perf/world_size", "global_batch": "data/global_batch", "restarts": "perf/restarts", "samples": "data/samples",
    "lost_steps": "perf/lost_steps", "lost_seconds": "perf/lost_seconds",
}  # fmt: skip
# By kind of record and field. A number that is not here gets a tag too, see `points`.
TAGS: dict[str, dict[str, str]] = {
    "step": {
        "loss": "train/loss", "loss_average": "train/loss_average", "spike": "train/spike", "lr": "train/lr",
        "grad_norm_pre_clip": "train/grad_norm_pre_clip", "grad_norm_post_clip": "train/grad_norm_post_clip",
        "skipped": "train/skipped", "tokens": "train/tokens", "epoch": "train/epoch", "loss_scale": "train/loss_scale",
        "targets": "train/targets",
        "tokens_per_sec": "perf/tokens_per_sec", "mfu": "perf/mfu", "step_seconds": "perf/step_seconds",
        "data_seconds": "perf/data_seconds", "compute_seconds": "perf/compute_seconds", "meet_seconds": "perf/meet_seconds",
        "update_seconds": "perf/update_seconds", "own_seconds": "perf/own_seconds",
        "median_own_seconds": "perf/median_own_seconds", "slowest_rank": "perf/slowest_rank",
        "peak_memory_gib": "memory/peak_gib", "memory_gib": "memory/now_gib",
    },
    "eval": {
        "val_loss": "val/loss", "val_perplexity": "val/perplexity", "val_bits_per_byte": "val/bits_per_byte",
        "best_val_loss": "val/best_loss", "best": "val/is_best", "eval_seconds": "perf/eval_seconds",
    },
    "checkpoint": {
        "save_seconds": "perf/save_seconds", "stall_seconds": "perf/save_stall_seconds",
        "write_seconds": "perf/save_write_seconds", "check_seconds": "perf/save_check_seconds",
        "mb_per_second": "perf/save_mb_per_second", "bytes": "perf/save_bytes", "aside": "perf/save_aside",
    },
    "detail": {"noise_scale": "train/noise_scale", "noise_scale_tokens": "train/noise_scale_tokens"},
    "start": _RUN,
    "resume": _RUN,
}  # fmt: skip
_NOT_CURVES = {"step", "set", "time"}
_OVER_TOKENS = re.compile(r"train/loss|train/loss_average|val(_[^/]+)?/loss")

# The Custom Scalars tab: category -> chart -> patterns of the tags in it.
CHARTS: dict[str, dict[str, list[str]]] = {
    "training": {
        "loss": ["^train/loss$", "^train/loss_average$", "^val(_[^/]+)?/loss$"],
        "learning rate": ["^train/lr$"],
        "gradient norm": ["^train/grad_norm_pre_clip$", "^train/grad_norm_post_clip$"],
    },
    "speed": {
        "throughput": ["^perf/tokens_per_sec$"],
        "step time": [f"^perf/{name}_seconds$" for name in ("step", "compute", "meet", "update", "data", "own", "median_own")],
        "memory": ["^memory/"],
    },
    "layers": {
        "update ratio by layer": ["^layers_update_ratio/"],
        "gradient norm by layer": ["^layers_grad_norm/"],
        "activation rms by layer": ["^layers_activation_rms/"],
        "largest attention logit by layer": ["^layers_attention_logit_max/"],
    },
}  # fmt: skip


def points(kind: str, record: dict[str, Any]) -> dict[str, float]:
    """Tag -> value of every number in a record; null is no point. A field without a tag of its own is perf/<field> if it is a time,
    else <group>/<field>, the group being that of its kind. The first validation set (the one that says what is best) is val/...,
    another one val_<name>/..."""
    group = {"step": "train", "eval": "val", "start": "perf", "resume": "perf"}.get(kind, kind)
    tags = TAGS.get(kind, {})
    # Every kind tells the tokens of its step, which the step's own record has shown.
    unseen = _NOT_CURVES if kind == "step" else _NOT_CURVES | {"tokens"}
    found = {
        tags.get(name, f"{'perf' if name.endswith('_seconds') else group}/{name}"): float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in unseen
    }
    for name, source in (record.get("sources") or {}).items():
        found |= {f"data/{what}_{name}": float(v) for what, v in source.items() if v is not None}
    for name, layer in (record.get("layers") or {}).items():
        found |= {f"layers_{what}/{name}": float(v) for what, v in layer.items() if v is not None and what != "trains"}
    if kind == "eval" and "best" not in record:
        other = f"val_{record['set']}/"
        found = {tag.replace("val/", other, 1): v for tag, v in found.items() if tag.startswith("val/")}
    return found


def verbatim(text: str) -> str:
    """Markdown that shows `text` as it is: whatever could be markup becomes a character reference, line breaks stay."""
    text = re.sub(r"[\\`*_\[\]<>&#|~]", lambda m: f"&#{ord(m[0])};", text)
    text = re.sub(r"(?m)^([ \t]*\d*)([-+=.:)])", lambda m: f"{m[1]}&#{ord(m[2])};", text)  # lists, headings
    text = re.sub(r"(?m)^[ \t]+", lambda m: "&nbsp;" * len(m[0].expandtabs(4)), text)  # code
    return text.replace("\n", "  \n")


class EventFile:
    """One file of events, each on its way to the disk when the call returns. Raises OSError if the disk does not take it.

    Not torch's SummaryWriter: the server reads the files of a directory in the order of their names, and names made of seconds and
    process ids come out of order when a rollback starts again within a second, or a restart is on a node whose clock is behind.
    Nor are a thread and up to 120 seconds of unwritten events between a crash and its last points.
    """

    def __init__(self, directory: Path, suffix: str = "") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        # Others (a copy, .bak) are not ours.
        named = [re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name, re.ASCII) for path in directory.iterdir()]
        stamp = max([int(time.time()), *(int(name[1]) + 1 for name in named if name)])
        path = directory / f"events.out.tfevents.{stamp:010d}.{platform.node()}.{os.getpid()}{suffix}"
        self._records = RecordWriter(path.open("wb"))
        self.add(0, file_version="brain.Event:2")

    def add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **what).SerializeToString())
        self._records.flush()

    def forget_from(self, step: int) -> None:
        """Points of earlier files that have this step or a later one are not shown."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.add(step, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        self._records.close()


class Board:
    """The event files of one run directory, from step `resumed` on.

    settings: see hparams.py; None leaves the run out of the HParams tab. Every method raises OSError if the disk does not take it.
    """

    def __init__(self, directory: Path, resumed: int, settings: dict[str, bool | float | str] | None) -> None:
        self.directory, self._ended = directory, ""
        for old in directory.glob("*.about"):
            old.unlink()  # the server believes the first that it reads
        self._describe(_layout(), *([] if settings is None else hparams.session_start(settings)))
        self._steps = EventFile(directory)
        self._steps.forget_from(resumed + 1)
        self._tokens: EventFile | None = None  # from the first record on, which says how many were seen at that step

    def record(self, kind: str, record: dict[str, Any]) -> None:
        """Its numbers become points, all of them in one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        def add(file: EventFile, values: dict[str, float], step: int) -> None:
            if values:
                value = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
                file.add(step, summary=Summary(value=value))

        found = points(kind, record)
        add(self._steps, found, record.get("step", 0))
        if kind in ("start", "resume"):
            self._tokens = EventFile(self.directory / "by_tokens")
            self._tokens.forget_from(record["tokens"] + 1)
        if self._tokens is not None and "tokens" in record:
            over = {f"by_tokens/{tag.replace('/', '_')}": v for tag, v in found.items() if _OVER_TOKENS.fullmatch(tag)}
            add(self._tokens, over, record["tokens"])
        if kind == "end":
            self._ended = record["outcome"]

    def text(self, tag: str, text: str, step: int) -> None:
        """text: Markdown."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._steps.add(step, summary=text_pb(tag, text))

    def close(self) -> None:
        self._steps.close()
        if self._tokens is not None:
            self._tokens.close()
        status = {"finished": "STATUS_SUCCESS", "early_stopped": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
        if self._ended in status:
            self._describe(hparams.session_end(status[self._ended]))

    def _describe(self, *summaries: Any) -> None:
        """What is about the run and not about a step: in small files of their own, which the next start replaces."""
        file = EventFile(self.directory, ".about")
        for summary in summaries:
            file.add(0, summary=summary)
        file.close()


def _layout() -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    def chart(title: str, tags: list[str]) -> Any:
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))

    categories = [
        layout_pb2.Category(title=category, chart=[chart(title, tags) for title, tags in charts.items()])
        for category, charts in CHARTS.items()
    ]
    text = layout_pb2.Layout(category=categories).SerializeToString()
    value = Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG, tensor=make_tensor_proto(text, dtype=np.object_),
        metadata=metadata.create_summary_metadata(),
    )  # fmt: skip
    return Summary(value=[value])
