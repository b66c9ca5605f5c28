"""The official tests of a checkout, run by pytest on a copy where `adapters.py` is this package's."""

import ast
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import __file__ as package
from . import __version__, adapters

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

# Of Spring 2025, whose eight adapters we have.
TAG = "spring2025"
# What a checkout's tests may hold; those of Spring 2025 are a dozen files.
MOST_FILES = 10_000
MOST_BYTES = 1 << 30
# A longer pyproject.toml is none.
MOST_SETTINGS = 1 << 20
# The variable that names the folder which `cs336 official` of the repository removes, however this process ends.
FOLDER = "CS336_WORKER_FOLDER"
# pytest's exit status where its command line or a conftest.py stops it.
USAGE_ERROR = 4
# pytest runs in a copy that is removed, so the files that it writes for the user are resolved from the user's own directory. What
# the plugin writes is how many tests were run when pytest's session ends, which a test or conftest.py may prevent.
PLUGIN = '''import os
import pathlib

import pytest

ran = set()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    written = ("xmlpath", "log_file", "basetemp")
    for name in (name for name in written if getattr(config.option, name, None)):
        path = os.path.expanduser(os.path.expandvars(getattr(config.option, name)))
        # As pytest does, without looking at the folders on the way.
        setattr(config.option, name, os.path.abspath(os.path.join({directory!r}, path)))
    folder = getattr(config.option, "basetemp", None)
    if folder and os.path.lexists(folder):
        raise pytest.UsageError(f"--basetemp: {{folder!r}} exists, and pytest would empty it: name a folder that does not")


def pytest_runtest_logreport(report):
    ran.add(report.nodeid)


def pytest_sessionfinish():
    pathlib.Path(__file__).with_name("ran").write_text(str(len(ran)))
'''


class Refused(Exception):
    """Why the tests cannot start, in words for people."""


def shown(text: object) -> str:
    """The text without characters that act on a terminal: names of files hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def end_at_an_interrupt() -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, once. nohup ignores SIGHUP."""

    def interrupt(*_: object) -> None:
        ignore_interrupts()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def ignore_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run_official(folder: Path, arguments: list[str]) -> int:
    """Copies the tests aside, since ranks are processes of their own that import the adapters, and runs pytest."""
    tests = folder / "tests"
    files = files_in(tests) if tests.is_dir() else []
    top = [file for file in files if file.parent == tests]
    if tests / "adapters.py" not in top or not any(file.match("test_*.py") for file in top):
        raise Refused(f"{shown(folder)} lacks tests/adapters.py or tests/test_*.py: name a checkout of the assignment")
    modules, names = imports(top)
    paths = [folder.resolve(), *pythonpath(folder)]
    missing = [name for name in sorted({*modules, "pytest"}) if is_missing(name, paths)]
    if missing:
        words = "the tests import modules that this Python lacks"
        raise Refused(f"{words}: run `{shlex.quote(sys.executable)} -m pip install {shown(' '.join(missing))}`")
    unknown = sorted(names - set(adapters.__all__))
    if unknown:
        words = f"{', '.join(unknown)}: no adapters of Spring 2025, so the files that import them fail"
        print(f"cs336: {shown(words)}; check out the tag {TAG} to run all", file=sys.stderr)
    print(f"cs336 {__version__} of {shown(Path(package).parent)} answers {shown(tests)}", flush=True)
    return run_copy(tests, files, paths, arguments)


def files_in(folder: Path) -> list[Path]:
    """The files below the folder. Refuses what is none: a link can lead anywhere, and a pipe has no end."""
    files, folders, count, size = [], [folder], 0, 0
    while folders:
        for entry in os.scandir(folders.pop()):
            path = Path(entry.path)
            if entry.name == "__pycache__":
                continue
            if not entry.name.isprintable():
                raise Refused(f"{shown(path)} has a name that cannot be printed: rename it")
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                files.append(path)
                size += entry.stat(follow_symlinks=False).st_size
            else:
                kind = "a link" if entry.is_symlink() else "no regular file"
                raise Refused(f"{shown(path)} is {kind}, which is not copied: put a file or folder in its place")
            count += 1
            if count > MOST_FILES or size > MOST_BYTES:
                limits = f"{MOST_FILES:,} files or {MOST_BYTES >> 20} MiB"
                raise Refused(f"{shown(folder)} holds more than {limits}: remove what is not the checkout's own")
    return sorted(files)


