"""What the HParams tab of TensorBoard shows of a run: its settings, its results, how it ended.

One row a run, to compare the runs below one --logdir. Settings are told at the start, and results are the last values of ordinary
curves, so a run that crashes keeps its row.
"""

from __future__ import annotations

import time
from typing import Any

from kamui_dist.config import Config
from kamui_dist.plan import Plan

# Of these curves, the last value.
RESULTS = {
    "train/loss_average": "training loss (average)", "val/best_loss": "best validation loss",
    "val/loss": "last validation loss", "train/tokens": "tokens", "perf/tokens_per_sec": "tokens a second",
}  # fmt: skip
# The tab begins with five columns of settings, those marked as different between runs before the others: these are what is mostly
# searched over.
FIRST = {"optim.lr", "optim.weight_decay", "run.seed", "schedule.warmup", "train.global_batch"}


def settings(cfg: Config, plan: Plan) -> dict[str, bool | float | str]:
    """What is told of a run to compare it with others: a fixed choice, since no run knows in what it differs from the next."""
    m, schedule = cfg.model, cfg.schedule
    return {
        **{f"optim.{name}": value for name, value in cfg.optim.model_dump().items()},
        "schedule.kind": schedule.kind, "schedule.warmup": plan.warmup_steps, "schedule.min_lr": schedule.min_lr,
        "schedule.decay": plan.decay_steps, "schedule.decay_shape": schedule.decay_shape if schedule.kind == "wsd" else "",
        "train.global_batch": plan.global_batch, "train.micro_batch": cfg.train.micro_batch, "train.steps": plan.steps,
        "train.tokens": plan.tokens,
        "model.n_layers": m.n_layers, "model.n_heads": m.n_heads, "model.n_kv_heads": m.kv_heads, "model.d_model": m.d_model,
        "model.d_ff": m.ff, "model.context_length": m.context_length, "model.vocab_size": m.vocab_size or 0,
        "model.dropout": m.dropout, "model.norm": m.norm, "model.position": m.position, "model.mlp": m.mlp,
        "model.tie_embeddings": m.tie_embeddings, "model.qk_norm": m.qk_norm, "model.factory": m.factory or "",
        "run.seed": cfg.run.seed, "run.precision": cfg.run.precision, "world_size": plan.world_size, "strategy": plan.strategy,
    }  # fmt: skip


def session_start(values: dict[str, bool | float | str]) -> list[Any]:
    """Not by SummaryWriter.add_hparams, which makes a run of its own beside the one that has the curves, and at its end only."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    types = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    infos = []
    for name, value in values.items():
        kind = types.get(type(value), "DATA_TYPE_FLOAT64")
        infos.append(api_pb2.HParamInfo(name=name, type=api_pb2.DataType.Value(kind), differs=name in FIRST))
        field = {"DATA_TYPE_BOOL": "bool_value", "DATA_TYPE_STRING": "string_value"}.get(kind, "number_value")
        setattr(start.hparams[name], field, value)
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=name) for tag, name in RESULTS.items()]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics)
    return [
        _about_session("EXPERIMENT_TAG", experiment=experiment),
        _about_session("SESSION_START_INFO_TAG", session_start_info=start),
    ]


def session_end(status: str) -> Any:
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value(status), end_time_secs=time.time())
    return _about_session("SESSION_END_INFO_TAG", session_end_info=end)


def _about_session(tag: str, **content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    value = Summary.Value(
        tag=getattr(metadata, tag), metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    return Summary(value=[value])
