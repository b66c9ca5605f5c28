"""Adapters that break in the way that `way.txt` names."""

import ctypes
import os
import sys
import time
from pathlib import Path

WAY = Path(__file__).with_name("way.txt").read_text(encoding="utf-8").strip()

if WAY == "import_error":
    raise ValueError("the adapters cannot be imported")
if WAY == "missing_module":
    import einops_that_nobody_installed  # noqa: F401
if WAY == "exit_on_import":
    sys.exit(0)

import torch


def misbehave(o):
    """What each way does to a right result."""
    match WAY:
        case "not_implemented":
            raise NotImplementedError
        case "crash":
            ctypes.string_at(0)
        case "hang":
            time.sleep(3600)
        case "infinite_loop":
            while True:
                pass
        case "exit":
            sys.exit(0)
        case "exit_at_once":
            os._exit(0)
        case "memory":
            return torch.ones(1 << 40)
        case "wrong_shape":
            return o[:, :-1]
        case "wrong_dtype":
            return o.to(torch.float64)
        case "nan":
            return torch.where(torch.arange(o.numel()).view_as(o) == 7, torch.nan, o)
        case "no_tensor":
            return [o]
        case "prints":
            print('{"id": 2, "result": {}}')
            print("passed")
            print("\x1b[2J", file=sys.stderr)
    return o


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if is_causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
        o = torch.softmax(s, -1) @ v
        ctx.save_for_backward(q, k, v, torch.logsumexp(s, -1))
        return misbehave(o)

    @staticmethod
    def backward(ctx, d_o):
        raise NotImplementedError


def get_flashattention_autograd_function_pytorch():
    return Attention


if WAY != "missing_adapter":

    def get_flashattention_autograd_function_triton():
        return Attention


class Alone(torch.nn.Module):
    """A wrapper that does nothing, and ends in one way on one rank."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        if WAY == "one_rank_crashes" and torch.distributed.get_rank() == 1:
            ctypes.string_at(0)
        if WAY == "one_rank_hangs" and torch.distributed.get_rank() == 1:
            time.sleep(3600)
        return self.module(*inputs)


def get_ddp_individual_parameters(module):
    return Alone(module)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    for parameter in ddp_model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)


def get_ddp_bucketed(module, bucket_size_mb):
    raise NotImplementedError("not yet")


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return optimizer_cls(params, **kwargs)
