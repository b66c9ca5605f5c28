"""Golden cases of kind data_parallel: both models of the official tests, trained by PyTorch in one process on all rows.

Run as `python suites/cases/make_data_parallel.py`; it rewrites the two files beside itself. Seeds are fixed.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

STEPS, ROWS, LR, WORLD_SIZE = 5, 12, 0.1, 2


class Inner(nn.Module):
    """The toy model's middle layer, whose bias does not train."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 50, bias=True)
        self.fc.bias.requires_grad = False

    def forward(self, x):
        return self.fc(x)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = Inner()
        self.fc3 = nn.Linear(50, 5, bias=False)
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50, bias=False)
        self.fc3 = nn.Linear(50, 10, bias=False)
        self.fc4 = nn.Linear(10, 50, bias=False)
        self.fc5 = nn.Linear(50, 5, bias=False)
        self.fc4.weight = self.fc2.weight

    def forward(self, x):
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4):
            x = torch.relu(layer(x))
        return self.fc5(x)


def make(name: str, build, seed: int, bucket_size_mb: str) -> None:
    torch.manual_seed(seed)
    model = build()
    x, y = torch.randn(STEPS, ROWS, 10), torch.randn(STEPS, ROWS, 5)
    tensors = {"x": x, "y": y}
    tensors |= {f"init.{n}": p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[step]), y[step]).backward()
        optimizer.step()
    tensors |= {f"final.{n}": p.detach().clone() for n, p in model.named_parameters()}
    metadata = {
        "kind": "data_parallel",
        "model": name,
        "world_size": str(WORLD_SIZE),
        "lr": str(LR),
        "bucket_size_mb": bucket_size_mb,
        # torch.allclose's defaults, as in the official tests.
        "rtol": "1e-5",
        "atol": "1e-8",
        "made_by": f"torch {torch.__version__}",
    }
    save_file(tensors, Path(__file__).with_name(f"data_parallel_{name}.safetensors"), metadata)


if __name__ == "__main__":
    make("toy", Toy, seed=336, bucket_size_mb="0.0016")
    make("tied", Tied, seed=337, bucket_size_mb="0.0001")
