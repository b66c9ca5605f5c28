"""Tests of the installed wheel that need a GPU; test_wheel.py skips them elsewhere."""

import functools
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cs336

OPS = torch.ops.cs336
# What a result may be off by, of values near 1, for the rounding of each type.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, n_keys: int | None = None) -> list[Tensor]:
    """q, k and v, which require gradients, and d_o."""
    generator = torch.Generator("cuda").manual_seed(0)
    of_keys = (*shape[:-2], n_keys or shape[-2], shape[-1])
    sizes = (shape, of_keys, of_keys, shape)
    drawn = [torch.randn(size, generator=generator, device="cuda").to(dtype) for size in sizes]
    return [*(t.requires_grad_() for t in drawn[:3]), drawn[3]]


def both(attention, tensors: list[Tensor], is_causal: bool) -> list[Tensor]:
    """o, dq, dk and dv."""
    q, k, v, d_o = tensors
    o = attention(q, k, v, is_causal=is_causal)
    return [o, *torch.autograd.grad(o, [q, k, v], d_o)]


def require_close(ours: list[Tensor], tensors: list[Tensor], is_causal: bool) -> None:
    exact = [t.detach().double().requires_grad_() for t in tensors[:3]] + [tensors[3].double()]
    tolerance = TOLERANCES[tensors[0].dtype]
    for mine, expected in zip(ours, both(F.scaled_dot_product_attention, exact, is_causal), strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=tolerance, atol=tolerance)


def kernels_match_float64_in_every_type_and_width() -> None:
    for dtype in TOLERANCES:
        for d in (16, 32, 64, 128) if dtype == torch.float32 else (16, 32, 64, 80, 96, 120, 128):
            for n, n_keys in ((65, 130), (1024, 1024), (2048, 2048)):
                for is_causal in (False, True):
                    tensors = inputs(2, 2, n, d, dtype=dtype, n_keys=n_keys)
                    require_close(both(cs336.flash_attention, tensors, is_causal), tensors, is_causal)


def heads_in_groups_match_float64_and_the_drop_in_serves_them() -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    for dtype in TOLERANCES:
        drawn = [torch.randn(2, heads, 300, 64, generator=generator, device="cuda").to(dtype) for heads in (6, 2, 2, 6)]
        tensors = [*(t.requires_grad_() for t in drawn[:3]), drawn[3]]
        in_groups = functools.partial(cs336.scaled_dot_product_attention, enable_gqa=True)
        exact = [t.detach().double().requires_grad_() for t in drawn[:3]] + [drawn[3].double()]
        expected = both(functools.partial(F.scaled_dot_product_attention, enable_gqa=True), exact, True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = both(in_groups, tensors, True)
        for mine, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def the_first_call_compiles_nothing() -> None:
    """A new process with an empty kernel cache leaves it empty."""
    program = (
        "import torch, cs336\n"
        "for dtype in (torch.bfloat16, torch.float16, torch.float32):\n"
        "    for n in (64, 2048):\n"
        "        q = torch.randn(2, 2, n, 64, device='cuda', dtype=dtype, requires_grad=True)\n"
        "        cs336.flash_attention(q, q, q, True).sum().backward()\n"
        "p = torch.ones(3, device='cuda', requires_grad=True); p.grad = torch.ones_like(p)\n"
        "cs336.AdamW([p]).step()\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "XDG_CACHE_HOME": cache}, check=True)
        assert not list(Path(cache).rglob("*.cubin"))


def the_current_stream_and_a_cuda_graph_are_used() -> None:
    q, k, v, _ = (t.detach() for t in inputs(2, 4, 512, 64))
    expected = cs336.flash_attention(q, k, v, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = q * 1
        assert torch.equal(cs336.flash_attention(late, k, v, True), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cs336.flash_attention(q, k, v, True)
    q.mul_(2)
    graph.replay()
    assert torch.equal(captured, cs336.flash_attention(q, k, v, True))


def results_repeat_where_pytorch_is_told_to_be_deterministic() -> None:
    tensors = inputs(2, 8, 2048, 64)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (both(cs336.flash_attention, tensors, True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def compiled_attention_matches_and_autocast_computes_in_bfloat16() -> None:
    tensors = inputs(2, 4, 512, 64)
    compiled = torch.compile(cs336.scaled_dot_product_attention, fullgraph=True)
    require_close(both(compiled, tensors, True), tensors, True)
    q, k, v, _ = inputs(2, 4, 512, 64, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert cs336.flash_attention(q, k, v).dtype == torch.bfloat16


def operators_pass_opcheck_on_a_gpu() -> None:
    q, k, v, d_o = inputs(2, 4, 256, 64)
    torch.library.opcheck(OPS.flash_attention.default, (q, k, v, True))
    q, k, v = (t.detach() for t in (q, k, v))
    torch.library.opcheck(OPS.flash_attention_backward.default, (q, k, v, *OPS.flash_attention(q, k, v), d_o, False))


def a_width_without_kernels_is_an_error_and_the_drop_in_serves_it() -> None:
    q = torch.randn(2, 4, 64, 144, device="cuda", dtype=torch.bfloat16)
    try:
        cs336.flash_attention(q, q, q)
    except RuntimeError as error:
        assert "not 144" in str(error), error
    else:
        raise AssertionError("d = 144 has no kernels and nothing was said")
    assert "not 144" in OPS.unserved(q.dtype, q.device, 144)
    assert torch.equal(cs336.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


def adamw_matches_pytorchs_and_counts_replays() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    ours = [torch.randn(n, generator=generator, device="cuda").requires_grad_() for n in (5, 4096, 100_003)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    optimizers = cs336.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, device="cuda")
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(3):
        graph.replay()
        optimizers[1].step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert optimizers[0].state[ours[0]]["step"][0] == 8


TESTS = [
    kernels_match_float64_in_every_type_and_width,
    heads_in_groups_match_float64_and_the_drop_in_serves_them,
    the_first_call_compiles_nothing,
    the_current_stream_and_a_cuda_graph_are_used,
    results_repeat_where_pytorch_is_told_to_be_deterministic,
    compiled_attention_matches_and_autocast_computes_in_bfloat16,
    operators_pass_opcheck_on_a_gpu,
    a_width_without_kernels_is_an_error_and_the_drop_in_serves_it,
    adamw_matches_pytorchs_and_counts_replays,
]
