"""Makes the golden cases of the model: PyTorch's own operators in float64, torch.optim.AdamW, and saved activations.

Run as `python suites/cases/make_model.py` from the root of the repository; the same bytes come out each time.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HERE = Path(__file__).parent
CONFIG = {"vocab_size": 50, "context_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64}
THETA = 10000.0
EPS = 1e-5
BATCH, SEQ = 2, 12


def save(name, tensors, **metadata):
    tensors = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(tensors, HERE / f"{name}.safetensors", {key: str(value) for key, value in metadata.items()})


def rotate(x, theta):
    """Rotary positions as multiplication of complex numbers; x is (..., seq, d_head) in float64."""
    seq, d_head = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    pairs = torch.view_as_complex(x.unflatten(-1, (d_head // 2, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def parameter_shapes():
    v, d, f = CONFIG["vocab_size"], CONFIG["d_model"], CONFIG["d_ff"]
    yield "token_embeddings.weight", (v, d)
    for i in range(CONFIG["num_layers"]):
        for part in ("q_proj", "k_proj", "v_proj", "output_proj"):
            yield f"layers.{i}.attn.{part}.weight", (d, d)
        yield f"layers.{i}.ffn.w1.weight", (f, d)
        yield f"layers.{i}.ffn.w2.weight", (d, f)
        yield f"layers.{i}.ffn.w3.weight", (f, d)
        yield f"layers.{i}.ln1.weight", (d,)
        yield f"layers.{i}.ln2.weight", (d,)
    yield "ln_final.weight", (d,)
    yield "lm_head.weight", (v, d)


def logits_of(p, tokens):
    d, heads = CONFIG["d_model"], CONFIG["num_heads"]
    h = F.embedding(tokens, p["token_embeddings.weight"])
    for i in range(CONFIG["num_layers"]):
        w = lambda part: p[f"layers.{i}.{part}.weight"]
        x = F.rms_norm(h, (d,), w("ln1"), EPS)
        q, k, v = (F.linear(x, w(f"attn.{n}_proj")).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
        o = F.scaled_dot_product_attention(rotate(q, THETA), rotate(k, THETA), v, is_causal=True)
        h = h + F.linear(o.transpose(1, 2).flatten(-2), w("attn.output_proj"))
        y = F.rms_norm(h, (d,), w("ln2"), EPS)
        h = h + F.linear(F.silu(F.linear(y, w("ffn.w1"))) * F.linear(y, w("ffn.w3")), w("ffn.w2"))
    return F.linear(F.rms_norm(h, (d,), p["ln_final.weight"], EPS), p["lm_head.weight"])


def transformer():
    torch.manual_seed(336)
    # Values are exact in float32, so that the float64 oracle and a float32 model start from the same numbers. Gains
    # differ from 1, and the embedding is small enough that a wrong epsilon shows in the first norm.
    parameters = {}
    for name, shape in parameter_shapes():
        scale = 0.02 if name.startswith("token_emb") else 1 / shape[-1] ** 0.5
        value = 1 + 0.3 * torch.randn(shape) if len(shape) == 1 else scale * torch.randn(shape)
        parameters[name] = value.float().double().requires_grad_()
    tokens = torch.randint(CONFIG["vocab_size"], (BATCH, SEQ))
    targets = torch.randint(CONFIG["vocab_size"], (BATCH, SEQ))
    logits = logits_of(parameters, tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    tensors = {name: value.float() for name, value in parameters.items()}
    tensors |= {f"grad.{name}": value.grad.float() for name, value in parameters.items()}
    tensors |= {"tokens": tokens, "targets": targets, "logits": logits.float(), "loss": loss.float()}
    save("transformer", tensors, kind="transformer", rtol=1e-4, atol=2e-6, rope_theta=THETA, **CONFIG)


def adamw():
    torch.manual_seed(337)
    options = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
    param = torch.randn(7, 5)
    # Some rows have gradients far below eps, where its place in the formula decides the step.
    grads = torch.randn(60, 7, 5) * torch.logspace(0, -6, 7)[:, None]
    grads[20:25] = 0
    after = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([after], betas=(0.9, 0.99), **options)
    for grad in grads:
        after.grad = grad.clone()
        optimizer.step()
    tensors = {"param": param, "grads": grads, "param_after": after}
    save("adamw", tensors, kind="adamw", rtol=1e-5, atol=1e-6, beta1=0.9, beta2=0.99, **options)


def rmsnorm():
    torch.manual_seed(338)
    # Row i is scaled by 10^-i: from the third on eps matters, and the last is zero.
    x = torch.randn(6, 48) * torch.logspace(0, -5, 6)[:, None] + 0.5 * torch.logspace(0, -5, 6)[:, None]
    x = torch.cat([x, torch.zeros(1, 48)])
    weight = 1 + 0.3 * torch.randn(48)
    y = F.rms_norm(x.double(), (48,), weight.double(), EPS).float()
    save("rmsnorm", {"x": x, "weight": weight, "y": y}, kind="rmsnorm", rtol=1e-5, atol=1e-7, eps=EPS)
    x = x.bfloat16()
    y = F.rms_norm(x.double(), (48,), weight.double(), EPS).bfloat16()
    # One rounding to bfloat16 at the end: where two computations round apart they differ by one unit, at most 2^-7 of the value.
    save("rmsnorm_bfloat16", {"x": x, "weight": weight, "y": y}, kind="rmsnorm", rtol=2**-7, atol=1e-7, eps=EPS)


def rope():
    torch.manual_seed(339)
    x = torch.randn(2, 3, 40, 16)
    y = rotate(x.double(), THETA).float()
    save("rope", {"x": x, "y": y}, kind="rope", rtol=1e-4, atol=1e-5, rope_theta=THETA)


if __name__ == "__main__":
    transformer()
    adamw()
    rmsnorm()
    rope()
