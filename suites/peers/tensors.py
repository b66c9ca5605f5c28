"""Reads safetensors files (8 bytes of length, a header of JSON, raw little-endian values), and compares tensors."""

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def read(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors on the CPU, in the order of the file; a tensor's pages are read when it is used."""
    with Path(path).open("rb") as file:
        # A private map, because torch.frombuffer requires writable memory.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start = 8 + length + info["data_offsets"][0]
        flat = torch.frombuffer(data, dtype=DTYPES[info["dtype"]], count=math.prod(info["shape"]), offset=start)
        yield name, flat.view(info["shape"])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected, in float64 (the difference alone if that is 0)."""
    if ours.shape != expected.shape:
        raise ValueError(f"shape {tuple(ours.shape)}, expected {tuple(expected.shape)}")
    expected = expected.to(ours.device, torch.float64)
    difference = (ours.detach().to(torch.float64) - expected).norm().item()
    norm = expected.norm().item()
    error = difference / norm if norm > 0 else difference
    if not math.isfinite(error):
        raise ValueError(f"the relative error is {error}: there are infinities or NaNs among the values")
    return error


def sample(tensor: torch.Tensor, at_most: int) -> torch.Tensor:
    """Every n-th element, n odd so that it meets every column of a matrix; all of them where they are few."""
    stride = max(1, tensor.numel() // at_most)
    return tensor.detach().flatten()[:: stride | 1]
