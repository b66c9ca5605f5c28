"""FlashAttention-2 in tensor operations, with the mistakes of `suites/mutants/attention.rs`."""

import math

import torch

from bug import has

QUERIES, KEYS = 16, 16


def scores(q, k, i, j, is_causal):
    scale = 1 / q.shape[-1] if has("scale_by_d") else q.shape[-1] ** -0.5
    s = q @ k.transpose(-2, -1) * scale
    if not is_causal:
        return s
    shift = i - j
    if has("mask_hides_diagonal"):
        shift -= 1
    if has("mask_shows_next_key"):
        shift += 1
    if has("mask_in_tile_coordinates"):
        shift = 0
    hidden = torch.ones_like(s, dtype=torch.bool).triu(shift + 1)
    return s.masked_fill(hidden, -math.inf)


def forward(q, k, v, is_causal):
    if has("queries_beyond_128_forgotten"):
        q = torch.cat((q[:, :128], 0 * q[:, 128:]), 1)
    if has("sequences_beyond_4_forgotten"):
        q = torch.cat((q[:4], 0 * q[4:]))
    os, lses = [], []
    wide = torch.bfloat16 if has("accumulates_in_bfloat16") else torch.float32
    for i in range(0, q.shape[-2], QUERIES):
        q_i = q[..., i : i + QUERIES, :].to(wide)
        o, l = torch.zeros_like(q_i), q_i.new_zeros((*q_i.shape[:-1], 1))
        m = torch.full_like(l, -math.inf)
        for j in range(0, k.shape[-2], KEYS):
            if has("last_key_tile_dropped") and 0 < j and j + KEYS >= k.shape[-2]:
                continue
            k_j, v_j = k[..., j : j + KEYS, :].to(wide), v[..., j : j + KEYS, :].to(wide)
            s = scores(q_i, k_j, i, j, is_causal and not has("mask_ignored"))
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            if has("no_maximum"):
                m_new = torch.zeros_like(m)
            if has("maximum_of_first_tile") and j > 0:
                m_new = m
            p, rescale = torch.exp(s - m_new), torch.exp(m - m_new)
            l = (l if has("sum_not_rescaled") else l * rescale) + p.sum(-1, keepdim=True)
            o = (o if has("output_not_rescaled") else o * rescale) + p @ v_j
            m = m_new
        lse = m + torch.log(l)
        if has("lse_base_two"):
            lse = m / math.log(2) + torch.log2(l)
        if has("lse_without_maximum"):
            lse = torch.log(l)
        os.append((o / l).to(q.dtype))
        lses.append(lse.squeeze(-1))
    lse = torch.cat(lses, -1)
    if has("lse_in_bfloat16"):
        lse = lse.to(torch.bfloat16)
    return torch.cat(os, -2), lse.to(torch.float32)


def backward(q, k, v, o, lse, d_o, is_causal):
    scale = q.shape[-1] ** -0.5
    d = (o * (o if has("d_from_output_only") else d_o)).sum(-1, keepdim=True)
    if has("d_missing"):
        d = torch.zeros_like(d)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, k.shape[-2], KEYS):
        keys = (..., slice(j, j + KEYS), slice(None))
        for i in range(0, q.shape[-2], QUERIES):
            rows = (..., slice(i, i + QUERIES), slice(None))
            s = scores(q[rows], k[keys], i, j, is_causal and not has("backward_mask_ignored"))
            p = torch.exp(s - lse[..., i : i + QUERIES, None])
            if has("exponentials_apart"):
                p = torch.exp(s) / torch.exp(lse[..., i : i + QUERIES, None])
            if has("probabilities_without_lse"):
                p = torch.softmax(s, -1).nan_to_num(0.0)
            dp = d_o[rows] @ v[keys].transpose(-2, -1)
            dv[keys] += (dp if has("dv_from_dp") else p).transpose(-2, -1) @ d_o[rows]
            ds = p * (dp - d[rows])
            if has("dq_overwritten_by_each_tile"):
                dq[rows] = ds @ k[keys] * scale
            else:
                dq[rows] += ds @ k[keys] * scale
            dk[keys] += ds.transpose(-2, -1) @ q[rows] * (1.0 if has("dk_unscaled") else scale)
    return dq, dk, dv


if has("compiled"):
    backward = torch.compile(backward, fullgraph=True, dynamic=False, backend="eager")


class Attention(torch.autograd.Function):
    of_sizes = {}

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = forward(q, k, v, is_causal)
        more = [o.sum(-1)] if has("saves_row_sums_too") else []
        ctx.save_for_backward(q, k, v, o, lse, *more)
        ctx.is_causal = is_causal
        if ctx.needs_input_grad[0]:
            Attention.last = (q, k, v, o, lse), is_causal
            Attention.of_sizes[q.shape, is_causal] = Attention.last
        return o

    @staticmethod
    def backward(ctx, d_o):
        (q, k, v, o, lse, *_), is_causal = ctx.saved_tensors, ctx.is_causal
        if has("tensors_on_the_class"):
            (q, k, v, o, lse), _ = Attention.last
        if has("tensors_by_size_on_the_class"):
            (q, k, v, o, lse), _ = Attention.of_sizes[q.shape, is_causal]
        if has("is_causal_on_the_class"):
            _, is_causal = Attention.last
        return *backward(q, k, v, o, lse, d_o, is_causal), None
