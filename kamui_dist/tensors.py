"""The tensors that a resumed run is made of, by name. Nothing is copied, and no optimizer step is ever taken for it.

    model.<name>          parameters and persistent buffers, without the prefixes of wrappers; tied weights once
    optim.<key>.<name>    what the optimizer keeps for a parameter: exp_avg, exp_avg_sq, step, momentum_buffer, ...

Learning rate, weight decay and the like are not among them: they come from the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kamui_dist.errors import UserError
from kamui_dist.manifest import DTYPES

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # torch.compile, activation checkpointing


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, detached, sharing memory with `model`, which is not wrapped in DDP."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name not in transient]
    return {f"model.{_plain(name)}": tensor.detach() for name, tensor in [*model.named_parameters(), *buffers]}


def unstored(model: nn.Module) -> list[str]:
    """The modules that keep state of their own beside parameters and buffers (get_extra_state), which no checkpoint holds."""
    plain = nn.Module.get_extra_state
    return [name or "the model" for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def check_storable(model: nn.Module) -> None:
    """Raises UserError if a checkpoint could not hold the model. Also on meta."""
    unknown = {name: t.dtype for name, t in model_tensors(model).items() if t.dtype not in DTYPES.values()}
    if unknown:
        told = ", ".join(f"{name.removeprefix('model.')} is {dtype}" for name, dtype in unknown.items())
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
        raise UserError(f"model.factory: {told}, which no checkpoint can hold; it can: {known}")


def buffer_names(model: nn.Module) -> set[str]:
    """The names that `model_tensors` gives to buffers: what a forward pass may change."""
    return {f"model.{_plain(name)}" for name, _ in model.named_buffers()}


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """model_tensors, and every tensor that the optimizer keeps now (None is left out).

    Raises TypeError if the optimizer keeps something that is not a tensor, since it would be lost.
    """
    tensors = model_tensors(model)
    for name, parameter in _optimizer_parameters(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or "." in key:
                raise TypeError(
                    f"optimizer state {key!r} of {name} is a {type(value).__name__}: only tensors are saved"
                )
            tensors[f"optim.{key}.{name}"] = value
    return tensors


def prepare_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, manifest: dict[str, Any]) -> None:
    """Allocates the optimizer's state as the checkpoint has it, to be filled by `load`. Takes no step.

    Raises UserError if a parameter has some and not all of the state of its parameter group, or state of another shape.
    """
    keys_of: dict[str, dict[str, Any]] = {}
    for full_name, tensor in manifest["tensors"].items():
        if full_name.startswith("optim."):
            _, key, name = full_name.split(".", 2)
            keys_of.setdefault(name, {})[key] = tensor
    optimizer.state.clear()
    names = {id(parameter): name for name, parameter in _optimizer_parameters(model, optimizer)}
    for group in optimizer.param_groups:
        group_keys = {key for parameter in group["params"] for key in keys_of.get(names[id(parameter)], {})}
        for parameter in group["params"]:
            name = names[id(parameter)]
            saved = keys_of.get(name, {})
            if saved and (missing := group_keys - set(saved)):
                raise UserError(f"the checkpoint lacks optimizer state {', '.join(sorted(missing))} of {name}: damaged")
            for key, tensor in saved.items():
                dtype, shape = DTYPES[tensor["dtype"]], tensor["shape"]
                if key != "step" and shape == list(parameter.shape):
                    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                elif not shape:
                    on_device = group.get("fused") or group.get("capturable")  # where torch.optim keeps `step`
                    value = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
                else:
                    raise UserError(f"optimizer state {key} of {name} has shape {shape}, not {list(parameter.shape)}")
                optimizer.state[parameter][key] = value


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, sharing its memory: the shard of a DTensor, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
