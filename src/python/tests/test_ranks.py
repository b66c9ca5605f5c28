"""Tests of data parallelism and sharding on two Gloo ranks, in the protocol of the assignment's tests."""

import copy
import functools
import gc
import os
import socket
import weakref
from collections.abc import Callable

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import cs336
from cs336 import adapters
from cs336.buckets import assign

WORLD_SIZE = 2


class Frozen(nn.Module):
    """A layer whose bias does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 50)
        self.fc.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Toy(nn.Module):
    """Three layers, a frozen bias and a frozen parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = Frozen()
        self.fc3 = nn.Linear(50, 5, bias=False)
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


class Tied(nn.Module):
    """Five layers, of which two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        widths = [10, 10, 50, 10, 50, 5]
        layers = [nn.Linear(a, b, bias=False) for a, b in zip(widths[:-1], widths[1:], strict=True)]
        layers[3].weight = layers[1].weight
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


MODELS = (Toy, Tied)


def on_ranks(work: Callable[[int], None]) -> None:
    """Runs `work(rank)` in two processes with a Gloo group; raises what one raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port, work), nprocs=WORLD_SIZE, join=True)


def _rank(rank: int, port: int, work: Callable[[int], None]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    try:
        work(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _require_equal_state(model: nn.Module) -> None:
    for name, tensor in model.module.state_dict().items():
        all_of_it = [torch.empty_like(tensor) for _ in range(WORLD_SIZE)]
        dist.all_gather(all_of_it, tensor)
        assert torch.allclose(all_of_it[0], all_of_it[1]), name


Wrap = Callable[[nn.Module], nn.Module]
Hook = Callable[[nn.Module, torch.optim.Optimizer], None]


def _train(rank: int, wrap: Wrap, before: Hook | None, after: Hook | None) -> None:
    """Five steps on half of the rows a rank give a single process's parameters on all rows."""
    for model_class in MODELS:
        torch.manual_seed(rank)
        single = model_class()
        parallel = wrap(copy.deepcopy(single))
        pairs = list(zip(single.named_parameters(), parallel.parameters(), strict=True))
        for (name, mine), theirs in pairs:
            same = rank == 0 or name == "no_grad_fixed_param"
            assert torch.allclose(mine, theirs) == same, name
        _require_equal_state(parallel)
        generator = torch.Generator().manual_seed(7)
        x, y = (torch.randn(20, width, generator=generator) for width in (10, 5))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, parallel)]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if before is not None:
                before(parallel, optimizers[1])
            nn.functional.mse_loss(single(x), y).backward()
            optimizers[0].step()
            rows = slice(10 * rank, 10 * rank + 10)
            nn.functional.mse_loss(parallel(x[rows]), y[rows]).backward()
            if after is not None:
                after(parallel, optimizers[1])
            optimizers[1].step()
            if rank == 0:
                assert all(torch.allclose(mine, theirs) for (_, mine), theirs in pairs), step
            order = torch.randperm(20, generator=generator)
            x, y = x[order], y[order]
        _require_equal_state(parallel)


def _official_data_parallel(rank: int) -> None:
    before = adapters.ddp_bucketed_on_train_batch_start
    for megabytes in (0.0016, 0.0001, 0.01, None):
        wrap = functools.partial(adapters.get_ddp_bucketed, bucket_size_mb=megabytes)
        _train(rank, wrap, before, adapters.ddp_bucketed_on_after_backward)
    _train(rank, adapters.get_ddp_individual_parameters, None, adapters.ddp_individual_parameters_on_after_backward)


def the_official_data_parallel_tests_pass() -> None:
    on_ranks(_official_data_parallel)


def _each_strategy(rank: int) -> None:
    for strategy in cs336.STRATEGIES:
        wrap = functools.partial(cs336.DistributedDataParallel, strategy=strategy, bucket_size_mb=0.0016)
        _train(rank, wrap, None, None)


def every_strategy_trains_as_a_single_process_without_a_call_after_backward() -> None:
    on_ranks(_each_strategy)


def _accumulate(rank: int) -> None:
    for strategy in cs336.STRATEGIES:
        torch.manual_seed(0)
        single = Toy()
        parallel = cs336.DistributedDataParallel(copy.deepcopy(single), strategy, bucket_size_mb=0.0016)
        x = torch.randn(4, 3, 10)
        single(x.flatten(0, 1)).sum().backward()
        with parallel.no_sync():
            parallel(x[2 * rank]).sum().backward()
        parallel(x[2 * rank + 1]).sum().backward()
        for mine, theirs in zip(single.parameters(), parallel.parameters(), strict=True):
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad / WORLD_SIZE, theirs.grad)
        parallel.zero_grad()
        with parallel.no_sync():
            parallel(x[rank]).sum().backward()
        parallel.finish_gradient_synchronization()
        weight = parallel.module.fc1.weight.grad
        both = [torch.empty_like(weight) for _ in range(WORLD_SIZE)]
        dist.all_gather(both, weight)
        assert torch.equal(both[0], both[1])


def gradients_accumulate_without_communication_within_no_sync() -> None:
    on_ranks(_accumulate)


