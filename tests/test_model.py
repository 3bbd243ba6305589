"""The model equals Hugging Face's GPT-2, Llama and Qwen3, and keeps its promises for every option."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from kamui_dist import distributed, knobs
from kamui_dist.model import GPT, Norm, flops_per_token, init_weights, parameter_counts, parameter_generator
from tests.ranks import run_ranks

VOCAB, CONTEXT = 65, 16  # an odd vocabulary, padded to 128
TINY: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "d_model": 32, "vocab_size": VOCAB, "context_length": CONTEXT}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "n_kv_heads": 2, "rope_theta": 500000.0
}  # fmt: skip
QWEN: dict[str, Any] = {**LLAMA, "qk_norm": True}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and many times so beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(seed: int = 1, device: str = "cpu", **options: Any) -> GPT:
    with torch.device("meta"):
        model = GPT(knobs.Model(**{**TINY, **options}))
    model.to_empty(device=device)
    init_weights(model, seed)
    return model


def tokens(batch: int = 3, length: int = CONTEXT, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, VOCAB, (batch, length + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    return rows[:, :-1], rows[:, 1:].clone()


def gradients(model: GPT) -> dict[str, Any]:
    assert all(p.grad is not None for p in model.parameters())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def grid(**options: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


# Equal to Hugging Face


def randomize(model: torch.nn.Module) -> None:
    """All parameters random, norms around 1 and biases too, so that a swapped or forgotten one shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 2 else 0.5) + (p.ndim == 1))


def from_gpt2(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "token_embedding.weight": theirs["transformer.wte.weight"],
        "position_embedding.weight": theirs["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for n in range(TINY["n_layers"]):
            block = f"transformer.h.{n}"
            q, k, v = theirs[f"{block}.attn.c_attn.{kind}"].chunk(3, dim=-1)  # Conv1D: weights are (in, out)
            found = {
                "attention_norm": theirs[f"{block}.ln_1.{kind}"],
                "mlp_norm": theirs[f"{block}.ln_2.{kind}"],
                "attention.q": q,
                "attention.k": k,
                "attention.v": v,
                "attention.o": theirs[f"{block}.attn.c_proj.{kind}"],
                "mlp.up": theirs[f"{block}.mlp.c_fc.{kind}"],
                "mlp.down": theirs[f"{block}.mlp.c_proj.{kind}"],
            }
            for name, tensor in found.items():
                ours[f"blocks.{n}.{name}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    return ours


LLAMA_NAMES = {
    "model.embed_tokens": "token_embedding", "model.layers": "blocks", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm", "self_attn": "attention", "model.norm": "final_norm", "lm_head": "head",
    "_proj": "",
}  # fmt: skip


def from_llama(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {}
    for name, tensor in theirs.items():
        for old, new in LLAMA_NAMES.items():
            name = name.replace(old, new)
        ours[name] = tensor
    return ours


def hugging_face(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """A random model of theirs, the mapping of its tensors to ours, and our options."""
    import transformers as hf

    llama: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": not kind.endswith("untied"),
    }  # fmt: skip
    options = {**LLAMA, "d_ff": 48, "norm_eps": 1e-6, "tie_embeddings": not kind.endswith("untied")}
    if kind == "gpt2":
        no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = hf.GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT + 1, n_embd=32, n_layer=2, n_head=4, **no_dropout)
        return hf.GPT2LMHeadModel(gpt2), from_gpt2, {"mlp": "gelu_tanh", "context_length": CONTEXT + 1}
    if kind.startswith("llama"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**llama)), from_llama, options
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**llama, head_dim=8)), from_llama, {**options, "qk_norm": True}


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "llama-untied", "qwen3-tied"])
def test_logits_loss_and_gradients_equal_hugging_face(kind: str) -> None:
    theirs, mapping, options = hugging_face(kind)
    randomize(theirs)
    weights = mapping(dict(theirs.named_parameters()))
    model = build(**options)
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p[: len(weights[name])].copy_(weights[name])  # the rows above are padding of the vocabulary

    inputs, targets = tokens()
    targets[0, :5] = -100
    labels = torch.cat((inputs[:, :1], targets), dim=1)  # theirs are shifted by one inside
    result = theirs(torch.cat((inputs, labels[:, -1:]), dim=1), labels=labels)
    assert (model.logits(inputs) - result.logits[:, :-1]).abs().max() <= 1e-5
    loss = model(inputs, targets) / (targets != -100).sum()
    torch.testing.assert_close(loss, result.loss, atol=1e-6, rtol=1e-6)

    loss.backward()
    result.loss.backward()
    expected = mapping({name: p.grad for name, p in theirs.named_parameters()})
    for name, grad in gradients(model).items():
        rows = len(expected[name])
        torch.testing.assert_close(grad[:rows], expected[name], atol=1e-6, rtol=1e-4, msg=name)
        assert not grad[rows:].any()


