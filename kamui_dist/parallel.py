"""All that knows DDP, FSDP2 and HSDP: wrap the model, say when gradients are communicated, measure and scale them.

The loop sees five functions: `parallelize`, `gradient_sync`, `grad_norm`, `clip_grad_norm`, `unwrap`. Every strategy averages
gradients over the data-parallel ranks, so the loss scale in the loop is the same for all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kamui_dist.config import Config
from kamui_dist.errors import UserError
from kamui_dist.model import parameter_generator
from kamui_dist.plan import Plan
from kamui_dist.precision import DTYPES
from kamui_dist.tensors import local_part


def parallelize(model: nn.Module, cfg: Config, plan: Plan, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """Shards or replicates `model` and gives every parameter its initial value.

    A model on the meta device (ours) is sharded first and filled after, each parameter from (seed, its name): all strategies
    start from identical weights, and no rank holds more than its shard and one full parameter. A model that comes with
    weights (model.factory) is moved to the device, and rank 0's weights are everybody's.
    """
    on_meta = any(p.is_meta for p in model.parameters())
    if not on_meta:
        model.to(device)
        _make_dense(model)
        _broadcast(model)
    if cfg.model.compile:
        for block in blocks(model).values():
            block.compile()
    if plan.shard > 1:
        assert mesh is not None
        _shard(model, cfg, mesh["shard"] if plan.replicate == 1 else mesh["replicate", "shard"])
    if on_meta:
        model.to_empty(device=device)
        fill_parameters(model, cfg.run.seed)
    if plan.shard == 1 and plan.world_size > 1:
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    return model


def check_shards(model: nn.Module, plan: Plan) -> None:
    """Raises UserError if some rank would hold nothing of a block, or a parameter has no rows. Before anything is made; also on
    meta."""
    if plan.shard > 1 and (whole := [name for name, p in model.named_parameters() if not p.ndim]):
        raise UserError(
            f"parallel.shard ({plan.shard}): {', '.join(whole[:3])} has no dimension to shard along; give it the shape (1,), or "
            "set parallel.shard=1"
        )
    sizes = [[p.shape[0] if p.ndim else 1 for p in block.parameters()] for block in blocks(model).values() or [model]]
    rows = min((max(size) for size in sizes if any(size)), default=plan.shard)  # what is empty cannot be held
    if plan.shard > rows:
        raise UserError(
            f"parallel.shard ({plan.shard}) is more than the rows ({rows}) of the model's smallest block: some ranks would "
            "hold nothing of it; lower parallel.shard and raise parallel.replicate"
        )


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The units that are compiled and sharded, by name: the children of every ModuleList (none: the model is one unit)."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    inner = {id(m) for outer in lists.values() for child in outer for m in child.modules()}
    outer = {name: one for name, one in lists.items() if id(one) not in inner}
    return {f"{name}.{i}": child for name, one in outer.items() for i, child in one.named_children()}


def _shard(model: nn.Module, cfg: Config, mesh: DeviceMesh) -> None:
    param = DTYPES[cfg.parallel.param_dtype or cfg.run.precision]
    reduce = DTYPES[cfg.parallel.reduce_dtype]
    policy = MixedPrecisionPolicy(
        param_dtype=None if param == torch.float32 else param,
        reduce_dtype=None if reduce == param else reduce,
        cast_forward_inputs=False,  # the activations have their type already, and the rotary table must keep fp32
    )
    for block in blocks(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=cfg.parallel.reshard_after_forward)
    # What is left (embeddings, final norm, head) is the root's group. It is needed again at once in backward: not resharded.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def fill_parameters(model: nn.Module, seed: int) -> None:
    """Initial weights by (seed, name), one full parameter at a time, on the CPU: the same on every device and mesh."""
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        model.init_parameter(name, full, parameter_generator(seed, name))  # type: ignore[operator]
        copy_full(parameter, full)


@torch.no_grad()
def copy_full(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Fills `tensor` (plain or sharded) from the whole values, which every rank has; nothing is communicated."""
    if isinstance(tensor, DTensor):
        full = full.to(tensor.device, tensor.dtype)
        shard = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(shard.to_local())
    else:
        tensor.copy_(full)


def _make_dense(model: nn.Module) -> None:
    """Gives a buffer that is an expanded view memory of its own: into one element for several nothing can be received or loaded."""
    dense: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and any(n > 1 and s == 0 for n, s in zip(buffer.shape, buffer.stride(), strict=True)):
                module._buffers[name] = dense.setdefault(
                    id(buffer), buffer.clone(memory_format=torch.contiguous_format)
                )


