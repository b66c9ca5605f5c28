"""Attention by an autograd function: its output, the one logsumexp that it saves, and its gradients."""

import pytest
import torch

from .adapters import get_flashattention_autograd_function_pytorch, get_flashattention_autograd_function_triton

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton runs on a GPU")


def on(device):
    torch.manual_seed(3)
    return [torch.randn(2, 32, 16, device=device, requires_grad=True) for _ in range(3)]


def definition(q, k, v, is_causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores + torch.full_like(scores, -1e6).triu(1)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def require_equal(function, device, is_causal):
    ours, theirs = on(device), on(device)
    o = function.apply(*ours, is_causal)
    o_expected, lse_expected = definition(*theirs, is_causal)
    (lse,) = [saved for saved in o.grad_fn.saved_tensors if saved.shape == (2, 32)]
    o.sum().backward()
    o_expected.sum().backward()
    actual = [o, lse, *(leaf.grad for leaf in ours)]
    torch.testing.assert_close(actual, [o_expected, lse_expected, *(t.grad for t in theirs)], rtol=1e-2, atol=1e-2)


def test_pytorch():
    require_equal(get_flashattention_autograd_function_pytorch(), "cpu", False)


@NEEDS_GPU
@pytest.mark.parametrize("is_causal", [False, True])
def test_triton(is_causal):
    require_equal(get_flashattention_autograd_function_triton(), "cuda", is_causal)
