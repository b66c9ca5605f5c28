"""FlashAttention-2 through our kernels: Hopper's or the portable ones on a GPU, tensor operations on a CPU."""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, without ever holding a matrix of scores.

    Args:
        q: (..., n_queries, d).
        k: (..., n_keys, d), with q's leading dimensions, dtype and device. q may have a multiple of k's heads, the last
            leading dimension: then each head of k and v serves as many neighbouring heads of q (grouped queries).
        v: (..., n_keys, d), as k.
        is_causal: query i sees key j where i >= j, both counted from the start.

    Returns:
        o: (..., n_queries, d), contiguous, in q's dtype.

    The first call with heads in groups compiles its kernels, in seconds, and keeps them in the user's cache.
    On a GPU of compute capability 9.0: bfloat16 and float16 with d a multiple of 8 up to 128, float32 with d of 16, 32, 64
    or 128. From 8.0 on: the three types with these d. On a CPU: every floating-point type and every d.
    Under torch.autocast the inputs are cast to its dtype, as PyTorch's own attention does. Gradients of q, k and v exist
    once; their own derivatives do not. `torch.use_deterministic_algorithms(True)` chooses kernels that repeat every bit.
    `torch.ops.cs336.flash_attention` also returns lse (..., n_queries), the logsumexp of each query's scores, which is
    not differentiable.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit each other or the kernels, by name; no memory for the result
            on a CPU.
        NotImplementedError: a forward-mode derivative.
        torch.OutOfMemoryError: no memory for the result on a GPU.
    """
    return torch.ops.cs336.flash_attention(q, k, v, is_causal)[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`, with its arguments and shapes.

    Args:
        query: (..., n_queries, d).
        key: (..., n_keys, d).
        value: (..., n_keys, d).

    Returns:
        (..., n_queries, d).

    What our kernels do not take (a mask, dropout, another scale, inputs on a CPU, an unusual d or dtype) goes to PyTorch's function. The first call of each reason warns and names it.
    """
    reason = _why_not(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    if reason is None:
        return torch.ops.cs336.flash_attention(query, key, value, is_causal)[0]
    _warn_once(reason)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None, enable_gqa: bool
) -> str | None:
    if mask is not None:
        return "attn_mask is given; our kernels mask causally or not at all"
    if dropout_p != 0.0:
        return "dropout_p is not 0; our kernels drop nothing"
    if q.dim() < 2 or k.shape != v.shape or q.shape[-1] != k.shape[-1] or not _heads_fit(q, k, enable_gqa):
        return "query, key and value differ in batch, heads or d; our kernels need them equal, or query heads in groups"
    if q.dtype != k.dtype or q.dtype != v.dtype or q.device != k.device or q.device != v.device:
        return "query, key and value differ in dtype or device; our kernels need them equal"
    if 0 in q.shape or 0 in k.shape:
        return "a dimension is 0; our kernels need every dimension above 0"
    if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6):
        return "scale is given; our kernels use 1/sqrt(d)"
    if not q.is_cuda:
        return "the inputs are not on a GPU, where alone our kernels run"
    return _unserved(q.dtype, q.device, q.shape[-1]) or None


def _heads_fit(q: Tensor, k: Tensor, enable_gqa: bool) -> bool:
    if q.shape[:-2] == k.shape[:-2]:
        return True
    in_groups = enable_gqa and q.dim() == k.dim() >= 3 and q.shape[:-3] == k.shape[:-3]
    return in_groups and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0


# torch.compile asks once, while it traces: the answer depends on constants only.
@torch.compiler.assume_constant_result
def _unserved(dtype: torch.dtype, device: torch.device, d: int) -> str:
    key = (dtype, device, d)
    if key not in _known:
        _known[key] = torch.ops.cs336.unserved(*key)
    return _known[key]


_known: dict[tuple[torch.dtype, torch.device, int], str] = {}
_warned: set[str] = set()


@torch.compiler.assume_constant_result
def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"cs336: PyTorch computes this attention: {reason}", stacklevel=3)
