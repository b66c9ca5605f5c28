"""Packages that a peer measures where they are installed, or the reason and the remedy where they are not."""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from .protocol import version_of, words_of

T = TypeVar("T")


def loaded(package: str, load: Callable[[], T], install: str) -> tuple[T | None, dict]:
    """What `load` imports out of `package`, and the reply to `open`: its version, or why there is none."""
    try:
        return load(), {"accepted": {"version": version_of(package) or "unknown"}}
    except Exception as error:  # noqa: BLE001 - whatever its import raises, the other columns are measured
        # A package that is there may lack one of its own.
        is_missing = isinstance(error, ModuleNotFoundError) and version_of(package) is None
        what = "is not installed" if is_missing else f"cannot be imported ({words_of(error)})"
        return None, {"refused": f"{package} {what}: run {install}"}


def wheel() -> tuple[ModuleType | None, dict]:
    """The package that `make wheel` packs, and the reply to `open`."""

    def load() -> ModuleType:
        import cs336

        return cs336

    return loaded("cs336", load, "make wheel, then python -m pip install dist/cs336-*.whl")
