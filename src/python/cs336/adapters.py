"""The eight functions of the official tests of CS336 Assignment 2 (Spring 2025), answered by this package.

In a checkout: `from cs336.adapters import *` in tests/adapters.py, or `cs336 official DIR`, which changes nothing there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .parallel import DistributedDataParallel
from .sharded import ShardedOptimizer

__all__ = [
    "ddp_bucketed_on_after_backward",
    "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward",
    "get_ddp_bucketed",
    "get_ddp_individual_parameters",
    "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton",
    "get_sharded_optimizer",
]


class _FlashAttention(torch.autograd.Function):
    """(q, k, v, is_causal) to o. Of the saved tensors exactly one has lse's shape (..., n_queries), as the tests ask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        o, lse = torch.ops.cs336.flash_attention(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.cs336.flash_attention_backward(*ctx.saved_tensors, d_o, ctx.is_causal)
        return *gradients, None


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 as an autograd function: on a CPU in tensor operations."""
    return _FlashAttention


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 as an autograd function: on a GPU in CUDA kernels, where the tests expect Triton's."""
    return _FlashAttention


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    """`module` with each gradient averaged as soon as backward has it."""
    return DistributedDataParallel(module, strategy="overlap_individual_parameters")


def ddp_individual_parameters_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Waits for the averages, where backward has not."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """`module` with gradients averaged in buckets of at most this size; None for one bucket."""
    return DistributedDataParallel(module, strategy="overlap_bucketed", bucket_size_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Waits for the averages, where backward has not."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing: a bucket needs no preparation."""


def get_sharded_optimizer(
    params: Iterable[Tensor], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """`optimizer_cls` with its state divided over the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
