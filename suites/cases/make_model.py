"""Makes the golden cases of the model: PyTorch's own operators in float64, torch.optim.AdamW, and saved activations.

Run as `python suites/cases/make_model.py` from the root of the repository; the same bytes come out each time. With a
folder and a count it makes so many random cases of AdamW there instead.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = Path(__file__).parent
CONFIG = {"vocab_size": 50, "context_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64}
THETA = 10000.0
EPS = 1e-5
BATCH, SEQ = 2, 12


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}


def save(name, tensors, folder=HERE, **metadata):
    """Writes a safetensors file; the library's own writer orders the metadata differently each time."""
    header, data = {"__metadata__": {key: str(value) for key, value in metadata.items()}}, b""
    for key, value in tensors.items():
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (Path(folder) / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


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


def adamw_bfloat16():
    torch.manual_seed(347)
    options = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
    param = torch.randn(7, 5).bfloat16()
    grads = (torch.randn(20, 7, 5) * torch.logspace(0, -3, 7)[:, None]).bfloat16()
    after = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([after], betas=(0.9, 0.99), foreach=False, **options)
    for grad in grads:
        after.grad = grad.clone()
        optimizer.step()
    # The same operations round alike. One unit of bfloat16, at most 2^-7 of the value, is left to processors that fuse
    # a product and a sum; rounding g^2 and (1 - beta2) g^2 separately is off by eleven times that here.
    tensors = {"param": param, "grads": grads, "param_after": after}
    save("adamw_bfloat16", tensors, kind="adamw", rtol=2**-7, atol=1e-6, beta1=0.9, beta2=0.99, **options)


def adamw_float64():
    torch.manual_seed(348)
    options = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}
    # 1 - beta2^t keeps few digits of beta2^t, so that the last place of the power shows in the eleventh of the step.
    random_adamw("adamw_float64", torch.float64, (3,), (0.999, 0.9999999), rtol=1e-13, atol=0.0, **options)


def random_adamw(name, dtype, shape, betas, folder=HERE, steps=12, rtol=0.0, atol=0.0, **options):
    param = torch.randn(shape, dtype=torch.float64).to(dtype)
    grads = (torch.randn(steps, *shape, dtype=torch.float64) * 10 ** torch.empty(()).uniform_(-4, 2)).to(dtype)
    after = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([after], betas=betas, foreach=False, **options)
    for grad in grads:
        after.grad = grad.clone()
        optimizer.step()
    tensors = {"param": param, "grads": grads, "param_after": after}
    metadata = {"kind": "adamw", "rtol": rtol, "atol": atol, "beta1": betas[0], "beta2": betas[1]}
    save(name, tensors, folder, **metadata, **options)


def random_adamws(folder, count):
    """Cases of random hyperparameters for the machine that makes them: without a tolerance, since it grades them too."""
    torch.manual_seed(349)
    uniform = lambda low, high: torch.empty((), dtype=torch.float64).uniform_(low, high).item()
    for i in range(count):
        dtype = (torch.float64, torch.float32, torch.bfloat16, torch.float16)[i % 4]
        shape = ((), (1,), (7,), (3, 5))[i // 4 % 4]
        betas = (1 - 10 ** uniform(-4, 0), 1 - 10 ** uniform(-8, 0))
        # A smaller eps is 0 in float16, and 0/0 no number in any implementation.
        eps = 10 ** uniform(-6 if dtype == torch.float16 else -12, -3)
        options = {"lr": 10 ** uniform(-5, 0), "eps": eps, "weight_decay": uniform(0, 1) * (i % 3)}
        random_adamw(f"random_{i}", dtype, shape, betas, folder, steps=1 + i % 17, **options)


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


def recorded_loss(p, config, tokens, targets, cos, sin, hidden):
    """The operations of src/model in their order, one PyTorch operator for one of libtorch's."""
    batch, seq = tokens.shape
    heads = config["num_heads"]

    def norm(x, gain):
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return gain * (x * torch.rsqrt(mean_square + EPS))

    def rope(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([cos * even - sin * odd, sin * even + cos * odd], -1).flatten(-2)

    h = F.embedding(tokens, p["token_embeddings.weight"])
    for i in range(config["num_layers"]):
        w = lambda part: p[f"layers.{i}.{part}.weight"]
        x = norm(h, w("ln1"))
        q, k, v = (F.linear(x, w(f"attn.{n}_proj")).view(batch, seq, heads, -1).transpose(1, 2) for n in "qkv")
        scores = rope(q) @ rope(k).transpose(-2, -1) / q.shape[-1] ** 0.5
        o = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        h = h + F.linear(o.transpose(1, 2).reshape(batch, seq, -1), w("attn.output_proj"))
        y = norm(h, w("ln2"))
        gate = F.linear(y, w("ffn.w1"))
        h = h + F.linear(gate * torch.sigmoid(gate) * F.linear(y, w("ffn.w3")), w("ffn.w2"))
    logits = F.linear(norm(h, p["ln_final.weight"]), p["lm_head.weight"])
    shifted = logits - logits.max(-1, keepdim=True)[0]
    log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_probabilities.gather(-1, targets[..., None]).mean()


def saved_activations():
    """Counts the bytes that autograd saves, each storage once; the memory model must predict them to the byte.

    Fake CUDA tensors follow CUDA's autocast rules (the CPU's differ: its softmax and exp stay in bfloat16) without a GPU.
    """
    counted = {"config": CONFIG | {"rope_theta": THETA}, "batch": BATCH, "seq": SEQ, "saved_bytes": {}}
    weights = {tuple(shape) for _, shape in parameter_shapes()}
    with FakeTensorMode(), torch.device("cuda"):
        parameters = {name: torch.empty(shape).requires_grad_() for name, shape in parameter_shapes()}
        tokens, targets = torch.zeros(2, BATCH, SEQ, dtype=torch.int64).unbind()
        tokens, targets = tokens.clone(), targets.clone()
        positions = torch.arange(CONFIG["context_length"])
        hidden = (positions[:, None] < positions)[:SEQ, :SEQ]
        cache = torch.empty(2, CONFIG["context_length"], CONFIG["d_model"] // CONFIG["num_heads"] // 2)
        own = {value.untyped_storage()._cdata for value in parameters.values()}
        for precision in ("float32", "bfloat16"):
            saved = {}

            def pack(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in own and tensor.dim() > 0:
                    is_copy = tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & weights
                    saved[storage._cdata] = (storage, bool(is_copy))
                return tensor

            # torch.autocast("cuda") refuses to be enabled without a GPU; its switch does not.
            torch.set_autocast_enabled("cuda", precision == "bfloat16")
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            torch.autocast_increment_nesting()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                recorded_loss(parameters, CONFIG, tokens, targets, cache[0, :SEQ], cache[1, :SEQ], hidden)
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", False)
            counted["saved_bytes"][precision] = sum(s.nbytes() for s, is_copy in saved.values() if not is_copy)
            counted["weight_copies"] = sum(s.nbytes() for s, is_copy in saved.values() if is_copy)
    (HERE / "saved_activations.json").write_text(json.dumps(counted, indent=2) + "\n")


if __name__ == "__main__" and len(sys.argv) == 3:
    random_adamws(sys.argv[1], int(sys.argv[2]))
elif __name__ == "__main__":
    transformer()
    adamw()
    adamw_bfloat16()
    adamw_float64()
    rmsnorm()
    rope()
    saved_activations()
