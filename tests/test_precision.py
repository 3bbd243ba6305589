"""Autocast, the fp16 scaler's arithmetic, and clipping of scaled gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kamui_dist import parallel
from kamui_dist.precision import LossScaler, autocast, set_backends

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_autocast_computes_products_in_the_type_and_keeps_weights(precision: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with autocast(CPU, precision):
        y = layer(torch.ones(2, 4))
        loss = nn.functional.cross_entropy(y, torch.tensor([0, 1]), reduction="sum")
    assert y.dtype == dtype
    assert loss.dtype == torch.float32
    loss.backward()
    assert layer.weight.dtype == torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.fixture
def backends() -> Iterator[None]:
    products, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(products)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("backends")
def test_fp32_means_fp32_and_deterministic_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_backends(CPU, "fp32", deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    set_backends(CPU, "bf16", deterministic=True)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.are_deterministic_algorithms_enabled()


def test_the_scale_halves_and_grows_as_grad_scaler_does() -> None:
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    ours = LossScaler(enabled=True, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in [True, True, False, True, True, True, True, False, False, True, True, True, True]:
        torch_scaler.scale(weight.sum() * (1.0 if finite else math.inf)).backward()
        torch_scaler.step(optimizer)
        torch_scaler.update()
        optimizer.zero_grad()
        ours.update(finite)
        assert ours.scale == torch_scaler.get_scale()


def test_each_overflow_halves_and_good_steps_in_a_row_double() -> None:
    scaler = LossScaler(enabled=True)
    assert scaler.scale == 65536.0
    scaler.update(False)
    assert scaler.scale == 32768.0
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 32768.0
    scaler.update(True)
    assert scaler.scale == 65536.0
    for _ in range(1999):
        scaler.update(True)
    scaler.update(False)
    for _ in range(1999):  # an overflow starts the count anew
        scaler.update(True)
    assert scaler.scale == 32768.0


def test_without_fp16_the_scale_is_one_for_ever() -> None:
    scaler = LossScaler(enabled=False)
    for finite in (True, False, True):
        scaler.update(finite)
    assert scaler.scale == 1.0
    scaler.load({"scale": 1024.0, "good_steps": 3})
    assert scaler.scale == 1.0


def test_state() -> None:
    first, second = LossScaler(True, growth_interval=3), LossScaler(True, growth_interval=3)
    for finite in (False, True, True):
        first.update(finite)
    second.load(json.loads(json.dumps(first.state())))
    for scaler in (first, second):
        scaler.update(True)
    assert first.scale == second.scale == 65536.0
    fresh = LossScaler(True)
    fresh.load(LossScaler(False).state())
    assert fresh.scale == 65536.0, "a bf16 checkpoint that goes on in fp16 starts with a fresh scale"


def parameter(gradient: list[float]) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(gradient)))
    p.grad = torch.tensor(gradient)
    return p


class Holder(nn.Module):
    def __init__(self, *gradients: list[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([parameter(g) for g in gradients])


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_unscaling_comes_before_clipping(scale: float) -> None:
    """A19: scale 1024, true norm 3, largest norm 1, SGD of rate 1: the update has norm 1 (and not 1/1024)."""
    model = Holder([2.0 * scale], [2.0 * scale, 1.0 * scale])
    norm = float(parallel.grad_norm(model))
    assert norm == pytest.approx(3.0 * scale)
    before, after = parallel.clip_grad_norm(model, norm, 1.0 / scale, 1.0)
    assert (before, after) == pytest.approx((3.0, 1.0))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert math.sqrt(sum(float((p.detach() ** 2).sum()) for p in model.parameters())) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("largest", "scale", "expected"),
    [
        (1.0, 1.0, (3.0, 1.0)), (0.0, 1.0, (3.0, 3.0)), (5.0, 1.0, (3.0, 3.0)), (3.0, 1.0, (3.0, 3.0)),
        (1.0, 0.1, (0.3, 0.3)), (0.0, 0.5, (1.5, 1.5)),
    ],
)  # fmt: skip
def test_what_clipping_returns_is_what_the_gradients_have(
    largest: float, scale: float, expected: tuple[float, float]
) -> None:
    model = Holder([2.0], [2.0, 1.0])
    told = parallel.clip_grad_norm(model, float(parallel.grad_norm(model)), scale, largest)
    assert told == pytest.approx(expected)
    assert float(parallel.grad_norm(model)) == pytest.approx(expected[1])


def test_zero_gradients_are_no_division() -> None:
    model = Holder([0.0, 0.0])
    assert parallel.clip_grad_norm(model, 0.0, 0.5, 1.0) == (0.0, 0.0)
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)


def test_parameters_without_a_gradient_do_not_count() -> None:
    model: Any = Holder([3.0], [4.0])
    model.weights[1].grad = None
    assert float(parallel.grad_norm(model)) == pytest.approx(3.0)
