"""One rank of a process group of peers: torch.distributed over the same back end as the other side's ranks."""

import torch
import torch.distributed as dist

from .protocol import free_memory


class Group:
    """Joins its peers through a file store; one group in each process."""

    def __init__(self, device: torch.device, backend: str, rank: int, world_size: int, store: str) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        # A file store needs no free port.
        bound = {}
        if device.type == "cuda":
            # Without this, each rank would also open a context on the first GPU.
            torch.cuda.set_device(device)
            bound["device_id"] = device
        dist.init_process_group(
            backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, **bound
        )

    def barrier(self) -> None:
        dist.barrier(**({"device_ids": [self.device.index]} if self.device.type == "cuda" else {}))

    def close(self) -> None:
        dist.destroy_process_group()
        free_memory()
