"""FlashAttention-2 in tensor operations: Algorithm 1 forward, Eq. 13-19 backward, both tile by tile."""

import math

import torch
from torch import Tensor

TILE = 16


def scores(q: Tensor, k: Tensor, i: int, j: int, is_causal: bool) -> Tensor:
    """Eq. 4 for the tiles that start at query i and key j."""
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if not is_causal:
        return s
    queries = torch.arange(i, i + q.shape[-2], device=q.device)
    keys = torch.arange(j, j + k.shape[-2], device=q.device)
    return s.masked_fill(queries[:, None] < keys, -math.inf)


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        os, lses = [], []
        for i in range(0, q.shape[-2], TILE):
            q_i = q[..., i : i + TILE, :].to(wide)
            o = torch.zeros_like(q_i)
            l = q_i.new_zeros(q_i.shape[:-1])
            m = torch.full_like(l, -math.inf)
            for j in range(0, k.shape[-2], TILE):
                k_j, v_j = k[..., j : j + TILE, :].to(wide), v[..., j : j + TILE, :].to(wide)
                s = scores(q_i, k_j, i, j, is_causal)
                m_new = torch.maximum(m, s.amax(-1))
                p = torch.exp(s - m_new[..., None])
                rescale = torch.exp(m - m_new)
                l = l * rescale + p.sum(-1)
                o = o * rescale[..., None] + p @ v_j
                m = m_new
            os.append((o / l[..., None]).to(q.dtype))
            lses.append(m + torch.log(l))
        o, lse = torch.cat(os, -2), torch.cat(lses, -1)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, d_o: Tensor) -> tuple[Tensor | None, ...]:
        dtype = ctx.saved_tensors[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v, o, lse, d_o = (t.to(wide) for t in (*ctx.saved_tensors, d_o))
        scale = 1 / math.sqrt(q.shape[-1])
        d = (o * d_o).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for j in range(0, k.shape[-2], TILE):
            keys = (..., slice(j, j + TILE), slice(None))
            for i in range(0, q.shape[-2], TILE):
                rows, queries = (..., slice(i, i + TILE)), (..., slice(i, i + TILE), slice(None))
                p = torch.exp(scores(q[queries], k[keys], i, j, ctx.is_causal) - lse[rows][..., None])
                dp = d_o[queries] @ v[keys].transpose(-2, -1)
                ds = p * (dp - d[rows][..., None])
                dv[keys] += p.transpose(-2, -1) @ d_o[queries]
                dq[queries] += ds @ k[keys] * scale
                dk[keys] += ds.transpose(-2, -1) @ q[queries] * scale
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None
