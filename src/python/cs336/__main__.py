"""The command `cs336` of the wheel: `cs336 official DIR` runs the official tests of a checkout against this package."""

import argparse
import sys
from pathlib import Path

from .official import Refused, end_at_an_interrupt, run_official, shown


def main() -> int:
    """Exit code: pytest's, 1 where it ran no test, 2 where the tests cannot start, or 130 after an interrupt."""
    parser = argparse.ArgumentParser(prog="cs336", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    official = verbs.add_parser("official", help="run a checkout's tests with cs336.adapters as its adapters")
    official.add_argument("folder", type=Path, metavar="DIR", help="a checkout of the assignment, which holds tests/")
    official.add_argument("pytest", nargs="*", metavar="ARG", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    end_at_an_interrupt()
    try:
        return run_official(arguments.folder, arguments.pytest)
    except Refused as error:
        words, code = error, 2
    except OSError as error:
        words, code = f"{shown(error.filename or 'a file')} cannot be used: {error.strerror or shown(error)}", 2
    except KeyboardInterrupt:
        words, code = "interrupted", 130
    print(f"cs336: {words}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
