"""Data parallelism over the caller's default process group. Order and buckets are those of src/parallel."""

import contextlib
import copy
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import Bucket, Named, assign, gradient_of

STRATEGIES = ("naive", "flat", "overlap_individual_parameters", "overlap_bucketed", "overlap_coalesced")
"""naive: after backward, one all-reduce a parameter, each waited for. flat: after backward, one for all gradients.
overlap_individual_parameters: one a parameter while backward runs. overlap_bucketed: one a bucket while backward runs.
overlap_coalesced: as overlap_bucketed, without copies into buckets."""


class DistributedDataParallel(nn.Module):
    """A replica of `module`, whose gradients are averaged over all ranks.

    Args:
        module: on its final device and in its final dtype. Every rank gets rank 0's parameters (frozen ones too) and
            buffers. Buffers are not exchanged again.
        strategy: one of STRATEGIES.
        bucket_size_mb: the most that a bucket holds, in units of 10^6 bytes; None for one bucket.

    The process group is the default one, as `torch.distributed.init_process_group` made it, over Gloo or NCCL. Collectives
    are paired by their order alone, so each rank starts them in the same one: a bucket waits for those before it.

    A backward pass ends with averaged gradients. Within `no_sync` it accumulates on each rank and communicates nothing;
    the next pass outside averages the sum. Every trained parameter needs a gradient at the end of a synchronised pass.
    A pass that raises at the same point on all ranks leaves gradients to set to None, as `zero_grad()` does; the next one
    averages again.
    Checkpoints need `use_reentrant=False`: the backward passes of others end before the whole one. One replica of a
    module is used at a time. Parameters that are replaced or unfrozen later are not averaged.
    Once nothing refers to the replica, its module's backward passes are those of one rank again.

    Raises:
        ValueError: an unknown strategy, or a bucket size that is not above zero.
        RuntimeError: no process group; models that differ between ranks; a parameter without a gradient, or with a sparse
            one, by name; a buffer or parameter whose elements share memory, by name.
    """

    def __init__(self, module: nn.Module, strategy: str = "overlap_bucketed", bucket_size_mb: float | None = 25) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise ValueError(f"no strategy {strategy!r}; there are: {', '.join(STRATEGIES)}")
        capacity = math.inf if bucket_size_mb is None else bucket_size_mb * 1e6
        if not capacity > 0:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}: it must be above zero, or None for one bucket")
        require_process_group()
        self._settings = (strategy, bucket_size_mb)
        self.module = module
        parameters = list(module.named_parameters())
        _broadcast([*parameters, *module.named_buffers()])
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._overlaps = strategy.startswith("overlap")
        self._units, self._launch = _plan(strategy, trained, capacity)
        self._waiting = [len(unit) for unit in self._units]
        # All units before this one have been started.
        self._next = 0
        self._works: list[_Averaging] = []
        self._synchronizes = True
        # Of the backward pass under way. One that raised never came to its end, and nothing else refers to it.
        self._pass: weakref.ref[_Pass] | None = None
        self._is_finished = True
        # The garbage collector does not see what a hook holds: without the weak reference the model would never be freed.
        replica = weakref.ref(self)
        for index, unit in enumerate(self._units):
            for name, parameter in unit:
                parameter.register_post_accumulate_grad_hook(functools.partial(_call_fired, replica, index, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments."""
        if torch.is_grad_enabled():
            self._is_finished = False
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """A replica of a copy of the module; every rank must make one."""
        return DistributedDataParallel(copy.deepcopy(self.module, memo), *self._settings)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients on each rank and communicate nothing."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def finish_gradient_synchronization(self) -> None:
        """Starts what no backward pass has started, and waits for all: on a GPU the stream waits and not this thread.

        A synchronised backward pass ends with this call. Call it yourself after passes within `no_sync` alone.
        """
        if self._is_finished:
            return
        try:
            while self._next < len(self._units):
                self._launch_next()
        except RuntimeError:
            self._abandon()
            raise
        for work in self._taken():
            work.wait()
        self._is_finished = True

    def _fired(self, index: int, name: str, _parameter: Tensor) -> None:
        self._is_finished = False
        if self._pass is not None and self._pass() is None:
            self._abandon()
        if index < self._next:
            raise RuntimeError(
                f"backward has added to the gradient of {name} while it was being averaged: "
                "run all backward passes of a step but the last one within no_sync"
            )
        if not self._synchronizes:
            return
        if self._pass is None:
            self._begin_pass()
        self._waiting[index] -= 1
        while self._overlaps and self._next < len(self._units) and self._waiting[self._next] == 0:
            self._launch_next()

    def _begin_pass(self) -> None:
        begun = _Pass()
        self._pass = weakref.ref(begun)
        ending = functools.partial(self._end_pass, begun)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def _end_pass(self, _begun: "_Pass") -> None:
        self.finish_gradient_synchronization()

    def _abandon(self) -> None:
        """Waits for what a pass that raised has started, and leaves its gradients as they are."""
        for work in self._taken():
            work.wait_for_sum()

    def _taken(self) -> "list[_Averaging]":
        """What was started; nothing is under way then."""
        works, self._works, self._next, self._pass = self._works, [], 0, None
        self._waiting = [len(unit) for unit in self._units]
        return works

    def _launch_next(self) -> None:
        self._works.append(self._launch(self._next))
        self._next += 1


class _Pass:
    """A backward pass, which PyTorch's engine holds by the callback at its end."""


def _call_fired(replica: weakref.ref, index: int, name: str, parameter: Tensor) -> None:
    """A parameter's hook, which does nothing once its replica is gone."""
    alive = replica()
    if alive is not None:
        alive._fired(index, name, parameter)


class Broadcast:
    """A tensor that takes its values on one rank, from when this is made until `wait`; both without gradients."""

    def __init__(self, tensor: Tensor, rank: int) -> None:
        self._tensor = tensor
        # A backend reads and writes contiguous memory: it ignores strides.
        self._whole = tensor.detach().contiguous()
        self._work = dist.broadcast(self._whole, rank, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self._whole)


class _Averaging:
    """A sum of tensors over all ranks that was started, divided where the backend cannot average."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._divides = dist.get_backend() != "nccl"
        operation = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        if len(tensors) == 1:
            self._work = dist.all_reduce(tensors[0], operation, async_op=True)
        else:
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = operation
            self._work = dist.group.WORLD.allreduce_coalesced(list(tensors), options)

    def wait_for_sum(self) -> None:
        self._work.wait()

    def wait(self) -> None:
        self.wait_for_sum()
        if self._divides:
            torch._foreach_div_(list(self._tensors), dist.get_world_size())


def _plan(
    strategy: str, trained: Sequence[Named], capacity: float
) -> tuple[list[Sequence[Named]], Callable[[int], _Averaging]]:
    """The units in the order in which they start, and what starts a unit."""
    if strategy in ("naive", "overlap_individual_parameters"):
        is_naive = strategy == "naive"
        units = [[member] for member in (trained if is_naive else reversed(trained))]

        def launch(index: int) -> _Averaging:
            averaging = _Averaging([gradient_of(*units[index][0])])
            if is_naive:
                averaging.wait_for_sum()
            return averaging

        return units, launch
    units = assign(trained, math.inf if strategy == "flat" else capacity)
    if strategy == "overlap_coalesced":
        return units, lambda index: _Averaging([gradient_of(*member) for member in units[index]])
    buckets = [Bucket(unit) for unit in units]

    def launch_bucket(index: int) -> _Averaging:
        buckets[index].collect()
        return _Averaging([buckets[index].flat])

    return units, launch_bucket


def require_process_group() -> None:
    """RuntimeError: the caller has made no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")


def require_equal(what: str, facts: Sequence[tuple], device: torch.device | None) -> None:
    """RuntimeError: the facts about `what` differ between ranks, before anything else is exchanged."""
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "little")
    mine = torch.tensor([digest], device=device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    for rank, other in enumerate(theirs):
        if other.item() != digest:
            raise RuntimeError(
                f"{what} of rank {rank} is not that of rank {dist.get_rank()}: "
                "names, shapes, strides, dtypes and what is frozen must agree"
            )


@torch.no_grad()
def _broadcast(tensors: Sequence[Named]) -> None:
    """Gives every rank the values of rank 0. RuntimeError: the models differ."""
    # Gradients have the strides of their parameters, and a backend adds them in the order in which they lie in memory.
    strides = [t.stride() if t.requires_grad else None for _, t in tensors]
    facts = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]
    require_equal("the model", list(zip(facts, strides, strict=True)), tensors[0][1].device if tensors else None)
    for name, tensor in tensors:
        try:
            Broadcast(tensor, 0).wait()
        except RuntimeError as why:
            raise RuntimeError(f"{name} cannot take rank 0's values: {why}") from why
