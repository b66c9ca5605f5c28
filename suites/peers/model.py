"""The reference language model in Python: the operations of src/model, one for one, so that both launch the same work.

Names of modules give the parameters the names that src/model/sizes.rs lists.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-5


class Linear(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return (self.weight * normed).to(dtype)


class Tables(NamedTuple):
    """What all layers share in a forward pass: rotations (seq, d_head / 2), and where a key lies after its query."""

    cos: Tensor
    sin: Tensor
    hidden: Tensor


def rotations(theta: float, d_head: int, context_length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / d_head), both (context_length, d_head / 2)."""
    exponents = torch.arange(0, d_head, 2, dtype=torch.float64) / -d_head
    frequencies = (exponents * math.log(theta)).exp()
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotated(x: Tensor, tables: Tables) -> Tensor:
    """Turns the pair (x[2i], x[2i + 1]) at each position; x is (..., seq, d_head)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([tables.cos * even - tables.sin * odd, tables.sin * even + tables.cos * odd], -1).flatten(-2)


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class Attention(nn.Module):
    def __init__(self, d_model: int, num_heads: int, attention: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_plain = {"plain": True, "sdpa": False}[attention]
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        batch, seq, d_model = x.shape
        q, k, v = (
            projection(x).view(batch, seq, self.num_heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, tables), rotated(k, tables)
        if self.is_plain:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(tables.hidden, float("-inf"))
            o = torch.softmax(scores, dim=-1) @ v
        else:
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(o.transpose(1, 2).reshape(batch, seq, d_model))


class Block(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int, attention: str) -> None:
        super().__init__()
        self.attn = Attention(d_model, num_heads, attention)
        self.ffn = SwiGLU(d_model, d_ff)
        self.ln1 = RMSNorm(d_model)
        self.ln2 = RMSNorm(d_model)

    def forward(self, h: Tensor, tables: Tables) -> Tensor:
        h = h + self.attn(self.ln1(h), tables)
        return h + self.ffn(self.ln2(h))


class Model(nn.Module):
    """Logits (batch, seq, vocab_size) of tokens (batch, seq); every value must be loaded before use."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float,
        attention: str = "plain",
    ) -> None:
        super().__init__()
        cos, sin = rotations(rope_theta, d_model // num_heads, context_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        # True where a key lies after its query.
        hidden = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)
        self.token_embeddings = Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(Block(d_model, num_heads, d_ff, attention) for _ in range(num_layers))
        self.ln_final = RMSNorm(d_model)
        self.lm_head = Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[-1]
        tables = Tables(self.cos[:seq], self.sin[:seq], self.hidden[:seq, :seq])
        h = self.token_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, tables)
        return self.lm_head(self.ln_final(h))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(logits)[target], in the operations of src/model/loss.rs."""
    shifted = logits - logits.max(-1, keepdim=True)[0]
    log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_probabilities.gather(-1, targets[..., None]).mean()