def imports(files: list[Path]) -> tuple[set[str], set[str]]:
    """The packages that the tests import at once, and the names that they take from their adapters."""
    modules, names = set(), set()
    for file in files:
        # The adapters are replaced.
        if file.suffix != ".py" or file.name == "adapters.py":
            continue
        try:
            statements = ast.parse(file.read_bytes()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            words = f"{shown(file)} is no Python: {shown(error) or 'it is nested too deeply'}"
            raise Refused(f"{words}; check out the starter code's tests again") from None
        for node in statements:
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
            elif isinstance(node, ast.ImportFrom) and node.module == "adapters":
                names |= {alias.name for alias in node.names} - {"*"}
    return modules - {"tests"}, names


def pythonpath(folder: Path) -> list[Path]:
    """The folders that the checkout's pyproject.toml has pytest add to Python's path; no other setting counts."""
    file = folder / "pyproject.toml"
    if tomllib is None or not file.is_file() or file.stat().st_size > MOST_SETTINGS:
        return []
    try:
        pytest = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["pytest"]
        named = pytest.get("pythonpath") or pytest["ini_options"]["pythonpath"]
        paths = shlex.split(named) if isinstance(named, str) else named
        return [folder.resolve() / path for path in paths if path.isprintable()]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        # It names none, or pytest could not read it either.
        return []


def is_missing(module: str, paths: list[Path]) -> bool:
    in_checkout = any((path / module).is_dir() or (path / f"{module}.py").is_file() for path in paths)
    return not in_checkout and importlib.util.find_spec(module) is None


def run_copy(tests: Path, files: list[Path], paths: list[Path], arguments: list[str]) -> int:
    """Runs pytest on a copy of these files of the tests; nothing is written into the checkout."""
    with tempfile.TemporaryDirectory(prefix="cs336-official-", dir=os.environ.get(FOLDER) or None) as made:
        copy = Path(made)
        for file in files:
            target = copy / "tests" / file.relative_to(tests)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target, follow_symlinks=False)
        (copy / "tests" / "adapters.py").unlink()
        (copy / "tests" / "adapters.py").write_text("from cs336.adapters import *  # noqa: F403\n")
        (copy / "cs336_ran.py").write_text(PLUGIN.format(directory=os.getcwd()))
        # Without these pytest takes settings and code of a folder above, where other users may write.
        settings = copy / "pytest.ini"
        settings.write_text("[pytest]\n")
        own = ["-c", str(settings), f"--rootdir={copy}", f"--confcutdir={copy}", "-p", "cs336_ran"]
        shows = ["-rA", "--tb=short", "-q", "--continue-on-collection-errors"]
        status = run([sys.executable, "-m", "pytest", *own, "tests", *shows, *arguments], copy, paths)
        ran = copy / "ran"
        if status == USAGE_ERROR:
            # pytest has said why.
            return status
        if status < 0:
            words = f"pytest was ended by signal {-status}"
        elif not ran.exists():
            words = f"pytest ended with status {status} before its session did: a test or conftest.py may have ended it"
        elif ran.read_text() == "0":
            words = f"pytest ended with status {status} and ran no test"
        else:
            return status
        print(f"cs336: {words}", file=sys.stderr)
        return max(status, 1)


def run(command: list[str], copy: Path, paths: list[Path]) -> int:
    """pytest's exit status. It and what it has started end before this returns or raises."""
    # The copy, the checkout's own packages, and this one, wherever it was imported from.
    paths = [str(copy), *map(str, paths), str(Path(package).resolve().parents[1])]
    for path in paths:
        if os.pathsep in path:
            raise Refused(f"{shown(path)} holds a colon, at which PYTHONPATH ends a path: rename or move that folder")
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop(FOLDER, None)
    pytest = subprocess.Popen(command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return pytest.wait()
    finally:
        # Of the copy, which is removed next, nothing must be left.
        ignore_interrupts()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)
        pytest.wait()
