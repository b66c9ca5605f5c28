"""Reads and writes safetensors files (8 bytes of length, a header of JSON, raw little-endian values), and compares tensors."""

import ctypes
import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from .protocol import Refused, kind_of, text_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


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


def write(path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Writes the tensors as they are, wherever they lie, without NumPy, which may be missing."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, values = {}, []
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in codes:
            raise TypeError(f"{name} is {tensor.dtype}, which is none of {', '.join(map(str, codes))}")
        flat = on_cpu(name, tensor)
        values.append(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")
        start, end = end, end + len(values[-1])
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    Path(path).write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *values]))


def on_cpu(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Its values in one dimension; a tensor without values, or whose layout is not dense, has none to give."""
    try:
        return tensor.detach().cpu().contiguous().view(-1)
    except (NotImplementedError, RuntimeError) as error:
        if kind_of(error) == "out_of_memory":
            raise
        what = f"is a tensor on {tensor.device} with layout {tensor.layout}"
        raise Refused(f"{name} {what}, whose values cannot be copied: {text_of(error)}") from error


# Bound before any code of a subject is imported.
_CLONE, _DETACH, _TENSOR = torch.Tensor.clone, torch.Tensor.detach, torch.Tensor
_SYNCHRONIZE = torch.cuda.synchronize if torch.cuda.is_available() else None


def copy(value: object, name: str) -> torch.Tensor:
    """The values of now, in memory of their own; of a tensor itself, since another class may compute them later."""
    if type(value) is not _TENSOR:
        raise Refused(f"{name} is {type(value).__name__}, must be torch.Tensor")
    return _CLONE(_DETACH(value))


def synchronize() -> None:
    """Waits for all streams of the GPU, if there is one."""
    if _SYNCHRONIZE is not None:
        _SYNCHRONIZE()


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


def sample(tensor: torch.Tensor, at_most: int, phase: float = 0.0) -> torch.Tensor:
    """Every n-th element, n odd so that it meets every column of a matrix; all of them where they are few. The first one is at
    this share, below 1, of n.
    """
    stride = max(1, tensor.numel() // at_most) | 1
    return tensor.detach().flatten()[int(phase * stride) :: stride]
