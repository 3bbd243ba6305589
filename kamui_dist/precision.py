"""Autocast, eager or compiled, the fp16 loss scaler, TF32.

Weights, gradients at the optimizer, and optimizer state are fp32 always."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Around forward and loss: matrix products in `precision` (bf16, fp16), the rest as torch.autocast decides; fp32: nothing."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def eager() -> contextlib.AbstractContextManager[Any]:
    """Around forward passes of another shape than training's, or with hooks: nothing is compiled anew for them. Who has not loaded
    torch._dynamo has compiled nothing, and is spared the seconds that loading it takes."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def set_backends(device: torch.device, precision: str, deterministic: bool) -> None:
    """TF32 for the few fp32 products of a mixed run, full fp32 where the user asked for fp32; deterministic kernels on request."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's context is made
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


class LossScaler:
    """Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), with GradScaler's constants; scale 1 otherwise.

    Not torch's GradScaler: there each rank looks for overflow in its own gradients. Here the loop decides once, from the
    global norm that all ranks share, and unscaling is folded into the factor that clips.
    """

    def __init__(self, enabled: bool, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = scale if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halves the scale after an overflow, doubles it after `growth_interval` good steps in a row."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        if self.enabled and state["scale"] != 1.0:  # a bf16 checkpoint that goes on in fp16 starts with a fresh scale
            self.scale, self.good_steps = state["scale"], state["good_steps"]
