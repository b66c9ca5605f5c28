"""The host's time of one attention call from Python: the wheel's, PyTorch's or FlashAttention-4's, on small inputs."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from . import flash_attention_4, packages, timing
from .protocol import free_memory, words_of
from .tensors import read, relative_error

MODES = ["forward", "recorded"]
NAMES = ["q", "k", "v"]


class Calls:
    """One column. `opened` holds the version of its package, or why there is none."""

    def __init__(self, device: torch.device, column: str) -> None:
        self.device = device
        self.attention, self.opened = COLUMNS[column]()
        # The library's own order of dimensions, (batch, n, heads, d).
        self.is_transposed = column == "flash_attention_4"
        self.inputs: dict[str, list[torch.Tensor]] = {}

    def verify(self, file: str) -> dict:
        """The larger error of o in both modes against that in `file`, or why its inputs are refused.

        These first calls compile what each mode needs; turns run on the same inputs.
        """
        given = {name: value.to(self.device) for name, value in read(file)}
        in_order = flash_attention_4.in_its_order if self.is_transposed else torch.clone
        plain = [in_order(given[name]) for name in NAMES]
        self.inputs = {"forward": plain, "recorded": [value.detach().clone().requires_grad_() for value in plain]}
        try:
            results = [self._calls(mode, lambda call: call()) for mode in MODES]
            timing.synchronize(self.device)
        except Exception as error:  # noqa: BLE001 - a library's own checks raise errors of many types
            if flash_attention_4.is_fault(error):
                raise
            return {"refused": words_of(error)}
        if [o.requires_grad for o in results] != [False, True]:
            raise ValueError("o must require a gradient where its call is recorded, and there alone")
        results = [o.transpose(1, 2) if self.is_transposed else o for o in results]
        return {"accepted": max(relative_error(o, given["expected_o"]) for o in results)}

    def turn(self, calls: int, warmup: int, iterations: int) -> dict[str, list[float]]:
        """Seconds of a call in both modes, each the mean of `calls`, after `warmup` untimed ones."""

        def laps(call: Callable[[], object]) -> list[float]:
            return [host_seconds(self.device, calls, call) for _ in range(warmup + iterations)][warmup:]

        with timing.undisturbed():
            return {mode: self._calls(mode, laps) for mode in MODES}

    def close(self) -> dict:
        self.inputs = {}
        free_memory()
        return {"counts": None}

    def _calls(self, mode: str, body: Callable) -> object:
        """What `body` makes of the call of a mode."""
        attention, (q, k, v) = self.attention, self.inputs[mode]
        with torch.set_grad_enabled(mode == "recorded"):
            return body(lambda: attention(q, k, v))


def host_seconds(device: torch.device, calls: int, call: Callable[[], object]) -> float:
    """As `host_seconds` of src/problems/flash_benchmarking/calls.rs."""
    timing.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    timing.synchronize(device)
    return seconds / calls


def wheel() -> tuple[Callable, dict]:
    cs336, opened = packages.wheel()
    return lambda q, k, v: cs336.flash_attention(q, k, v, True), opened


def sdpa() -> tuple[Callable, dict]:
    attention = F.scaled_dot_product_attention
    return lambda q, k, v: attention(q, k, v, is_causal=True), {"accepted": {"version": torch.__version__}}


def fa4() -> tuple[Callable | None, dict]:
    function, opened = flash_attention_4.loaded()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = function(q, k, v, causal=True)
        return o[0] if isinstance(o, tuple) else o

    return attention, opened


COLUMNS = {"wheel": wheel, "sdpa": sdpa, "flash_attention_4": fa4}
