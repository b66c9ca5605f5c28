"""Attention by its definition, without heads or mask: q, k, v of (batch, seq, d_model), eager and compiled."""

import torch

from . import timing
from .compiled import Cold
from .protocol import free_memory
from .tensors import read, relative_error


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The operations of src/attention/naive.rs, one for one."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.softmax(scores, dim=-1) @ v


class Attention:
    """One shape of the grid, in float32."""

    def __init__(self, device: torch.device, shape: list[int]) -> None:
        self.device = device
        self.shape = shape
        self.cold: Cold | None = None
        self.columns = {"eager": attention}

    def verify(self, column: str, file: str) -> dict:
        """Errors of o, dq, dk and dv against those in `file`, from its q, k, v and d_o; the first calls' seconds.

        The first call of the compiled column compiles it; its backward compiles with it or at its own first call.
        """
        if column == "compiled":
            self.cold = Cold(workers=False)
            self.columns["compiled"] = self.cold.compile(attention)
        given = {name: value.to(self.device) for name, value in read(file)}
        leaves = [given[name].requires_grad_() for name in "qkv"]
        o, forward_s = timing.lap(self.device, lambda: self.columns[column](*leaves))
        _, backward_s = timing.lap(self.device, lambda: torch.autograd.backward(o, given["d_o"]))
        ours = {"o": o} | {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves)}
        errors = {name: relative_error(value, given[f"expected_{name}"]) for name, value in ours.items()}
        del given, leaves, o, ours
        free_memory()
        return {"errors": errors, "first_call_s": {"forward": forward_s, "backward": backward_s}}

    def turn(self, column: str, warmup: int, iterations: int) -> dict:
        """Seconds of forward and backward passes, each pair on fresh inputs, after `warmup` untimed pairs."""
        function = self.columns[column]
        seconds: dict[str, list[float]] = {"forward": [], "backward": []}
        with timing.undisturbed():
            for _ in range(warmup + iterations):
                leaves = [torch.randn(self.shape, device=self.device).requires_grad_() for _ in range(3)]
                d_o = torch.randn(self.shape, device=self.device)
                o, forward_s = timing.lap(self.device, lambda: function(*leaves))
                _, backward_s = timing.lap(self.device, lambda: torch.autograd.backward(o, d_o))
                seconds["forward"].append(forward_s)
                seconds["backward"].append(backward_s)
                del leaves, d_o, o
        free_memory()
        return {name: values[warmup:] for name, values in seconds.items()}

    def close(self) -> dict:
        counts = self.cold.close() if self.cold else None
        self.columns.clear()
        free_memory()
        return {"counts": counts}
