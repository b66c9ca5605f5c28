"""FlashAttention-4 (the package flash-attn-4, CuTe DSL), causal, through autograd, timed as src/bench/timing.rs does."""

import os
from collections.abc import Callable

import torch

from . import packages, timing
from .protocol import free_memory, kind_of, words_of
from .tensors import read, relative_error

INSTALL = "python -m pip install flash-attn-4==4.0.0b36"
NAMES = ["q", "k", "v"]


class FlashAttention4:
    """One shape. `opened` holds the installed version, or why there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []
        self.d_o = torch.empty(0)
        self.bench: tuple[dict, timing.Bench] | None = None
        self.function, self.opened = loaded()

    def verify(self, file: str) -> dict:
        """Errors of the last positions of o, dq, dk and dv against those in `file`, or why its inputs are refused.

        Later turns run on the inputs of `file`, in the library's order of dimensions: (batch, n, heads, d).
        """
        given = {name: value.to(self.device) for name, value in read(file)}
        self.leaves = [in_its_order(given.pop(name)).requires_grad_() for name in NAMES]
        self.d_o = in_its_order(given.pop("d_o"))
        try:
            o = self._forward()
            torch.autograd.backward(o, self.d_o)
            timing.synchronize(self.device)
        except Exception as error:  # noqa: BLE001 - its own checks raise errors of many types
            if is_fault(error):
                raise
            return {"refused": words_of(error)}
        results = {"o": o} | {f"d{name}": leaf.grad for name, leaf in zip(NAMES, self.leaves)}
        errors = {name: error_of(name, value, given[f"expected_{name}"]) for name, value in results.items()}
        self._clear()
        del given, o, results
        free_memory()
        return {"accepted": errors}

    def turn(self, attention_pass: str, protocol: dict) -> list[float]:
        """Seconds of each timed call of a pass."""
        seconds = self._calls(attention_pass, self._bench(protocol).turn)
        # The next turn, of the other process, has the memory.
        free_memory()
        return seconds

    def busy(self, attention_pass: str, seconds: float) -> dict:
        """Calls of a pass back to back for about `seconds`. It replies at once, since the busy time ends with the reply."""
        return self._calls(attention_pass, lambda clear, call: timing.busy(self.device, seconds, clear, call))

    def close(self) -> dict:
        self.leaves, self.d_o, self.bench = [], torch.empty(0), None
        free_memory()
        return {"counts": None}

    def _bench(self, protocol: dict) -> timing.Bench:
        """One for all turns of a case, since its buffer takes 256 MiB."""
        if self.bench is None or self.bench[0] != protocol:
            self.bench = (protocol, timing.Bench(self.device, **protocol))
        return self.bench[1]

    def _calls(self, attention_pass: str, body: Callable) -> list[float] | dict:
        """What `body` makes of the calls of a pass."""
        with timing.undisturbed():
            match attention_pass:
                case "forward":
                    result = body(self._clear, self._forward)
                case "backward":
                    o = self._forward()
                    result = body(self._clear, lambda: torch.autograd.backward(o, self.d_o, retain_graph=True))
                case "both":
                    result = body(self._clear, lambda: torch.autograd.backward(self._forward(), self.d_o))
                case _:
                    raise ValueError(f"no pass is called {attention_pass!r}")
        self._clear()
        return result

    def _forward(self) -> torch.Tensor:
        o = self.function(*self.leaves, causal=True)
        return o[0] if isinstance(o, tuple) else o

    def _clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def loaded() -> tuple[Callable | None, dict]:
    """Its function, and its version, or why there is none."""
    return packages.loaded("flash-attn-4", imported, INSTALL)


def imported() -> Callable:
    # Compiled code is never taken from a folder of known name among the temporary files.
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "0"
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def in_its_order(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, n, heads, d) out of (batch, heads, n, d), with the strides of a new tensor also where there is one head."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def is_fault(error: Exception) -> bool:
    """Whether memory ran out or the device failed; all else that a call raises is its own refusal or its compiler's."""
    kinds = (torch.AcceleratorError, torch.OutOfMemoryError)
    of_device = isinstance(error, kinds) or "CUDA error" in str(error) or "Cuda" in type(error).__name__
    return of_device or kind_of(error) == "out_of_memory"


def error_of(name: str, value: torch.Tensor | None, expected: torch.Tensor) -> float:
    """The relative error of the last positions of a result."""
    if value is None:
        raise ValueError(f"{name} has no gradient")
    return relative_error(value.detach().transpose(1, 2)[:, :, -expected.shape[2] :], expected)
