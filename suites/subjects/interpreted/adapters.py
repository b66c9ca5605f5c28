"""The Triton function alone, as a kernel with a loop over tiles of keys whose number is known when it runs."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n_queries, n_keys, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    tile, batch = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, D)[None, :]
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    of_queries = (batch * n_queries + queries)[:, None] * D + columns
    q = tl.load(q_ptr + of_queries, mask=queries[:, None] < n_queries, other=0.0)
    o = tl.zeros((QUERIES, D), tl.float32)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    for j in range(tl.cdiv(n_keys, KEYS)):
        keys = j * KEYS + tl.arange(0, KEYS)
        of_keys = (batch * n_keys + keys)[:, None] * D + columns
        k = tl.load(k_ptr + of_keys, mask=keys[:, None] < n_keys, other=0.0)
        v = tl.load(v_ptr + of_keys, mask=keys[:, None] < n_keys, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        is_seen = keys[None, :] < n_keys
        if IS_CAUSAL:
            is_seen = is_seen & (queries[:, None] >= keys[None, :])
        scores = tl.where(is_seen, scores, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp(scores - largest[:, None])
        shrunk = tl.exp(before - largest)
        total = total * shrunk + tl.sum(p, 1)
        o = o * shrunk[:, None] + tl.dot(p.to(v.dtype), v)
    tl.store(o_ptr + of_queries, o / total[:, None], mask=queries[:, None] < n_queries)
    tl.store(lse_ptr + batch * n_queries + queries, largest + tl.log(total), mask=queries < n_queries)


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        *batch, n_queries, d = q.shape
        o, lse = torch.empty_like(q), torch.empty(q.shape[:-1], device=q.device)
        grid = (triton.cdiv(n_queries, 32), torch.Size(batch).numel())
        forward_kernel[grid](q, k, v, o, lse, n_queries, k.shape[-2], d**-0.5, d, 32, 32, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        return o


def get_flashattention_autograd_function_triton() -> type:
    return FlashAttention
