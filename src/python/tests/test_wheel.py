"""Tests of the installed wheel on a CPU: operators, torch.compile, AdamW, and two Gloo ranks against a single process."""

import copy
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cs336
import test_gpu
import test_misuse
import test_official
import test_ranks
from cs336 import adapters
from test_misuse import raised

OPS = torch.ops.cs336


def inputs(*shape: int, n_keys: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v, which require gradients, and d_o."""
    generator = torch.Generator().manual_seed(0)
    of_keys = (*shape[:-2], n_keys or shape[-2], shape[-1])
    draw = lambda size: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    leaves = [draw(size).requires_grad_() for size in (shape, of_keys, of_keys)]
    return [*leaves, draw(shape)]


def definition(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """o and lse by whole matrices of scores."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(o: Tensor, d_o: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o, leaves, d_o)


def outputs_and_gradients_are_those_of_the_definition() -> None:
    for shape, n_keys in [((4, 128, 64), None), ((2, 3, 37, 8), 21), ((5, 16), 9)]:
        for is_causal in (False, True):
            q, k, v, d_o = inputs(*shape, n_keys=n_keys, dtype=torch.float64)
            expected, expected_lse = definition(q, k, v, is_causal)
            o, lse = OPS.flash_attention(q, k, v, is_causal)
            assert o.is_contiguous() and not lse.requires_grad
            torch.testing.assert_close((o, lse), (expected, expected_lse.detach()))
            ours = gradients(cs336.flash_attention(q, k, v, is_causal), d_o, [q, k, v])
            torch.testing.assert_close(ours, gradients(expected, d_o, [q, k, v]))


def strided_inputs_and_gradients_are_read() -> None:
    q, k, v, _ = inputs(2, 9, 3, 16)
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    loss = lambda attention: attention(*heads).sum()  # noqa: E731
    ours = torch.autograd.grad(loss(cs336.flash_attention), [q, k, v])
    torch.testing.assert_close(ours, torch.autograd.grad(loss(F.scaled_dot_product_attention), [q, k, v]))


def operators_pass_opcheck() -> None:
    q, k, v, d_o = inputs(2, 3, 33, 16)
    for arguments in [(q, k, v, True), (q.detach(), k, v.detach(), False)]:
        torch.library.opcheck(OPS.flash_attention.default, arguments)
    q, k, v = (t.detach() for t in (q, k, v))
    o, lse = OPS.flash_attention(q, k, v, True)
    torch.library.opcheck(OPS.flash_attention_backward.default, (q, k, v, o, lse, d_o, True))
    lists = [[torch.ones(5), torch.ones(2, 3)] for _ in range(4)]
    steps = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    torch.library.opcheck(OPS.fused_adamw_.default, (*lists, steps), options)


def attention_stays_one_node_of_a_compiled_graph() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Callable:
        graphs.append(graph.code)
        return graph.forward

    q, k, v, d_o = inputs(2, 33, 16)
    block = lambda q, k, v: cs336.flash_attention(q * 2, k, v, is_causal=True) + 1  # noqa: E731
    expected = block(q, k, v)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend=backend)(q, k, v), expected)
    assert len(graphs) == 1 and graphs[0].count("cs336.flash_attention") == 1, graphs
    for backend_name in ("aot_eager", "inductor"):
        torch.compiler.reset()
        compiled = torch.compile(block, fullgraph=True, backend=backend_name)
        o = compiled(q, k, v)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(gradients(o, d_o, [q, k, v]), gradients(block(q, k, v), d_o, [q, k, v]))
    longer = inputs(2, 50, 16)[:3]
    torch.testing.assert_close(compiled(*longer), block(*longer))


def the_drop_in_leaves_to_pytorch_what_it_cannot_serve_and_warns_once() -> None:
    q, k, v, _ = inputs(2, 3, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    calls = [{}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}, {"scale": 0.25}, {"attn_mask": mask}]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for options in calls:
            ours = cs336.scaled_dot_product_attention(q, k, v, **options)
            torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **options))
        cs336.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        cs336.scaled_dot_product_attention(q, k[:1], v[:1])
    words = [str(warning.message) for warning in said if "cs336" in str(warning.message)]
    # scale=0.25 is 1/sqrt(16).
    for part in ("not on a GPU", "attn_mask", "scale", "differ in batch, heads or d"):
        assert len([text for text in words if part in text]) == 1, words
    assert len(words) == 4, words
    compiled = torch.compile(cs336.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))


