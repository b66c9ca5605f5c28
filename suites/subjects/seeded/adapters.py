"""The assignment's adapters with one bug: the one that `bug.txt` names. Each is a mistake that people make."""

import torch

from attention import Attention
from parallel import Replica
from sharding import Sharded


def get_flashattention_autograd_function_pytorch():
    return Attention


def get_flashattention_autograd_function_triton():
    return Attention


def get_ddp_individual_parameters(module):
    return Replica(module, 0.0)


def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()


def get_ddp_bucketed(module, bucket_size_mb):
    return Replica(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()


def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    pass


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs):
    return Sharded(params, optimizer_cls, **kwargs)
