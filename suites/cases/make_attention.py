"""Golden cases of kind attention, by PyTorch's own operators: softmax, logsumexp and autograd, computed in float64.

Run as `python suites/cases/make_attention.py`; it rewrites the files beside itself, and the same bytes come out each
time. The inputs are rounded to the case's dtype first, so that the expected values belong to exactly the numbers in
the file.
"""

import math

import torch
from make_model import save

# Half the spacing of the outputs' dtype bounds what rounding alone may cost; twice that leaves room for float32
# accumulation over these few keys. Gradients of bfloat16 and float16 also see o rounded (through D).
TOLERANCES = {
    torch.float32: ("1e-4", "1e-5"),
    torch.float64: ("1e-9", "1e-11"),
    torch.bfloat16: ("1e-2", "3e-2"),
    torch.float16: ("2e-3", "4e-3"),
}


def make(name, leading, n_queries, n_keys, d, is_causal, dtype, seed, scale=1.0, gradient=True, tolerances=None):
    torch.manual_seed(seed)

    def draw(n, factor=1.0):
        return (torch.randn(*leading, n, d, dtype=torch.float64) * factor).to(dtype)

    q, k, v, do = draw(n_queries, scale), draw(n_keys, scale), draw(n_keys), draw(n_queries)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-2, -1) / math.sqrt(d)
    if is_causal:
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    o, lse = scores.softmax(-1) @ wide[2], scores.logsumexp(-1)
    tensors = {"q": q, "k": k, "v": v, "o": o.detach().to(dtype)}
    tensors["lse"] = lse.detach() if dtype == torch.float64 else lse.detach().float()
    if gradient:
        gradients = torch.autograd.grad(o, wide, do.double())
        tensors |= {"do": do} | {n: g.to(dtype) for n, g in zip(("dq", "dk", "dv"), gradients)}
    rtol, atol = tolerances or TOLERANCES[dtype]
    metadata = {
        "kind": "attention",
        "is_causal": str(is_causal).lower(),
        "rtol": rtol,
        "atol": atol,
        "made_by": f"torch {torch.__version__}",
    }
    save(f"attention_{name}", tensors, **metadata)


if __name__ == "__main__":
    make("float32", (2,), 32, 32, 16, False, torch.float32, seed=0)
    make("float32_causal", (2,), 48, 48, 16, True, torch.float32, seed=1)
    make("float32_ragged", (1,), 37, 150, 24, True, torch.float32, seed=2)
    make("float32_fewer_keys", (2,), 70, 9, 8, True, torch.float32, seed=3)
    # Scores near a thousand: exp of them overflows float32, their gradients vanish almost everywhere.
    make("float32_large_scores", (1,), 20, 40, 16, False, torch.float32, seed=4, scale=16.0, gradient=False)
    make("float32_heads", (2, 3), 10, 12, 8, True, torch.float32, seed=5)
    make("float64_causal", (1,), 19, 19, 5, True, torch.float64, seed=6)
    make("bfloat16_causal", (2,), 40, 40, 16, True, torch.bfloat16, seed=7)
    # dv sums over every query. A sum in bfloat16, as in libtorch's backward on the CPU, has a larger error than the single
    # rounding to bfloat16 that these tolerances allow.
    one_key = {"seed": 11, "tolerances": ("1e-2", "1e-2")}
    make("bfloat16_one_key", (1,), 300, 1, 16, True, torch.bfloat16, **one_key)
    make("float16", (2,), 33, 47, 16, False, torch.float16, seed=8)
    make("float32_one_key", (3,), 5, 1, 1, False, torch.float32, seed=9)