# Every option


def test_no_option_sees_the_future() -> None:
    inputs, _ = tokens(batch=1, length=12)
    t = 7
    changed = inputs.clone()
    changed[0, t] = (changed[0, t] + 1) % VOCAB
    for options in grid(
        norm=["layernorm", "rmsnorm"], position=["learned", "rope"], mlp=["gelu", "gelu_tanh", "swiglu"],
        n_kv_heads=[4, 2, 1], qk_norm=[False, True], tie_embeddings=[True, False], bias=[True, False],
    ):  # fmt: skip
        with torch.no_grad():
            model = build(n_layers=1, init_std=0.2, **options)
            before, after = model.logits(inputs), model.logits(changed)
        difference = (before - after).abs().amax(dim=(0, 2))  # (T,)
        assert difference[:t].max() <= 1e-6, options
        assert difference[t:].min() > 1e-5, options  # and every later one sees the change


@pytest.mark.parametrize("options", [{}, LLAMA, {**LLAMA, "tie_embeddings": False}])
def test_loss_of_new_weights_is_that_of_a_uniform_guess(options: dict[str, Any]) -> None:
    inputs, targets = tokens(batch=8)
    loss = build(**options)(inputs, targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() / targets.numel() == pytest.approx(math.log(VOCAB), rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_is_never_predicted_nor_trained(tied: bool) -> None:
    model = build(tie_embeddings=tied)
    assert (model.vocab_size, model.padded_vocab) == (VOCAB, 128)
    projection = model.token_embedding if model.head is None else model.head
    inputs, targets = tokens()
    loss = model(inputs, targets)
    loss.backward()
    assert projection.weight.grad is not None
    assert not projection.weight.grad[VOCAB:].any()
    assert projection.weight.grad[:VOCAB].any(dim=1).all()  # every real token gets one through the softmax
    with torch.no_grad():
        projection.weight[VOCAB:] = 1e4
    assert model.logits(inputs).shape == (3, CONTEXT, VOCAB)
    assert model(inputs, targets).item() == loss.item()


def test_names_and_shapes_that_files_rely_on() -> None:
    untied = build(**QWEN, tie_embeddings=False).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in untied.items()}
    block = {name.removeprefix("blocks.1."): shape for name, shape in shapes.items() if name.startswith("blocks.1.")}
    assert block == {
        "attention_norm.weight": (32,), "attention.q.weight": (32, 32), "attention.k.weight": (16, 32),
        "attention.v.weight": (16, 32), "attention.o.weight": (32, 32), "attention.q_norm.weight": (8,),
        "attention.k_norm.weight": (8,), "mlp_norm.weight": (32,), "mlp.gate.weight": (128, 32),
        "mlp.up.weight": (128, 32), "mlp.down.weight": (32, 128),
    }  # fmt: skip
    rest = {name: shape for name, shape in shapes.items() if not name.startswith("blocks.")}
    assert rest == {"token_embedding.weight": (128, 32), "final_norm.weight": (32,), "head.weight": (128, 32)}
    tied = build().state_dict()
    assert "head.weight" not in tied
    assert "position_embedding.weight" in tied
    assert "blocks.0.attention_norm.bias" in tied


def test_too_long_a_sequence_is_refused_with_both_numbers() -> None:
    inputs, targets = tokens(length=CONTEXT + 1)
    with pytest.raises(ValueError, match=r"17 tokens .* 16"):
        build()(inputs, targets)
    assert build(position="rope")(inputs, targets).isfinite()  # rotation has no table to run out of


def test_a_batch_without_targets_has_loss_and_gradients_zero() -> None:
    for options in ({}, LLAMA):
        model = build(**options)
        inputs, targets = tokens()
        loss = model(inputs, torch.full_like(targets, -100))
        loss.backward()
        assert loss.item() == 0.0
        assert not any(grad.isnan().any() or grad.any() for grad in gradients(model).values())


# Initial weights


def test_weights_depend_on_seed_and_name_only() -> None:
    small, large = build(n_layers=2), build(n_layers=3, n_kv_heads=4)
    after = torch.get_rng_state()
    torch.manual_seed(99)
    again, other = build(n_layers=2), build(seed=2, n_layers=2)
    torch.set_rng_state(after)
    values, larger, others = small.state_dict(), large.state_dict(), other.state_dict()
    for name, weight in values.items():
        scale = math.sqrt(3 / 2) if name.endswith(("attention.o.weight", "mlp.down.weight")) else 1
        torch.testing.assert_close(weight, larger[name] * scale)
        assert torch.equal(weight, again.state_dict()[name])
        assert torch.equal(weight, others[name]) == (weight.ndim == 1), name
    assert not torch.equal(values["blocks.0.mlp.up.weight"], values["blocks.1.mlp.up.weight"])
    # A later version or another machine must not draw other weights.
    assert parameter_generator(1337, "blocks.0.attention.q.weight").initial_seed() == 52151640531505929
    assert not list(small.buffers())  # nothing that to_empty() could leave as junk


def test_initial_weights_are_as_specified() -> None:
    model = build(d_model=256, init_std=0.03, qk_norm=True)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    init_weights(model, seed=3)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            std = 0.03 / 2 if name.endswith(("attention.o.weight", "mlp.down.weight")) else 0.03  # sqrt(2 x 2 layers)
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(p.mean().item()) < std / 20, name


def test_counts_and_flops() -> None:
    gpt2 = knobs.Model(n_layers=12, n_heads=12, d_model=768, vocab_size=50257, vocab_multiple=1, context_length=1024)
    with torch.device("meta"):
        total, without = parameter_counts(GPT(gpt2))
    assert total == 124_439_808  # GPT-2 small as published
    assert without == total - (50257 + 1024) * 768
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(gpt2) == 6 * matrices + 12 * 12 * 768 * 1024
    untied = gpt2.model_copy(update={"tie_embeddings": False})
    assert flops_per_token(untied) == flops_per_token(gpt2)  # the same products are computed


# Dropout and checkpointing


def run_step(model: GPT, device: str = "cpu") -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    loss = model(*tokens(device=device))
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, LLAMA])
def test_recomputing_gives_the_same_gradients_with_dropout(options: dict[str, Any], device: str) -> None:
    for dropout, autocast in itertools.product((0.0, 0.5), (False, True)):
        results = []
        for checkpointing in ("none", "selective", "full"):
            model = build(device=device, checkpointing=checkpointing, dropout=dropout, **options)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                results.append(run_step(model, device))
        for loss, grads in results[1:]:
            assert loss == results[0][0]
            for name, grad in grads.items():
                assert torch.equal(grad, results[0][1][name]), (name, dropout, autocast)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_no_product_or_attention_twice() -> None:
    counts = {}
    for checkpointing in ("none", "selective", "full"):
        with Count() as count:
            run_step(build(checkpointing=checkpointing, mlp="swiglu"))
        calls = count.calls
        attention = calls["_scaled_dot_product_flash_attention_for_cpu"]
        counts[checkpointing] = calls["mm"] + calls["addmm"], attention, calls["native_layer_norm"]
    none, selective, full = counts["none"], counts["selective"], counts["full"]
    assert selective[:2] == none[:2]
    assert selective[2] == full[2] == none[2] + 2 * 2  # both norms of both blocks again
    assert full[:2] == (none[0] + 6 * 2, none[1] + 2)  # 6 of 7 products: backward does not need the output of `down`


