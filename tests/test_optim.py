"""Parameter groups and optimizers: what decays, by exactly how much, and that every parameter is in exactly one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kamui_dist import knobs, optim
from kamui_dist.model import GPT, init_weights


def gpt(**options: Any) -> GPT:
    model = GPT(knobs.Model(n_layers=2, n_heads=2, d_model=16, vocab_size=65, context_length=8, **options))
    init_weights(model, 1)
    for parameter in model.parameters():  # biases are 0 at first, which no decay would change
        with torch.no_grad():
            parameter.add_(1.0)
    return model


def step_with_zero_gradients(model: nn.Module, cfg: knobs.Optim) -> dict[str, float]:
    """By what factor each parameter has changed."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.build(model, cfg)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = {}
    for name, parameter in model.named_parameters():
        ratio = parameter.detach() / before[name]
        torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.flatten()[0])), rtol=1e-6, atol=0.0)
        factors[name] = float(ratio.flatten()[0])
    return factors


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_decay_of_one_step(name: Any, decay_embeddings: bool, tied: bool) -> None:
    """D11: x 0.95 for matrices at lr 0.1 and decay 0.5; biases and norms stay as they are."""
    model = gpt(tie_embeddings=tied)
    cfg = knobs.Optim(name=name, lr=0.1, weight_decay=0.5, decay_embeddings=decay_embeddings)
    for parameter, factor in step_with_zero_gradients(model, cfg).items():
        matrix = parameter.endswith("weight") and "norm" not in parameter
        decayed = matrix and (decay_embeddings or "embedding" not in parameter)
        assert factor == pytest.approx(0.95 if decayed else 1.0, rel=1e-6), parameter
        if not decayed:
            assert factor == 1.0, parameter


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False}, {"norm": "rmsnorm", "bias": False, "position": "rope"}]
)
def test_every_parameter_is_in_exactly_one_group(options: dict[str, Any]) -> None:
    model = gpt(**options)
    for decay_embeddings in (True, False):
        groups = optim.parameter_groups(model, knobs.Optim(weight_decay=0.3, decay_embeddings=decay_embeddings))
        grouped = [id(p) for group in groups for p in group["params"]]
        assert len(grouped) == len(set(grouped))
        assert set(grouped) == {id(p) for p in model.parameters()}
        assert [g["weight_decay"] for g in groups] == [0.3, 0.0]


def test_a_tied_weight_counts_once_and_as_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9, bias=False)  # comes first by name and is a matrix
            self.table = nn.Embedding(9, 4)
            self.head.weight = self.table.weight

    [free] = optim.parameter_groups(Tied(), knobs.Optim(decay_embeddings=False))
    assert (free["weight_decay"], len(free["params"])) == (0.0, 1)
    [decayed] = optim.parameter_groups(Tied(), knobs.Optim(decay_embeddings=True))
    assert (decayed["weight_decay"], len(decayed["params"])) == (0.1, 1)


def test_frozen_parameters_are_left_alone_and_empty_groups_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    grouped = [p for g in optim.parameter_groups(model, knobs.Optim()) for p in g["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model[1].parameters()}
    [one] = optim.parameter_groups(nn.LayerNorm(3), knobs.Optim())
    assert one["weight_decay"] == 0.0


def test_adamw_is_that_of_the_paper() -> None:
    """Two steps by hand."""
    cfg = knobs.Optim(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    optimizer = optim.build(layer, cfg)
    w, m, v = 2.0, 0.0, 0.0
    for t, g in ((1, 3.0), (2, -1.0)):
        layer.weight.grad = torch.full((1, 1), g)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w * (1 - 0.1 * 0.5) - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)) ** 0.5 + 1e-3)
        assert layer.weight.item() == pytest.approx(w, rel=1e-6)


def test_sgd_with_momentum() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    optimizer = optim.build(layer, knobs.Optim(name="sgd", lr=0.1, momentum=0.5, weight_decay=0.0))
    for expected in (0.8, 0.5):  # 1 - 0.1 x 2; then the velocity is 0.5 x 2 + 2 = 3
        layer.weight.grad = torch.full((1, 1), 2.0)
        optimizer.step()
        assert layer.weight.item() == pytest.approx(expected)


def test_the_rate_is_set_in_every_group() -> None:
    optimizer = optim.build(gpt(), knobs.Optim(lr=0.1))
    optim.set_lr(optimizer, 0.025)
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.025]


def test_master_weights_and_moments_are_fp32() -> None:
    """D12: in bf16 a weight of 1.0 would not move at all."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    optimizer = optim.build(layer, knobs.Optim(lr=6e-4, weight_decay=0.0))
    for _ in range(100):
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.94, abs=1e-3)
    assert {t.dtype for t in optimizer.state[layer.weight].values()} == {torch.float32}
