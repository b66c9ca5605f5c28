"""Loads libcs336.so, which registers torch.ops.cs336, into the process that has loaded PyTorch."""

from pathlib import Path

import torch

# libcs336.so is compiled against this libtorch and relies on its class layouts.
_TORCH = "2.11.0"
_FILE = Path(__file__).resolve().parent / "libcs336.so"


def load() -> None:
    """Registers the operators. ImportError: another PyTorch, or a package without its library."""
    version = torch.__version__.split("+")[0]
    if version != _TORCH:
        raise ImportError(f"cs336 is built for torch {_TORCH}, and this is torch {version}: pip install torch=={_TORCH}")
    if not _FILE.is_file():
        raise ImportError(f"{_FILE} is missing: install the wheel that `make wheel` writes")
    torch.ops.load_library(str(_FILE))
