"""A decoder-only transformer in plain PyTorch, from GPT-2 to Llama style by the [model] section of the config.

Shapes: B sequences of T tokens, D = d_model, H query heads, K key/value heads, Q = D / H (size of a head), V tokens.

The caller builds the model on the meta device (shapes only, nothing allocated), shards it if wanted, allocates, and
fills each parameter by name, so a weight depends on the seed and its name alone: not on device, ranks, or other layers.

    with torch.device("meta"):
        model = GPT(cfg)
    model.to_empty(device=device)
    init_weights(model, seed)
    loss = model(inputs, targets)  # summed over the targets; the caller divides by their number

What would break on that path is not here: no buffers (to_empty() would fill them with junk), and no second name for
tied weights (two names become two tensors).
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kamui_dist import knobs
from kamui_dist.attention import Mask, attend, document_mask

IGNORE = -100  # a target that does not count

Rope = tuple[
    Tensor, Tensor
]  # cos and sin of the angles, (T, Q / 2) each; (B, 1, T, Q / 2) where documents restart them

# What selective checkpointing keeps: the results that cost most to compute again for the memory they take.
# Batched products (aten.bmm) are not among them: those are the (T, T) scores of attention that is not fused.
aten = torch.ops.aten
MATRIX_PRODUCTS = [aten.mm.default, aten.addmm.default]
FUSED_ATTENTION = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (https://arxiv.org/abs/1910.07467; never has a bias), over the last dimension."""

    def __init__(self, cfg: knobs.Model, size: int) -> None:
        super().__init__()
        self.kind, self.eps = cfg.norm, cfg.norm_eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if cfg.bias and cfg.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        # Autocast leaves fp32 weights beside a bf16 x (q and k), which rms_norm computes unfused; FSDP can leave bf16
        # weights beside an fp32 x, which the CPU's layer_norm refuses. Nothing happens where the types agree.
        x = x.to(self.weight.dtype)
        if self.kind == "layernorm":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(length: int, size: int, theta: float, device: torch.device) -> Rope:
    """cos and sin of position x frequency, fp32, (length, size / 2) each (RoFormer, https://arxiv.org/abs/2104.09864)."""
    frequency = theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)  # (Q / 2,)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates x (B, heads, T, Q) by its position: feature i pairs with i + Q / 2, as in Hugging Face's Llama."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; with K < H, H / K query heads share one key/value head (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__()
        self.head_size, self.dropout = cfg.d_model // cfg.n_heads, cfg.dropout
        self.grouped = cfg.kv_heads != cfg.n_heads
        self.q = nn.Linear(cfg.d_model, cfg.n_heads * self.head_size, bias=cfg.bias)
        self.k = nn.Linear(cfg.d_model, cfg.kv_heads * self.head_size, bias=cfg.bias)
        self.v = nn.Linear(cfg.d_model, cfg.kv_heads * self.head_size, bias=cfg.bias)
        self.o = nn.Linear(cfg.n_heads * self.head_size, cfg.d_model, bias=cfg.bias)
        self.q_norm = Norm(cfg, self.head_size) if cfg.qk_norm else None
        self.k_norm = Norm(cfg, self.head_size) if cfg.qk_norm else None

    def heads(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """What attention compares and mixes: q (B, H, T, Q), k and v (B, K, T, Q)."""
        q = self.q(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return q.to(v.dtype), k.to(v.dtype), v  # norm and rotation may have computed in fp32

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        q, k, v = self.heads(x, rope)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, self.grouped)
        return self.o(y.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    """up, gelu, down; or swiglu: down(silu(gate) * up) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__()
        self.approximate = "tanh" if cfg.mlp == "gelu_tanh" else "none"
        self.gate = nn.Linear(cfg.d_model, cfg.ff, bias=cfg.bias) if cfg.mlp == "swiglu" else None
        self.up = nn.Linear(cfg.d_model, cfg.ff, bias=cfg.bias)
        self.down = nn.Linear(cfg.ff, cfg.d_model, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The unit to compile, then to shard."""

    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__()
        self.dropout, self.checkpointing = cfg.dropout, cfg.checkpointing
        self.attention_norm = Norm(cfg, cfg.d_model)
        self.attention = Attention(cfg)
        self.mlp_norm = Norm(cfg, cfg.d_model)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: Rope | None = None, mask: Mask = None) -> Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(x, rope, mask)
        # Inside the block, so that hooks on the block (FSDP's gathering) run once and not again for the recomputation.
        # Recomputing draws the random numbers of the forward pass again, in order.
        if self.checkpointing == "full":
            return checkpoint(self.compute, x, rope, mask, use_reentrant=False, preserve_rng_state=True)
        # A kept attention is not run again and draws nothing: with dropout inside it, every later mask of the block
        # would be another one than in forward. So with dropout attention is recomputed too.
        kept = MATRIX_PRODUCTS if self.dropout > 0 else MATRIX_PRODUCTS + FUSED_ATTENTION
        keep = partial(create_selective_checkpoint_contexts, kept)
        return checkpoint(self.compute, x, rope, mask, use_reentrant=False, preserve_rng_state=True, context_fn=keep)

    def compute(self, x: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x), rope, mask), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, cfg: knobs.Model) -> None:
        super().__init__()
        assert cfg.vocab_size is not None, "vocab_size is taken from the data before the model is built"
        assert cfg.d_model % cfg.n_heads == 0, f"d_model {cfg.d_model} is not a multiple of n_heads {cfg.n_heads}"
        assert cfg.n_heads % cfg.kv_heads == 0, f"n_heads {cfg.n_heads} is not a multiple of n_kv_heads {cfg.kv_heads}"
        self.head_size = cfg.d_model // cfg.n_heads
        assert cfg.position != "rope" or self.head_size % 2 == 0, f"rope needs an even size of a head: {self.head_size}"
        self.cfg = cfg
        self.vocab_size = cfg.vocab_size
        self.padded_vocab = -(-cfg.vocab_size // cfg.vocab_multiple) * cfg.vocab_multiple
        self.token_embedding = nn.Embedding(self.padded_vocab, cfg.d_model)
        self.position_embedding = nn.Embedding(cfg.context_length, cfg.d_model) if cfg.position == "learned" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.final_norm = Norm(cfg, cfg.d_model)
        self.head = None if cfg.tie_embeddings else nn.Linear(cfg.d_model, self.padded_vocab, bias=False)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None, per_sequence: bool = False,
        flex: bool = True,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy summed over targets != -100, fp32, 0-dim; without targets the logits, fp32, (B, T, V).

        inputs and targets: (B, T) int64. targets[b, t] is the token that follows inputs[b, t]. documents: (B, T) int64,
        where in the sequence each token's document begins: attention stays inside, and positions count from there.
        per_sequence: the sum of each sequence, (B,). flex: false: no FlexAttention, also where model.flex_attention allows
        it. Raises ValueError if T exceeds the table of learned positions.
        """
        T = inputs.shape[1]
        x = self.token_embedding(inputs)  # (B, T, D)
        positions = torch.arange(T, device=inputs.device)  # (T,), of documents (B, T)
        if documents is not None:
            positions = positions - documents
        rope = None
        if self.position_embedding is not None:
            if self.cfg.context_length < T:
                raise ValueError(
                    f"{T} tokens a sequence, but model.context_length = {self.cfg.context_length} learned positions"
                )
            x = x + self.position_embedding(positions)
        else:
            cos, sin = rotary_table(T, self.head_size, self.cfg.rope_theta, inputs.device)
            rope = (cos, sin) if documents is None else (cos[positions][:, None], sin[positions][:, None])
        dropout = self.cfg.dropout if self.training else 0.0
        mask = document_mask(documents, self.head_size, dropout, flex and self.cfg.flex_attention)
        x = F.dropout(x, self.cfg.dropout, self.training)
        for block in self.blocks:
            x = block(x, rope, mask)
        x = self.final_norm(x)
        logits = F.linear(x, self.token_embedding.weight) if self.head is None else self.head(x)
        logits = logits[..., : self.vocab_size].float()  # padding is gone before the softmax
        if targets is None:
            return logits
        if per_sequence:
            each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")  # (B, T)
            return each.sum(1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def logits(self, inputs: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, V) fp32. Calls the module, not forward(), so that FSDP's hooks gather the weights."""
        return self(inputs)

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Fills one whole (unsharded) parameter in place. Matrices: normal(0, init_std); those that write to the
        residual stream are divided by sqrt(2 n_layers): that many of them add up in it (GPT-2 paper, section 2.3)."""
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            full.zero_()
        elif module.endswith("norm"):
            full.fill_(1.0)
        else:
            summed = 2 * self.cfg.n_layers if module.endswith((".o", ".down")) else 1
            full.normal_(0.0, self.cfg.init_std / math.sqrt(summed), generator=generator)


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Random numbers on the CPU for one parameter, so that its weights are the same on every device and mesh."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "little"))


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Fills an allocated, unsharded model (parallel.py does the same for shards)."""
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, device="cpu")
        model.init_parameter(name, full, parameter_generator(seed, name))
        parameter.copy_(full)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Number of parameters: (all, without the embedding tables; an untied head is no table). Also on meta."""
    total = sum(p.numel() for p in model.parameters())
    return total, total - sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))


def flops_per_token(cfg: knobs.Model) -> float:
    """FLOPs of forward and backward for one token, without recomputation: 6 N + 12 L H Q T (PaLM, appendix B,
    https://arxiv.org/abs/2204.02311). N is the number of parameters in matrix products: not the input embeddings, but
    the output projection even if it is tied. Attention counts all T x T scores, masked or not."""
    with torch.device("meta"):
        model = GPT(cfg)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    if model.head is None:
        products += model.token_embedding.weight.numel()
    return 6.0 * products + 12.0 * cfg.n_layers * cfg.d_model * cfg.context_length
