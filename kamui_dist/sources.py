"""What a config's [data] and [eval] name, opened and checked against each other and the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from kamui_dist import distributed
from kamui_dist.batches import Gaps
from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.foreign import open_stream
from kamui_dist.mixture import TrainingData
from kamui_dist.stream import TokenStream


def open_datasets(cfg: Config) -> tuple[TrainingData, dict[str, TokenStream]]:
    """Training data, and validation sets by name (data.val_path is "val", and the first); none of these is no validation.
    Sets model.vocab_size if it is unset.

    Raises UserError naming the key and the absolute path.
    """
    data, length = cfg.data, cfg.model.context_length
    if data.sources:
        train = {s.label: open_stream(s.path, f"data.sources ({s.label})", s.dtype, s.separator) for s in data.sources}
        weights = [s.weight for s in data.sources]
    elif data.path is not None:
        train, weights = {"data": open_stream(data.path, "data.path", data.dtype, data.separator)}, [1.0]
    else:
        raise UserError(
            "data.path is unset; prepare text with `kamui-dist prepare` and set data.path to its train directory"
        )
    val: dict[str, TokenStream] = {}
    if data.val_path is not None:
        val["val"] = open_stream(data.val_path, "data.val_path", data.dtype, data.separator)
    for s in cfg.eval.sets:
        val[s.name] = open_stream(s.path, f"eval.sets ({s.name})", s.dtype, s.separator)
    streams = [*train.values(), *val.values()]
    _check_tokenizers(streams)
    _set_vocabulary(cfg, streams)
    for stream in streams:
        stream.windows(length)  # raises if there is none
        if data.document_mask:
            stream.check_documents()
    return TrainingData(list(train.values()), list(train), weights, length), val


def same_everywhere(train: TrainingData, val: dict[str, TokenStream]) -> None:
    """Raises UserError on all ranks if one reads other data than rank 0, as from a copy of its node that is not the same.
    Collective."""
    mine = {}
    with distributed.together():
        mine = {"training data": (train.fingerprint + train.digest, str(train.streams[0].path))} | {
            f"validation set {name}": (stream.content(train.context_length), str(stream.path))
            for name, stream in val.items()
        }
    first, *others = distributed.gather_objects(mine)
    faults = [
        f"{what} of rank {rank} ({theirs[what][1]}) is not that of rank 0: bring the same files to all nodes"
        for rank, theirs in enumerate(others, 1)
        for what in first
        if theirs[what][0] != first[what][0]
    ]
    distributed.raise_together(UserError("\n".join(faults[:4])) if faults else None)


def _check_tokenizers(streams: list[TokenStream]) -> None:
    """All that know their tokenizer must have the same one."""
    known = [s for s in streams if s.tokenizer_fingerprint is not None]
    for other in known[1:]:
        first = known[0]
        if (other.vocab_size, other.tokenizer_fingerprint) != (first.vocab_size, first.tokenizer_fingerprint):
            raise UserError(
                f"{other.name} has another tokenizer than {first.name}: {other.tokenizer_name} with {other.vocab_size} ids "
                f"against {first.tokenizer_name} with {first.vocab_size}; prepare both together"
            )


def _set_vocabulary(cfg: Config, streams: list[TokenStream]) -> None:
    known = next((s for s in streams if s.vocab_size is not None), None)
    if known is None or known.vocab_size is None:
        if cfg.model.vocab_size is None:
            raise UserError(
                f"model.vocab_size is unset, and {streams[0].name}: {streams[0].path} ({streams[0].format}) does not say how"
                " many ids its tokenizer has; set it (GPT-2: 50257)"
            )
    elif cfg.model.vocab_size is None:
        cfg.model.vocab_size = known.vocab_size
    elif cfg.model.vocab_size < known.vocab_size:
        raise UserError(
            f"model.vocab_size ({cfg.model.vocab_size}) is smaller than the vocabulary of {known.name} ({known.vocab_size}); "
            "raise it or leave it unset"
        )


def _knows(model: nn.Module, argument: str) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == argument or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_model(cfg: Config, model: nn.Module) -> None:
    """Raises UserError if the model cannot be told where documents begin, and that is asked for."""
    if cfg.data.document_mask and not _knows(model, "documents"):
        raise UserError(
            f"data.document_mask needs a model with forward(inputs, targets, documents); model.factory = "
            f"{cfg.model.factory!r} returned {type(model).__name__}, which has no such argument"
        )


class BySource:
    """The loss of a step by source: sums and numbers of targets on the device. Nothing, and free, with a single source,
    or with a model that does not know `per_sequence`.
    """

    def __init__(self, data: TrainingData, model: nn.Module, device: torch.device) -> None:
        self.data = data
        self.losses = data.mixed and _knows(model, "per_sequence")
        self.arguments = {"per_sequence": True} if self.losses else {}  # of the model's forward
        size = 2 * len(data.names) if self.losses else 0
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)  # loss of each source, then targets of each

    def add(self, loss: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor | None, micro_batch: int) -> None:
        """loss: (B,), summed over each sequence. targets: (B, T). sources: (A, B), of the step; micro-batch 0 begins it."""
        if self.losses and sources is not None:
            if micro_batch == 0:
                self._sums.zero_()
            row, n = sources[micro_batch], len(self.data.names)
            self._sums.index_add_(0, row, loss.double())
            self._sums.index_add_(0, row + n, (targets != -100).sum(1).double())

    def sums(self) -> list[torch.Tensor]:
        """For the packed reduction, as its last values: 0-dim each."""
        return list(self._sums.unbind())

    def record(self, rows: list[list[float]], samples: int, gaps: Gaps) -> dict[str, Any]:
        """For the record of a step: tokens of each source so far, and its mean loss over the global batch (None: no
        target). rows: every rank's, of which the last values are `sums`. samples: windows seen so far. gaps: what was left
        out of the order.
        """
        if not self.data.mixed:
            return {}
        names, length = self.data.names, self.data.context_length
        sources: dict[str, Any] = {name: {"tokens": n * length} for name, n in self.data.seen(samples, gaps).items()}
        if self.losses:
            totals = [sum(column) for column in zip(*(row[-2 * len(names) :] for row in rows), strict=True)]
            for name, loss, targets in zip(names, totals[: len(names)], totals[len(names) :], strict=True):
                finite = targets > 0 and abs(loss) < float("inf")  # false for NaN too
                sources[name]["loss"] = loss / targets if finite else None
        return {"sources": sources}
