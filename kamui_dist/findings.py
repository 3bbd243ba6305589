"""What the diagnosis says: a finding, and the kinds that there are. Imports no torch.

python -m kamui_dist.findings            the table of docs/diagnosis.md
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kamui_dist import knobs

ACTIONS = ("off", "note", "warn", "skip", "rollback", "stop")  # from the mildest to the gravest
GRAVE = ("skip", "rollback", "stop")  # those that do more than tell


@dataclass(frozen=True)
class Finding:
    kind: str
    step: int  # updates offered when it was found
    message: str  # with the numbers
    cause: str
    advice: str
    action: str  # one of ACTIONS, but not "off"
    since: int | None = None  # the step at which it began, if that was earlier

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if not (k == "since" and v is None)}

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.message} Likely: {self.cause} Do: {self.advice}"


@dataclass(frozen=True)
class Sign:
    """What a rule has seen. Cause and advice are those of KINDS unless the rule knows better."""

    message: str
    since: int | None = None
    cause: str = ""
    advice: str = ""
    at_most: str = ""  # of ACTIONS, for what is not sure enough for a graver one; "": whatever the knob says


@dataclass(frozen=True)
class Kind:
    symptom: str
    cause: str
    advice: str
    action: str = ""  # for those whose action no knob sets

    def default_action(self, name: str) -> str:
        return self.action or knobs.Watch.model_fields["on_" + name.replace("-", "_")].default


KINDS = {
    "not-learning": Kind(
        "the loss stays where it began, or at ln(vocabulary)",
        "no gradient reaches the weights (a detached loss, frozen parameters), or the learning rate is 0.",
        "look at optim.lr, at requires_grad, and for .detach() or no_grad() in the model; try train.overfit_one_batch=true.",
    ),
    "slow-learning": Kind(
        "the loss falls, but far too slowly",
        "a learning rate that is orders of magnitude too low (or an optim.eps too high), or a warmup that takes most of the run.",
        "raise optim.lr (3e-4 to 1e-3 suits most small models), or shorten schedule.warmup.",
    ),
    "bad-init": Kind(
        "the first loss is far above ln(vocabulary)",
        "initial weights that are too large: the model is sure of itself before it has learnt anything.",
        "lower model.init_std (0.02 is usual), above all for the embedding that is the output projection too.",
    ),
    "leak": Kind(
        "a loss far lower than text allows, or a first loss below ln(vocabulary)",
        "the model sees what it is to predict: targets that are not shifted, or a mask that is not causal.",
        "see that targets are the inputs shifted by one, and that attention is causal (is_causal=True).",
    ),
    "divergence": Kind(
        "the loss falls, then rises and stays up",
        "a learning rate too high for this model and batch.",
        "go back to a checkpoint from before (watch.on_divergence=rollback does it), lower optim.lr, or lengthen "
        "schedule.warmup.",
    ),
    "spike": Kind(
        "the loss, and with it the gradient norm, jumps for some steps",
        "a bad batch, or a learning rate at the edge of stability.",
        "see whether it returns within some steps; if it does not, or comes often, lower optim.lr or optim.beta2, lengthen "
        "schedule.warmup, or set watch.on_spike=skip.",
    ),
    "non-finite": Kind(
        "NaN or infinity in the loss or the gradient norm",
        "fp16 looking for its scale (harmless when rare), a learning rate too high, or a batch without a target.",
        "if it goes on, lower optim.lr or use run.precision=bf16; run.debug=true names the operation.",
    ),
    "large-norm": Kind(
        "the gradient norm before clipping is above 10 all the time",
        "initial weights or a loss that are too large, a sum where a mean belongs, or missing normalisation.",
        "lower model.init_std; see that the loss is a mean over targets, and that blocks begin with a norm.",
    ),
    "clipping": Kind(
        "nearly every update is clipped, long after the beginning",
        "optim.grad_clip below the usual norm: the length of the gradient no longer counts.",
        "nothing, if the loss falls well; else raise optim.grad_clip to about twice the usual norm, or lower optim.lr.",
    ),
    "plateau": Kind(
        "the loss has stopped falling while the learning rate is high",
        "a learning rate too high to settle or too low to move, a model too small, or parts of it without gradient.",
        "let the learning rate decay (schedule.kind=cosine or wsd), or change optim.lr; see that the model can do more.",
    ),
    "dead-layers": Kind(
        "layers that no gradient reaches, while others learn",
        "they are not part of the way to the loss: detached, overwritten, or multiplied by 0.",
        "see what becomes of their output in forward; if it is meant so, set requires_grad=False for them.",
    ),
    "overfitting": Kind(
        "the validation loss rises while the training loss falls",
        "too little data for this model and so many passes over it.",
        "stop at the best checkpoint (eval.patience does it), get more data, raise model.dropout or optim.weight_decay, or "
        "make the model smaller.",
    ),
    "data-starvation": Kind(
        "steps wait for data",
        "storage or the host's CPUs do not keep up with the device.",
        "put the data on a local disk, give the job more CPUs, or look at what else reads from this file system.",
    ),
    "slow-rank": Kind(
        "one rank is always slower than the others, which wait for it",
        "a device that is throttled or shared, a host with other work, or an uneven share of the work.",
        "look at this rank's device (clock, temperature, other processes), and leave its node out of the next job.",
    ),
    "throughput-drop": Kind(
        "fewer tokens per second than earlier in the run",
        "a device that is throttled, another job on the machine or the file system, or memory nearly full.",
        "look at the devices' clocks and temperatures, and at own_seconds and data_seconds in metrics.jsonl.",
    ),
    "memory-growth": Kind(
        "memory creeps up step by step",
        "something keeps tensors: a list of losses that were not detached, a cache that only grows.",
        "look for what outlives a step in your model; log.memory_history=true records who allocates.",
    ),
    "non-finite-weights": Kind(
        "NaN or infinity in the weights when a checkpoint is due",
        "an update that overflowed, or a defective device (then only some ranks have it).",
        "start the same command again: it goes on from the last good checkpoint; if it comes back, lower optim.lr.",
        "stop",
    ),
    "replica-divergence": Kind(
        "replicas that must be equal are not",
        "a defective device or its memory, a kernel that is not deterministic, or code that changes weights on some ranks.",
        "test the devices of the ranks that it names; the same command again goes on from the last checkpoint.",
        "stop",
    ),
    "hang": Kind(
        "a step in which a rank makes no progress for run.hang_minutes",
        "a rank that waits for what never comes: a dead peer, a network that stands, a collective that not all ranks call.",
        "look at stacks.txt of the incident; the same command again goes on from the last checkpoint.",
        "stop",
    ),
    "out-of-memory": Kind(
        "CUDA is out of memory",
        "a batch, a context or a model too large for the device, or something that grows.",
        "lower train.micro_batch (the batch stays what it is), use model.checkpointing, or raise parallel.shard.",
        "stop",
    ),
    "crash": Kind(
        "an exception ends the run",
        "see the traceback in the incident's stacks.txt.",
        "put right what it names; the same command again goes on from the last checkpoint.",
        "stop",
    ),
    "rollback": Kind(
        "the run went back to an earlier checkpoint and leaves out the data in between",
        "the finding that it names.",
        "look at the incident; if it comes again, lower optim.lr or watch.rollback_lr_factor.",
        "note",
    ),
    "disk-full": Kind(
        "a checkpoint cannot be written for want of room",
        "the file system is full, or a quota is used up.",
        "free what the message names; earlier checkpoints stay, the next try is at the next multiple of checkpoint.every.",
        "warn",
    ),
    "save-failed": Kind(
        "a checkpoint cannot be written",
        "the storage, not this program.",
        "see that the run directory can be written; training goes on, the next try is at the next multiple of "
        "checkpoint.every.",
        "warn",
    ),
}  # fmt: skip


def gravest(findings: Iterable[Finding]) -> str:
    """The action to take; "" if there is nothing to do."""
    return max((f.action for f in findings), key=ACTIONS.index, default="")


def table() -> str:
    """KINDS as a Markdown table."""
    rows = ["| finding | symptom | likely cause | what to do | by default |", "|---|---|---|---|---|"]
    for name, kind in KINDS.items():
        cells = (f"`{name}`", kind.symptom, kind.cause, kind.advice, kind.default_action(name))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