def _drop(rank: int) -> None:
    model = Toy()
    replicas = [cs336.DistributedDataParallel(model, strategy) for strategy in cs336.STRATEGIES]
    collected = [weakref.ref(replica) for replica in replicas]
    del replicas
    gc.collect()
    assert not any(replica() for replica in collected), "a replica is kept by its hooks"
    # No hook of a replica that is gone runs: each rank's gradient is that of its own batch.
    batch = torch.full((2, 10), 1.0 + rank)
    gradients = torch.autograd.grad(model(batch).sum(), model.fc1.weight)
    model(batch).sum().backward()
    assert torch.equal(model.fc1.weight.grad, gradients[0])
    last = weakref.ref(cs336.DistributedDataParallel(model).module.fc1.weight)
    del model
    gc.collect()
    assert last() is None, "a model is kept by its hooks"


def a_replica_and_its_model_are_freed() -> None:
    on_ranks(_drop)


def _unused(rank: int) -> None:
    model = cs336.DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    model._is_finished = False
    try:
        model.module["b"](torch.ones(2)).sum().backward()
    except RuntimeError as error:
        assert "a.bias has no gradient" in str(error) or "a.weight has no gradient" in str(error), error
    else:
        raise AssertionError("a gradient was missing and nothing was said")
    try:
        cs336.DistributedDataParallel(nn.Linear(2, 2 + rank))
    except RuntimeError as error:
        assert "is not that of rank" in str(error), error
    else:
        raise AssertionError("the models differ and nothing was said")


def a_missing_gradient_and_models_that_differ_are_errors_that_say_which() -> None:
    on_ranks(_unused)


def _shard(rank: int) -> None:
    """Ten steps of a sharded AdamW give every bit of a whole one's."""
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    for model_class in MODELS:
        for optimizer_class in (torch.optim.AdamW, cs336.AdamW):
            torch.manual_seed(42)
            single = model_class()
            parallel = copy.deepcopy(single)
            whole = optimizer_class(single.parameters(), **options)
            sharded = adapters.get_sharded_optimizer(parallel.parameters(), optimizer_class, **options)
            for _ in range(10):
                x, y = torch.rand(32, 10), torch.rand(32, 5)
                for model, optimizer in ((single, whole), (parallel, sharded)):
                    optimizer.zero_grad()
                    ((model(x) - y) ** 2).sum().backward()
                    optimizer.step()
            for mine, theirs in zip(single.parameters(), parallel.parameters(), strict=True):
                numpy.testing.assert_allclose(mine.detach().numpy(), theirs.detach().numpy())
            numel = [parameter.numel() for parameter in parallel.parameters()]
            assert sharded.owned_numel <= sum(numel) / WORLD_SIZE + max(numel)
            # The local state is about half, and only of parameters that train.
            assert 0 < len(sharded.state) < len(numel)


def the_official_sharded_optimizer_test_passes() -> None:
    on_ranks(_shard)


def _schedule(rank: int) -> None:
    single = nn.Linear(3, 4)
    nn.init.ones_(single.weight)
    nn.init.zeros_(single.bias)
    parallel = copy.deepcopy(single)
    whole = torch.optim.SGD(single.parameters(), lr=1.0, momentum=0.9)
    sharded = cs336.ShardedOptimizer(parallel.parameters(), torch.optim.SGD, lr=1.0, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (whole, sharded)]
    extra = [nn.Parameter(torch.ones(7)) for _ in range(2)]
    for step in range(4):
        for model, optimizer, more in ((single, whole, extra[0]), (parallel, sharded, extra[1])):
            if step == 2:
                optimizer.add_param_group({"params": [more], "lr": 0.25})
            optimizer.zero_grad()
            (model(torch.ones(3)).square().sum() + more.square().sum()).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    for mine, theirs in zip([*single.parameters(), extra[0]], [*parallel.parameters(), extra[1]], strict=True):
        assert torch.equal(mine, theirs)


def schedulers_and_added_groups_reach_the_owners() -> None:
    on_ranks(_schedule)


def buckets_follow_the_rules_of_the_rust_strategies() -> None:
    def plan(dtypes: list[torch.dtype], capacity: float) -> list[list[int]]:
        members = [(str(i), torch.empty(8, dtype=dtype)) for i, dtype in enumerate(dtypes)]
        return [[int(name) for name, _ in bucket] for bucket in assign(members, capacity)]

    # The cases of src/parallel/bucket.rs.
    mixed = [torch.float32, *[torch.bfloat16] * 3, torch.float32]
    assert plan(mixed, 32) == [[4], [3, 2], [1], [0]]
    assert plan(mixed, 64) == [[3, 2, 1], [4, 0]]
    for model_class, counts in ((Toy, [3, 3, 1]), (Tied, [4, 4, 1])):
        trained = [(name, p) for name, p in model_class().named_parameters() if p.requires_grad]
        assert [len(assign(trained, mb * 1e6)) for mb in (0.0016, 0.0001, 0.01)] == counts


TESTS = [
    buckets_follow_the_rules_of_the_rust_strategies,
    the_official_data_parallel_tests_pass,
    every_strategy_trains_as_a_single_process_without_a_call_after_backward,
    gradients_accumulate_without_communication_within_no_sync,
    a_replica_and_its_model_are_freed,
    a_missing_gradient_and_models_that_differ_are_errors_that_say_which,
    the_official_sharded_optimizer_test_passes,
    schedulers_and_added_groups_reach_the_owners,
]