def test_dropout_is_on_in_training_only() -> None:
    model, (inputs, targets) = build(dropout=0.3), tokens()
    assert model(inputs, targets) != model(inputs, targets)
    model.eval()
    assert model(inputs, targets) == model(inputs, targets)


# Types


@pytest.mark.slow
def test_bf16_by_autocast_and_by_weights_on_every_option() -> None:
    inputs, targets = tokens()
    for options in grid(
        norm=["layernorm", "rmsnorm"], position=["learned", "rope"], qk_norm=[False, True], n_kv_heads=[4, 2],
        checkpointing=["none", "selective"],
    ):  # fmt: skip
        expected = build(**options)(inputs, targets).item()
        for weights, autocast in ((torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)):
            model = build(**options).to(weights)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(inputs, targets)
                assert model.logits(inputs).dtype == torch.float32
            loss.backward()
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(expected, rel=2e-3), options
            assert all(grad.isfinite().all() and grad.dtype == weights for grad in gradients(model).values())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_takes_input_and_weights_of_different_types(kind: Any) -> None:
    x = torch.randn(2, 8)
    for weights, inputs in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        norm = Norm(knobs.Model(norm=kind), 8).to(weights)
        y = norm(x.to(inputs))
        assert y.dtype == weights
        torch.testing.assert_close(y.float(), Norm(knobs.Model(norm=kind), 8)(x), atol=0.02, rtol=0.02)


