"""The name of the bug."""

from pathlib import Path

BUG = Path(__file__).with_name("bug.txt").read_text(encoding="utf-8").strip()


def has(*bugs: str) -> bool:
    return BUG in bugs