@torch.no_grad()
def _broadcast(model: nn.Module) -> None:
    if dist.is_initialized():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module, with plain parameter names: for checkpoints, the optimizer and evaluation."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of every parameter, by name, without a copy: its shard under FSDP, else the whole."""
    return {name: local_part(p.detach()) for name, p in model.named_parameters()}


def replicas(plan: Plan) -> list[list[int]]:
    """Groups of ranks whose `local_weights` are to be equal, bit for bit: all of them under DDP, those with the same place in
    their shard group under HSDP (neighbours share a shard group, see distributed.make_mesh), each alone under FSDP."""
    return [list(range(place, plan.world_size, plan.shard)) for place in range(plan.shard)]


def reshard(model: nn.Module) -> None:
    """Back to shards after forward passes without a backward, which would have done it: until then FSDP shows gathered weights
    as the parameters, and a checkpoint would not find those that the optimizer has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Around forward passes without a backward: eval mode, then the shards and each submodule's own mode again."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        reshard(module)
        for m, training in modes.items():
            m.training = training


@contextlib.contextmanager
def gradient_sync(model: nn.Module, last: bool, defer: bool = True) -> Iterator[None]:
    """Around forward and backward of one micro-batch: gradients are communicated in the `last` one of a step only.

    Forward belongs inside: DDP decides there whether its backward will reduce. `defer` false: FSDP reduce-scatters each
    micro-batch, so that no rank ever keeps full gradients; HSDP still all-reduces over its replicas only in the last.
    The switches are set anew each time, so an exception leaves none of them wrong; the gradients of its step are another
    matter: under FSDP those that were not yet reduced stay on the rank, and no zero_grad reaches them.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = True
        with contextlib.nullcontext() if last else model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not defer)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
    yield


def show_own_gradients(model: nn.Module, see: Callable[[int, torch.Tensor], None]) -> None:
    """FSDP, once: `see(k, gradient)` for each sharded unit k and backward that communicates, with this rank's own gradient in a
    flat tensor (in parallel.reduce_dtype), before it is averaged over ranks. Elsewhere it is what `.grad` holds meanwhile."""
    for k, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
        module.set_custom_reduce_scatter(_ShownReduceScatter(functools.partial(see, k)))  # type: ignore[arg-type]


class _ShownReduceScatter:
    """FSDP's own reduce-scatter, with a look at what goes in."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        self.see = see

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:  # fmt: skip
        self.see(input_tensor)
        # 2.13 renamed it, as all_gather_single in distributed.py
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def grad_norm(model: nn.Module) -> torch.Tensor:
    """The 2-norm of the whole gradient over all parameters and shards: 0-dim, on the device, the same on every rank.

    A collective under FSDP, and no host synchronisation.
    """
    gradients = _gradients(model)
    if not gradients:
        return torch.zeros((), device=next(model.parameters()).device)
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_grad_norm(model: nn.Module, norm: float, scale: float, max_norm: float) -> tuple[float, float]:
    """Multiplies every gradient by `scale`, then clips to `max_norm` (0: no clipping), in one pass over memory or none.

    `norm` is `grad_norm(model)` before. Returns the norm after scaling, before and after clipping. Clipping by global norm:
    Pascanu et al. 2013 (arXiv:1211.5063).
    """
    before = norm * scale
    after = min(before, max_norm) if max_norm > 0 else before
    factor = scale * (after / before) if before > 0 else scale
    if factor != 1.0:
        torch._foreach_mul_(_gradients(model), factor)
    return before, after


def communication(cfg: Config, plan: Plan, parameters: int) -> str:
    """What is sent when, for the banner. `parameters` of the whole model; sizes are of one rank and step."""
    if plan.world_size == 1:
        return "nothing (one process)"
    accum = plan.grad_accum_steps
    if plan.shard == 1:
        return f"gradients all-reduced once a step, {_gib(4 * parameters)} fp32, in the last of {accum} micro-batches"
    width = {"fp32": 4, "bf16": 2, "fp16": 2}
    gathers = (2 if cfg.parallel.reshard_after_forward else 1) * accum
    scatters = 1 if cfg.parallel.defer_sync else accum
    param_dtype = cfg.parallel.param_dtype or cfg.run.precision
    text = (
        f"weights gathered {gathers} x a step ({param_dtype}, {_gib(width[param_dtype] * parameters)} each), gradients "
        f"reduce-scattered {scatters} x a step ({cfg.parallel.reduce_dtype})"
    )
    if plan.replicate > 1:
        text += f", shards all-reduced over {plan.replicate} replicas once a step"
    if accum > 1 and cfg.parallel.defer_sync:
        text += (
            f"; deferring keeps full gradients on every rank, {_gib(4 * parameters)} "
            "(parallel.defer_sync=false keeps 1 shard and sends each micro-batch)"
        )
    return text


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
