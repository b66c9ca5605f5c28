"""Serves a subject, a folder with the assignment's adapters, in a process of its own.

Inputs and results travel in safetensors files. What is expected of a result never comes here: the other side compares.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

if importlib.util.find_spec("torch") is None:
    remedy = "name it among the dependencies in pyproject.toml and grade with --install, or name another Python in PYTHON"
    sys.exit(f"{sys.executable} has no module torch, which every adapter needs; {remedy}")

import torch

from . import protocol
from .adapters import Attention, Calling, Replica, Sharded
from .group import Group
from .protocol import Refused, text_of
from .timed import TimedAttention, TimedSteps

ADAPTERS = ["tests/adapters.py", "adapters.py"]
# Its packages, which no index has.
STARTER_CODE = ["cs336_basics", "cs336_systems"]


class Unbuilt(importlib.metadata.Distribution):
    """The metadata of a project that lies in the subject and is not installed."""

    def __init__(self, project: dict) -> None:
        self.text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project.get('version', '0')}\n"

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: str) -> Path:
        return Path(path)


class Projects:
    """Finds the metadata of the subject's projects after that of installed ones, since packages ask for their version."""

    def __init__(self, folders: list[Path]) -> None:
        self.found: dict[str, Unbuilt] = {}
        for folder in folders:
            # pytest does not read it, whatever it holds.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
                self.found[normal(project["name"])] = Unbuilt(project)

    def find_spec(self, *_: object) -> None:
        """No module is found here."""

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> Iterator[Unbuilt]:
        return (unbuilt for name, unbuilt in self.found.items() if context.name is None or normal(context.name) == name)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pythonpath(folder: Path) -> list[Path]:
    """The folders that the subject's pyproject.toml has pytest add to Python's path; no other setting of pytest counts."""
    # Where it names none, or pytest could not read it either.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pytest = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
        named = pytest.get("pythonpath") or pytest["ini_options"]["pythonpath"]
        return [folder / path for path in (shlex.split(named) if isinstance(named, str) else named)]
    return []


def unparsed(file: Path) -> str | None:
    """Why a file that is there is no TOML."""
    try:
        tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return text_of(error)
    return None


def is_found(module: str) -> bool:
    # A module that was imported may have no specification.
    with contextlib.suppress(ImportError, ValueError):
        return module in sys.modules or importlib.util.find_spec(module) is not None
    return False


