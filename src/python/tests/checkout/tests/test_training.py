"""Data parallelism and a sharded optimizer on two ranks, each against one process."""

import copy

import numpy
import pytest
import torch
from torch import nn

from .adapters import (
    ddp_bucketed_on_after_backward,
    ddp_bucketed_on_train_batch_start,
    ddp_individual_parameters_on_after_backward,
    get_ddp_bucketed,
    get_ddp_individual_parameters,
    get_sharded_optimizer,
)
from .ranks import WORLD_SIZE, spawn


def network():
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    layers[2].bias.requires_grad_(False)
    return layers


def descend(model, rows, before=None, after=None):
    """A step of plain gradient descent on the mean square of the outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if before is not None:
        before(model, optimizer)
    model(rows).square().mean().backward()
    if after is not None:
        after(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def average(rank, bucket_size_mb):
    torch.manual_seed(0)
    single = network()
    # Only rank 0 starts with these values; the others must receive them.
    start = copy.deepcopy(single) if rank == 0 else network()
    if bucket_size_mb is None:
        parallel, before = get_ddp_individual_parameters(start), None
        after = ddp_individual_parameters_on_after_backward
    else:
        parallel, before = get_ddp_bucketed(start, bucket_size_mb=bucket_size_mb), ddp_bucketed_on_train_batch_start
        after = ddp_bucketed_on_after_backward
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.randn(4 * WORLD_SIZE, 6, generator=generator)
        descend(single, rows)
        descend(parallel, rows.chunk(WORLD_SIZE)[rank], before, after)
        for mine, theirs in zip(single.parameters(), parallel.parameters(), strict=True):
            assert torch.allclose(mine, theirs)


def shard(rank):
    torch.manual_seed(2)
    single = network()
    parallel = copy.deepcopy(single)
    options = {"lr": 0.1, "weight_decay": 0.1}
    whole = torch.optim.AdamW(single.parameters(), **options)
    sharded = get_sharded_optimizer(parallel.parameters(), torch.optim.AdamW, **options)
    for _ in range(4):
        rows = torch.rand(16, 6)
        for model, optimizer in ((single, whole), (parallel, sharded)):
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            optimizer.step()
    for mine, theirs in zip(single.parameters(), parallel.parameters(), strict=True):
        numpy.testing.assert_allclose(mine.detach().numpy(), theirs.detach().numpy())


@pytest.mark.parametrize("bucket_size_mb", [None, 0.0002, 1.0])
def test_data_parallel(bucket_size_mb):
    spawn(average, bucket_size_mb)


def test_sharded_optimizer():
    spawn(shard)
