"""torch.distributed's own all-reduce, of values whose sum is known."""

import torch
import torch.distributed as dist

from . import timing
from .group import Group

# As in src/bench/all_reduce.rs: small integers, whose float32 sums are exact.
PERIOD = 251
RANK_STEP = 7


class AllReduce:
    """A float32 tensor of `elements`, summed in place over the ranks."""

    def __init__(self, device: torch.device, elements: int, **group) -> None:
        self.device = device
        self.group = Group(device, **group)
        self.base = torch.arange(elements, dtype=torch.int32, device=device).remainder_(PERIOD).float()
        self.values = torch.empty_like(self.base)

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of each sum, from all ranks being there until this one has it."""
        seconds: list[float] = []
        with timing.undisturbed():
            for k in range(warmup + iterations):
                torch.add(self.base, RANK_STEP * self.group.rank + k, out=self.values)
                timing.synchronize(self.device)
                self.group.barrier()
                seconds.append(timing.lap(self.device, lambda: dist.all_reduce(self.values))[1])
                self._require_sum(k)
        return {column: seconds[warmup:]}

    def _require_sum(self, k: int) -> None:
        n = self.group.world_size
        off = self.values.sub_(self.base, alpha=n).sub_(RANK_STEP * n * (n - 1) // 2 + n * k)
        if off.count_nonzero().item() != 0:
            raise ValueError(f"{off.count_nonzero().item()} of {off.numel()} sums over {n} ranks are wrong")

    def close(self) -> dict:
        del self.base, self.values
        self.group.close()
        return {"counts": None}