class Subject:
    """The subject's adapters, and what the last job made of them; each job takes and gives an object of JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adapters: ModuleType | None = None
        self.tested: Attention | Replica | Sharded | TimedAttention | TimedSteps | None = None
        self.group: Group | None = None

    def load(self) -> dict:
        """Imports the adapters as pytest does."""
        file = next((name for name in ADAPTERS if (self.folder / name).is_file()), None)
        if file is None:
            raise Refused(f"the folder has neither {' nor '.join(ADAPTERS)}")
        nested = [path.parent for path in sorted(self.folder.glob("*/pyproject.toml"))]
        sys.meta_path.append(Projects([self.folder, *nested]))
        # What is installed comes first, as under pytest, except for the folder itself and those that it has pytest add.
        sys.path[:0] = [str(self.folder), *map(str, pythonpath(self.folder))]
        sys.path += map(str, nested)
        with self.calling(f"importing {file}"):
            self.adapters = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        return {}

    def join(self, rank: int, world_size: int, store: str, backend: str, device: str) -> dict:
        # The first optimizer imports PyTorch's compiler, which takes seconds that no adapter should be charged for.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.group = Group(torch.device(device), backend, rank, world_size, store)
        return {}

    def forward(self, adapter: str, **settings) -> dict:
        self.tested = Attention(self.adapter(adapter), self.calling_function(adapter), "triton" in adapter)
        return self.tested.forward(**settings)

    def calling_function(self, adapter: str) -> Calling:
        return functools.partial(self.calling, f"the function of {adapter}", needs_missing_gpu(adapter))

    def choose(self, adapter: str, **settings) -> dict:
        self.tested = TimedAttention(self.adapter(adapter), self.calling_function(adapter), **settings)
        return {}

    def prepare(self, **settings) -> dict:
        return self.tested.prepare(**settings)

    def gradient(self, **settings) -> dict:
        return self.tested.gradient(**settings)

    def begin(self, adapter: str, hooks: list[str], **settings) -> dict:
        # The last turn's model must not be in memory beside this one's.
        self.tested = None
        protocol.free_memory()
        calling = functools.partial(self.calling, f"training by {adapter}")
        self.tested = TimedSteps(self.adapter(adapter), [self.adapter(name) for name in hooks], calling, self.group)
        return self.tested.begin(**settings)

    def tokens(self, **settings) -> dict:
        return self.tested.prepare(**settings)

    def run(self, **settings) -> dict:
        return self.tested.run(**settings)

    def give(self, **settings) -> dict:
        return self.tested.give(**settings)

    def nothing(self) -> dict:
        """What a message and its reply take."""
        return {}

    def backward(self, **settings) -> dict:
        return self.tested.backward(**settings)

    def another(self, **settings) -> dict:
        return self.tested.another(**settings)

    def replicate(self, adapter: str, hooks: list[str], **settings) -> dict:
        calling = functools.partial(self.calling, f"training under the module of {adapter}")
        self.tested = Replica(self.adapter(adapter), [self.adapter(name) for name in hooks], calling)
        return self.tested.start(**settings)

    def shard(self, adapter: str, **settings) -> dict:
        calling = functools.partial(self.calling, f"training with the optimizer of {adapter}")
        self.tested = Sharded(self.adapter(adapter), calling)
        return self.tested.start(**settings)

    def step(self, **settings) -> dict:
        return self.tested.step(**settings)

    def adapter(self, name: str) -> Callable:
        adapter = getattr(self.adapters, name, None)
        if adapter is None:
            raise Refused(f"the adapters lack {name}")

        def call(*arguments: object, **named: object) -> object:
            with self.calling(name, needs_missing_gpu(name)):
                result = adapter(*arguments, **named)
            # What a subject sets at an import would round its products to fewer bits than those that it is compared with.
            torch.set_float32_matmul_precision("highest")
            return result

        return call

    @contextlib.contextmanager
    def calling(self, what: str, without_gpu: bool = False) -> Iterator[None]:
        """Turns whatever the subject raises into a sentence about `what`, which may need the GPU that is not there."""
        try:
            yield
        except (Refused, MemoryError, torch.OutOfMemoryError):
            raise
        except NotImplementedError as error:
            words = f": {text}" if (text := text_of(error)) else ""
            raise Refused(f"{what} raises NotImplementedError{self.place(error)}{words}") from error
        except SystemExit as error:
            raise Refused(f"{what} calls sys.exit({text_of(error.code, repr)}){self.place(error)}") from error
        except ModuleNotFoundError as error:
            raise Refused(self.lacks(what, error)) from error
        except BaseException as error:
            if "tried to allocate" in text_of(error):
                raise
            under = " under Triton's interpreter" if without_gpu else ""
            words = f"{what} raises {type(error).__name__}{under}{self.place(error)}: {text_of(error)}"
            raise Refused(words, needs_gpu=without_gpu) from error

    def place(self, error: BaseException) -> str:
        """The innermost line of the subject."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(self.folder)]
        if not own:
            return ""
        return f" ({Path(own[-1].filename).relative_to(self.folder)}, line {own[-1].lineno})"

    def lacks(self, what: str, error: ModuleNotFoundError) -> str:
        name = text_of(error.name)
        module = name.partition(".")[0]
        if name != module and is_found(module):
            return f"{what} needs the module {name}, which {module} does not hold{self.place(error)}"
        with_pip = importlib.util.find_spec("pip") is not None
        install = f"{sys.executable} -m pip install" if with_pip else f"uv pip install --python {sys.executable}"
        other = ", or grade with --install" if (self.folder / "pyproject.toml").is_file() else ""
        lacks = f"{what} needs the module {module}, which {sys.executable} lacks{self.place(error)}"
        # A package index may have another one of this name.
        own = next((path.parent for ending in ["", ".py"] for path in self.folder.glob(f"*/{module}{ending}")), None)
        if own is not None:
            folder = own.relative_to(self.folder)
            if (why := unparsed(self.folder / "pyproject.toml")) is not None:
                return f"{lacks}; it lies in {folder}, and pyproject.toml, which may name that, cannot be read: {why}"
            adds = f'pythonpath = ["{folder}"] to [tool.pytest.ini_options] in pyproject.toml'
            return f"{lacks}; it lies in {folder}: add {adds}{other}"
        if module in STARTER_CODE:
            return f"{lacks}; it is a part of the starter code: add it to the folder{other}"
        return f"{lacks}; run `{install} {module}`{other}"


def needs_missing_gpu(adapter: str) -> bool:
    return "triton" in adapter and not torch.cuda.is_available()


def main(folder: str) -> None:
    channel = protocol.Channel()
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    subject = Subject(Path(folder))
    graded = ["load", "join", "forward", "another", "backward", "replicate", "shard", "step"]
    timed = ["choose", "prepare", "gradient", "begin", "tokens", "run", "give", "nothing"]
    channel.serve({name: getattr(subject, name) for name in graded + timed}, protocol.hello(device))
