"""Data parallelism that communicates while the backward pass runs: a call per parameter, or per bucket."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Overlapped(nn.Module):
    """Broadcasts rank 0's parameters, and averages the gradients of each bucket as soon as all of them are there."""

    def __init__(self, module: nn.Module, bucket_size_mb: float | None) -> None:
        super().__init__()
        self.module = module
        self.pending: list[tuple[dist.Work, Tensor, list[nn.Parameter]]] = []
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = buckets(trained[::-1], bucket_size_mb)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next = 0
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def arrived(self, number: int) -> None:
        self.missing[number] -= 1
        # In the same order on every rank: nothing else pairs collectives.
        while self.next < len(self.buckets) and self.missing[self.next] <= 0:
            bucket = self.buckets[self.next]
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            self.pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
            self.next += 1

    def finish_gradient_synchronization(self) -> None:
        for work, flat, bucket in self.pending:
            work.wait()
            flat /= dist.get_world_size()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        self.pending.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next = 0


def buckets(parameters: list[nn.Parameter], bucket_size_mb: float | None) -> list[list[nn.Parameter]]:
    """Buckets of at most that size; `None` gives each parameter its own."""
    filled: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in parameters:
        megabytes = parameter.numel() * parameter.element_size() / 1e6
        if not filled or bucket_size_mb is None or size + megabytes > bucket_size_mb:
            filled.append([])
            size = 0.0
        filled[-1].append(parameter)
        size += megabytes
    return filled
