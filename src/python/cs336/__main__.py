"""The command `cs336` of the wheel: `cs336 official DIR` runs the official tests of a checkout against this package."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Exit code: pytest's, or 2 for arguments that name no checkout."""
    parser = argparse.ArgumentParser(prog="cs336", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    official = verbs.add_parser("official", help="run a checkout's tests with cs336.adapters as its adapters")
    official.add_argument("folder", type=Path, metavar="DIR", help="a checkout of the assignment, which holds tests/")
    official.add_argument("pytest", nargs="*", metavar="ARG", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    return run_official(arguments.folder, arguments.pytest)


def run_official(folder: Path, arguments: list[str]) -> int:
    """Copies the tests aside, since ranks are processes of their own that import the adapters again, and runs pytest."""
    tests = folder / "tests"
    if not (tests / "adapters.py").is_file():
        print(f"cs336: {folder} holds no tests/adapters.py: name a checkout of the assignment", file=sys.stderr)
        return 2
    if importlib.util.find_spec("pytest") is None:
        print("cs336: this Python has no pytest: python -m pip install pytest", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="cs336-") as copy:
        shutil.copytree(tests, Path(copy) / "tests")
        (Path(copy) / "tests" / "adapters.py").write_text("from cs336.adapters import *  # noqa: F403\n")
        # The checkout's own packages, and this one, wherever it was imported from.
        paths = [str(folder.resolve()), str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "pytest", "tests", "-rA", "--tb=short", "-q", *arguments]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
