"""Two Gloo ranks, each in a process of its own that imports the tests anew."""

import os
import socket

import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def spawn(work, *arguments):
    """Calls `work(rank, *arguments)` on each rank; raises what one of them raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_joined, args=(port, work, arguments), nprocs=WORLD_SIZE)


def _joined(rank, port, work, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
