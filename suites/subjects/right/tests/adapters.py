"""The assignment's eight adapters."""

import torch

from cs336_systems.ddp import Overlapped
from cs336_systems.flash import FlashAttention
from cs336_systems.sharded import ShardedOptimizer


def get_flashattention_autograd_function_pytorch() -> type:
    return FlashAttention


def get_flashattention_autograd_function_triton() -> type:
    """The checks see values, not how they are computed: the same tensor operations give them here."""
    return FlashAttention


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    return Overlapped(module, None)


def ddp_individual_parameters_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float) -> torch.nn.Module:
    return Overlapped(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