def sharded_steps() -> list[float]:
    """Largest relative difference of the gradients, FSDP2 against one process, per set of options."""
    inputs, targets = tokens()
    mesh = torch.distributed.init_device_mesh("cpu", (distributed.world_size(),))
    worst = []
    for options in (
        {"checkpointing": "selective"},
        {"checkpointing": "full", "tie_embeddings": False, "dropout": 0.2},
        {**QWEN, "checkpointing": "selective"},
    ):
        for bf16, autocast in ((False, False), (True, False), (True, True)):
            plain, model = build(**options), build(**options)
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=autocast
            )  # with and without a table of rotations rounded to bf16
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            assert isinstance(model, FSDPModule)
            losses = []
            for m, cast in ((plain, bf16), (model, autocast)):
                torch.manual_seed(7)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    losses.append(m(inputs, targets))
                losses[-1].backward()
            assert losses[1].dtype == torch.float32
            torch.testing.assert_close(losses[1], losses[0], rtol=2e-3 if bf16 else 1e-6, atol=0)
            expected = gradients(plain)
            worst.append(0.0)
            for name, grad in gradients(model).items():
                error = ((grad.full_tensor() - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)).item()
                worst[-1] = max(worst[-1], error / (0.06 if bf16 else 1e-5))
            assert model.logits(inputs).isfinite().all()
    return worst


@pytest.mark.slow
def test_sharded_in_fp32_and_bf16_equals_one_process() -> None:
    for worst in run_ranks(sharded_steps, 2):
        assert max(worst) < 1, worst


# Compilation


COMPILED = [
    {"checkpointing": "none", "dropout": 0.3},
    {"checkpointing": "selective", **QWEN},
    {"checkpointing": "selective", "dropout": 0.3, **LLAMA},
    {"checkpointing": "full", "dropout": 0.3},
]


def compiled(model: GPT, backend: Any) -> GPT:
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED)
def test_compiled_blocks_compile_once_for_train_and_once_for_eval(options: dict[str, Any]) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = compiled(build(n_layers=3, **options), counter)
    assert model.state_dict().keys() == build(n_layers=3, **options).state_dict().keys()
    inputs, targets = tokens()
    for _cycle in range(3):
        model.train()
        for _micro in range(4):
            model(inputs, targets).backward()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(inputs, targets)
    assert counter.frame_count == 2  # shared by the blocks


@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED)
def test_compiled_recomputation_keeps_its_dropout_masks(options: dict[str, Any]) -> None:
    """Compiled code may draw other masks than eager code does; with and without recomputation it draws the same."""
    results = [
        run_step(compiled(build(**{**options, "checkpointing": checkpointing}), "aot_eager"))
        for checkpointing in ("none", str(options["checkpointing"]))
    ]
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"checkpointing": "full"}, {**QWEN, "checkpointing": "selective"}])
def test_compiled_blocks_equal_eager_blocks(options: dict[str, Any]) -> None:
    results = [run_step(model) for model in (build(**options), compiled(build(**options), "inductor"))]
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
