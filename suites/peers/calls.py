"""What a call of attention costs the host: the wheel's operator, PyTorch's and FlashAttention-4's, through autograd."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import flash_attention_4, timing
from .protocol import free_memory, version_of, words_of
from .tensors import read, relative_error


def wheel() -> Callable:
    import cs336

    return lambda q, k, v: cs336.flash_attention(q, k, v, is_causal=True)


def sdpa() -> Callable:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fourth() -> Callable:
    function = flash_attention_4.imported()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = function(q, k, v, causal=True)
        return o[0] if isinstance(o, tuple) else o

    return call


# How each column's function is imported, the package that it is of, and how that is installed.
COLUMNS = {
    "wheel": (wheel, "cs336", "make wheel && python -m pip install --no-deps dist/cs336-*.whl"),
    "sdpa": (sdpa, "torch", ""),
    "flash_attention_4": (fourth, "flash-attn-4", flash_attention_4.INSTALL),
}


class Calls:
    """One shape; each column is verified before it is timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.columns: dict[str, tuple[Callable, list[torch.Tensor], torch.Tensor]] = {}

    def verify(self, column: str, file: str) -> dict:
        """Errors of o, dq, dk and dv against those in `file`, or why the column's package cannot be imported."""
        load, package, install = COLUMNS[column]
        try:
            function = load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises, the other columns are measured
            return {"refused": f"{package} cannot be imported ({words_of(error)}): run {install}"}
        given = {name: value.to(self.device) for name, value in read(file)}
        # FlashAttention-4 takes (batch, n, heads, d), the others (batch, heads, n, d).
        order = flash_attention_4.in_its_order if column == "flash_attention_4" else lambda t: t
        leaves = [order(given[name]).requires_grad_() for name in "qkv"]
        d_o = order(given["d_o"])
        o = function(*leaves)
        torch.autograd.backward(o, d_o)
        results = {"o": o.detach()} | {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves)}
        back = (lambda t: t.transpose(1, 2)) if column == "flash_attention_4" else (lambda t: t)
        errors = {name: relative_error(back(value), given[f"expected_{name}"]) for name, value in results.items()}
        self.columns[column] = (function, leaves, d_o)
        return {"accepted": {"errors": errors, "version": version_of(package) or "unknown"}}

    def turn(self, column: str, attention_pass: str, batches: int, calls: int) -> list[float]:
        """Seconds of the host for a call, the mean of each batch of calls; the device works on meanwhile."""
        function, leaves, d_o = self.columns[column]

        def forward() -> None:
            function(*leaves)

        def both() -> None:
            torch.autograd.backward(function(*leaves), d_o)
            for leaf in leaves:
                leaf.grad = None

        call = {"forward": forward, "both": both}[attention_pass]
        seconds = []
        with timing.undisturbed():
            for _ in range(batches + 1):
                timing.synchronize(self.device)
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                seconds.append((time.perf_counter() - start) / calls)
        timing.synchronize(self.device)
        # The first batch warms up.
        return seconds[1:]

    def close(self) -> dict:
        self.columns.clear()
        free_memory()
        return {"counts": None}
