"""Tests of `cs336 official`: what it runs and refuses, with the pytest of the environment."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import cs336

HAS_PYTEST = importlib.util.find_spec("pytest") is not None
CHECKOUT = Path(__file__).resolve().parent / "checkout"


def official(folder: Path, *more: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cs336", "official", folder, *more]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def the_official_command_names_what_is_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        done = official(Path(folder))
        assert done.returncode == 2 and "lacks tests/adapters.py or tests/test_*.py: name a" in done.stderr, done
        tests.mkdir()
        (tests / "adapters.py").touch()
        assert official(Path(folder)).returncode == 2
        (tests / "test_one.py").write_text("import pytest, no_such_module\n")
        done = official(Path(folder))
        assert done.returncode == 2 and "-m pip install no_such_module" in done.stderr, done
        assert ("no_such_module pytest" in done.stderr) == (not HAS_PYTEST), done
        (tests / "test_one.py").write_text("import pytest\nasser\tTrue :\n")
        done = official(Path(folder))
        assert done.returncode == 2 and "is no Python: invalid syntax" in done.stderr, done


def the_official_command_runs_a_checkouts_tests_with_our_adapters_and_changes_nothing_there() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CHECKOUT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        before = sorted(Path(folder).rglob("*"))
        done = official(Path(folder))
        assert done.returncode == 0, done
        for name in ("test_attention.py::test_pytorch", "test_training.py::test_sharded_optimizer"):
            assert f"PASSED tests/{name}" in done.stdout, done
        assert f"{cs336.__version__} of {Path(cs336.__file__).parent} answers" in done.stdout, done
        assert re.search(r"^5 passed", done.stdout, re.MULTILINE) or torch.cuda.is_available(), done
        assert sorted(Path(folder).rglob("*")) == before
        # Of another year: the other tests run all the same.
        (Path(folder) / "tests" / "test_fsdp.py").write_text("from .adapters import get_fsdp\n")
        (Path(folder) / "tests" / "test_training.py").unlink()
        done = official(Path(folder))
        assert done.returncode == 1 and "get_fsdp: no adapters of Spring 2025" in done.stderr, done
        assert "PASSED tests/test_attention.py::test_pytorch" in done.stdout, done


def the_checkouts_tests_fail_with_its_own_adapters() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    failed = "7 failed" if torch.cuda.is_available() else "5 failed"
    assert done.returncode == 1 and "NotImplementedError" in done.stdout and failed in done.stdout, done


def checkout(folder: str, **files: str) -> Path:
    """A checkout of one test, with these files of its tests/, whose names end in .py."""
    tests = Path(folder) / "checkout" / "tests"
    tests.mkdir(parents=True)
    for name, text in {"__init__": "", "adapters": "", "test_one": "def test_one(): pass\n", **files}.items():
        (tests / f"{name}.py").write_text(text)
    return tests.parent


def no_settings_and_no_code_of_a_folder_above_the_copy_are_taken() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        (Path(folder) / "conftest.py").write_text(f"open({folder + '/taken'!r}, 'w')\n")
        named = checkout(folder)
        done = official(named, TMPDIR=folder)
        assert done.returncode == 0 and "PASSED tests/test_one.py::test_one" in done.stdout, done
        assert not (Path(folder) / "taken").exists()


def the_checkouts_own_path_is_honoured() -> None:
    for settings in ('[tool.pytest.ini_options]\npythonpath = "lib"', '[tool.pytest]\npythonpath = ["lib"]'):
        with tempfile.TemporaryDirectory() as folder:
            named = checkout(folder, test_two="import helper_of_theirs\ndef test_two(): pass\n")
            (named / "lib").mkdir()
            (named / "lib" / "helper_of_theirs.py").touch()
            (named / "pyproject.toml").write_text(settings)
            done = official(named)
            assert done.returncode == 0 and "2 passed" in done.stdout, done


def tests_of_which_none_is_run_fail_with_words() -> None:
    for files, more, words in (
        ({"conftest": "import os\nos._exit(0)\n"}, (), "status 0 before its session did"),
        ({"test_one": "import os\ndef test_one(): os._exit(0)\n"}, (), "status 0 before its session did"),
        ({}, ("-k", "nothing"), "and ran no test"),
        ({}, ("--collect-only",), "and ran no test"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            done = official(checkout(folder, **files), "--", *more)
            assert done.returncode != 0 and words in done.stderr, done


def the_files_that_pytest_writes_are_the_users() -> None:
    with tempfile.TemporaryDirectory() as folder:
        named, cwd = checkout(folder, test_one="def test_one(tmp_path): pass\n"), Path(folder) / "its own"
        cwd.mkdir()
        arguments = ("--junitxml=~/a.xml", "--log-file", "b.log", "--basetemp=made")
        done = official(named, "--", *arguments, cwd=cwd, HOME=folder, PYTEST_ADDOPTS="--junit-xml=c.xml")
        assert done.returncode == 0 and "1 passed" in done.stdout, done
        assert (Path(folder) / "a.xml").is_file() and sorted(os.listdir(cwd)) == ["b.log", "made"], os.listdir(cwd)
        done = official(named, cwd=cwd, PYTEST_ADDOPTS="--junit-xml=c.xml")
        assert done.returncode == 0 and (cwd / "c.xml").is_file(), done


def pytest_empties_no_folder_of_the_user() -> None:
    with tempfile.TemporaryDirectory() as folder:
        named, cwd = checkout(folder), Path(folder) / "data"
        (cwd / "below").mkdir(parents=True)
        (cwd / "thesis").touch()
        before = sorted(Path(folder).rglob("*"))
        for value in ("", ".", "..", "below", "new/../below", "../checkout", str(cwd), folder):
            for more, variables in (((f"--basetemp={value}",), {}), ((), {"PYTEST_ADDOPTS": f"'--basetemp={value}'"})):
                done = official(named, "--", *more, cwd=cwd, **variables)
                assert done.returncode != 0 and "basetemp" in done.stderr, (value, done)
                assert sorted(Path(folder).rglob("*")) == before, value


def an_interrupt_ends_pytest_and_removes_the_copy() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with tempfile.TemporaryDirectory() as folder:
            started = Path(folder) / "started"
            lines = ("import os, time", "def test_one():", f"    open({str(started)!r}, 'w').write(str(os.getpid()))")
            named = checkout(folder, test_one="\n".join([*lines, "    time.sleep(600)\n"]))
            (Path(folder) / "tmp").mkdir()
            environment = {**os.environ, "TMPDIR": f"{folder}/tmp"}
            command = [sys.executable, "-m", "cs336", "official", named]
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            running = subprocess.Popen(command, env=environment, **silent)
            while not started.exists() or not started.read_text():
                assert running.poll() is None, running.communicate()
                time.sleep(0.05)
            running.send_signal(number)
            _, said = running.communicate()
            assert running.returncode == 130 and said == "cs336: interrupted\n", (running.returncode, said)
            assert not os.path.exists(f"/proc/{started.read_text()}")
            assert not os.listdir(f"{folder}/tmp")


NEED_PYTEST = [
    the_official_command_runs_a_checkouts_tests_with_our_adapters_and_changes_nothing_there,
    the_checkouts_tests_fail_with_its_own_adapters,
    no_settings_and_no_code_of_a_folder_above_the_copy_are_taken,
    the_checkouts_own_path_is_honoured,
    the_files_that_pytest_writes_are_the_users,
    pytest_empties_no_folder_of_the_user,
    tests_of_which_none_is_run_fail_with_words,
    an_interrupt_ends_pytest_and_removes_the_copy,
]
TESTS = [the_official_command_names_what_is_missing, *NEED_PYTEST]