def autocast_computes_in_its_dtype() -> None:
    q, k, v, d_o = inputs(2, 33, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = cs336.flash_attention(q, k, v.bfloat16(), True)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), definition(q, k, v, True)[0], rtol=2e-2, atol=2e-2)
    assert all(g.dtype == torch.float32 for g in gradients(o, d_o.bfloat16(), [q, k, v]))


def errors_name_the_tensor_and_its_shape() -> None:
    q, k, v, d_o = inputs(2, 5, 8)
    said = raised(RuntimeError, lambda: cs336.flash_attention(q, k[..., :4], v))
    assert said.startswith("k has shape [2, 5, 4]"), said
    said = raised(RuntimeError, lambda: cs336.flash_attention(q, k.double(), v))
    assert "k is Double and q is Float" in said, said
    said = raised(RuntimeError, lambda: cs336.flash_attention(q[:0], k[:0], v[:0]))
    assert "every dimension above 0" in said, said
    said = raised(RuntimeError, lambda: cs336.flash_attention(*(t.detach().long() for t in (q, k, v))))
    assert "Int64 is no floating-point kind" in said, said
    first = torch.autograd.grad(cs336.flash_attention(q, k, v), q, d_o, create_graph=True)[0]
    said = raised(RuntimeError, lambda: first.sum().backward())
    assert "flash_attention_backward" in said, said
    assert "need a GPU" in OPS.unserved(torch.bfloat16, torch.device("cpu"), 64)


def the_official_attention_test_passes() -> None:
    q, k, v, d_o = inputs(4, 128, 64)
    for get in (
        adapters.get_flashattention_autograd_function_pytorch,
        adapters.get_flashattention_autograd_function_triton,
    ):
        for is_causal in (False, True):
            o = get().apply(q, k, v, is_causal)
            expected, expected_lse = definition(q, k, v, is_causal)
            saved = [t for t in o.grad_fn.saved_tensors if t.shape == (4, 128)]
            assert len(saved) == 1
            torch.testing.assert_close((o, saved[0]), (expected, expected_lse), rtol=1e-2, atol=1e-2)
            ours, theirs = (gradients(of, d_o, [q, k, v]) for of in (o, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def adamw_steps_as_pytorchs_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3), (7,), ()]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ours = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        theirs = [t.detach().clone().requires_grad_() for t in ours]
        options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
        mine, reference = cs336.AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
        for step in range(6):
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                # A parameter without a gradient is left alone.
                a.grad = None if i == step else torch.randn(a.shape, generator=generator).to(dtype)
                b.grad = None if a.grad is None else a.grad.clone()
            mine.step()
            reference.step()
            if step == 3:
                mine = cs336.AdamW(ours, **options)
                mine.load_state_dict(copy.deepcopy(reference.state_dict()))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (dtype, a, b)
    said = raised(ValueError, lambda: cs336.AdamW(ours, betas=(0.9, 1.0)))
    assert "beta2 is 1.0" in said, said


def the_readmes_example_runs() -> None:
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    lines = [line.removeprefix("    ") for line in readme.splitlines() if line.startswith("    ")]
    # The same on one rank of a CPU, and shorter.
    example = "\n".join(lines).replace('"nccl"', '"gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1')
    example = re.sub(r"device = .*", 'device = "cpu"', example).replace("range(10)", "range(2)").replace("1024", "128")
    assert len(lines) == 10 and "cs336.flash_attention" in example
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TESTS = [
    outputs_and_gradients_are_those_of_the_definition,
    strided_inputs_and_gradients_are_read,
    operators_pass_opcheck,
    attention_stays_one_node_of_a_compiled_graph,
    the_drop_in_leaves_to_pytorch_what_it_cannot_serve_and_warns_once,
    autocast_computes_in_its_dtype,
    errors_name_the_tensor_and_its_shape,
    the_official_attention_test_passes,
    adamw_steps_as_pytorchs_bit_for_bit,
    the_readmes_example_runs,
    *test_official.TESTS,
    *test_ranks.TESTS,
    *test_misuse.TESTS,
    *test_gpu.TESTS,
]


def main() -> int:
    """Runs the tests whose names hold an argument, or all; 1 if one fails."""
    failed = 0
    for test in TESTS:
        if sys.argv[1:] and not any(part in test.__name__ for part in sys.argv[1:]):
            continue
        if test in test_gpu.TESTS and not torch.cuda.is_available():
            print(f"skipped {test.__name__}: there is no GPU", flush=True)
            continue
        if test in test_official.NEED_PYTEST and not test_official.HAS_PYTEST:
            print(f"skipped {test.__name__}: there is no pytest", flush=True)
            continue
        try:
            test()
            print(f"passed {test.__name__}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {test.__name__}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
