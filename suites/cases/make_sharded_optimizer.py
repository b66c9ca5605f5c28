"""Golden cases of kind sharded_optimizer: both models of the official tests, trained by PyTorch's AdamW in one process.

Run as `python suites/cases/make_sharded_optimizer.py`; it rewrites the two files beside itself. Seeds are fixed.
"""

from pathlib import Path

import torch
from make_data_parallel import Tied, Toy
from safetensors.torch import save_file

STEPS, ROWS = 10, 32
ADAMW = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def make(name: str, build, seed: int, world_size: int) -> None:
    torch.manual_seed(seed)
    model = build()
    x, y = torch.rand(STEPS, ROWS, 10), torch.rand(STEPS, ROWS, 5)
    tensors = {"x": x, "y": y}
    tensors |= {f"init.{n}": p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((model(x[step]) - y[step]) ** 2).sum().backward()
        optimizer.step()
    tensors |= {f"final.{n}": p.detach().clone() for n, p in model.named_parameters()}
    metadata = {
        "kind": "sharded_optimizer",
        "model": name,
        "world_size": str(world_size),
        "lr": str(ADAMW["lr"]),
        "beta1": str(ADAMW["betas"][0]),
        "beta2": str(ADAMW["betas"][1]),
        "eps": str(ADAMW["eps"]),
        "weight_decay": str(ADAMW["weight_decay"]),
        # Not the official test's 1e-7, which compares two optimizers on one machine: another processor's matrix product
        # sums in another order, and AdamW enlarges what that does to a gradient near zero.
        "rtol": "1e-4",
        "atol": "1e-5",
        "made_by": f"torch {torch.__version__}",
    }
    save_file(tensors, Path(__file__).with_name(f"sharded_optimizer_{name}.safetensors"), metadata)


if __name__ == "__main__":
    make("toy", Toy, seed=338, world_size=2)
    make("tied", Tied, seed=339, world_size=3)
