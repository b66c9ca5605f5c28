"""Writes dist/cs336-<version>-py3-none-<platform>.whl and tests it; `make wheel` has built target/debug/libcs336.a."""

import base64
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "python"
BUILD = ROOT / "target" / "wheel"
PACKAGE = BUILD / "cs336"
TORCH = ROOT / ".venv" / "libtorch"
# What the operators compile where no cubin was shipped for the GPU.
KERNELS = ["flash_forward.cu", "flash_backward.cu", "portable_forward.cu", "portable_backward.cu", "adamw.cu"]

PYTEST = "pytest==9.2.0"


def main() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["version"]
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(SOURCE / "cs336", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for kernel in [*KERNELS, *(f"lib/{path.name}" for path in (ROOT / "kernels" / "lib").glob("*.cuh"))]:
        target = PACKAGE / "kernels" / kernel
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "kernels" / kernel, target)
    link_library(PACKAGE / "libcs336.so")
    (PACKAGE / "cubins").mkdir()
    print("wheel: compiling kernels for sm_90a and sm_80 (minutes where the cache has none)", flush=True)
    python(["-c", "import cs336, torch; torch.ops.cs336.write_cubins()"], sys.executable, PYTHONPATH=str(BUILD))
    wheel = pack(version)
    test_installed(wheel)
    print(f"{wheel.relative_to(ROOT)} is ready ({wheel.stat().st_size / 2**20:.0f} MiB); python -m pip install it")


def run(command: list[str | Path], **environment: str) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"wheel: {command[0]} failed with exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def python(arguments: list[str | Path], interpreter: str | Path, **environment: str) -> None:
    run([interpreter, *arguments], PYTHONDONTWRITEBYTECODE="1", **environment)


def link_library(library: Path) -> None:
    """The registration in C++ and our Rust library, as one shared library that the PyTorch of its process completes."""
    includes = [flag for path in ("include/torch/csrc/api/include", "include") for flag in ("-isystem", TORCH / path)]
    # Rust's own symbols stay inside; what the operators do not reach is left out.
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared", "-s"]
    linked = ["-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-Wl,-rpath,$ORIGIN/../torch/lib", "-Wl,--no-undefined"]
    archive = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "debug" / "libcs336.a"
    libraries = [archive, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-lpthread", "-ldl", "-lm"]
    run(["g++", *flags, *includes, SOURCE / "operators.cc", *libraries, *linked, "-o", library])
    remove_paths(library)


def remove_paths(library: Path) -> None:
    """Overwrites this machine's paths, which are in the messages of headers and crates, by slashes of the same length."""
    cargo = os.environ.get("CARGO_HOME") or Path.home() / ".cargo"
    data = library.read_bytes()
    for folder in (TORCH, TORCH.resolve(), ROOT, cargo):
        path = str(folder).encode()
        data = data.replace(path, b"/" * len(path))
    library.write_bytes(data)


def pack(version: str) -> Path:
    """A wheel is a zip archive with METADATA, WHEEL and RECORD (packaging.python.org, Binary distribution format)."""
    tag = f"py3-none-{platform_tag()}"
    info = f"cs336-{version}.dist-info"
    readme = (SOURCE / "README.md").read_text()
    metadata = [
        "Metadata-Version: 2.1",
        "Name: cs336",
        f"Version: {version}",
        "Summary: Attention kernels, a fused AdamW and data parallelism for PyTorch",
        "Requires-Python: >=3.10",
        # libcs336.so relies on this libtorch's class layouts.
        "Requires-Dist: torch==2.11.0",
        "Description-Content-Type: text/markdown",
        "",
        readme,
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: make wheel", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    files = {
        f"{path.relative_to(BUILD)}": path.read_bytes() for path in sorted(PACKAGE.rglob("*")) if path.is_file()
    }
    files[f"{info}/METADATA"] = "\n".join(metadata).encode()
    files[f"{info}/WHEEL"] = "\n".join(wheel).encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\ncs336 = cs336.__main__:main\n"
    record = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    for old in glob.glob(str(ROOT / "dist" / "cs336-*.whl")):
        os.remove(old)
    archive = ROOT / "dist" / f"cs336-{version}-{tag}.whl"
    archive.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in files.items():
            # The same date each time, so that the same files give the same wheel.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            out.writestr(entry, data)
    return archive


def platform_tag() -> str:
    """Names the oldest glibc that has every symbol the library asks for, so that pip refuses it elsewhere."""
    symbols = run(["objdump", "-T", PACKAGE / "libcs336.so"])
    minor = max(int(found) for found in re.findall(r"GLIBC_2\.(\d+)", symbols))
    return f"manylinux_2_{minor}_{os.uname().machine}"


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_installed(wheel: Path) -> None:
    """Installs the wheel into a new environment, which sees .venv's PyTorch, and runs the tests."""
    environment = BUILD / "environment"
    shutil.rmtree(environment, ignore_errors=True)
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    interpreter = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "torch.pth").write_text(f"{TORCH.resolve().parent}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel])
    # The one download: of a megabyte, for the tests of `cs336 official`.
    if subprocess.run([*pip, "install", "--quiet", PYTEST], check=False).returncode != 0:
        print(f"wheel: pip cannot install {PYTEST} (its words are above), so `cs336 official` is tested without it")
    print("wheel: testing it in an environment of its own", flush=True)
    # Not in BUILD: `python -m cs336` would take the package that lies there for the installed one.
    tested = subprocess.run([interpreter, SOURCE / "tests" / "test_wheel.py"], cwd=environment, check=False)
    if tested.returncode != 0:
        sys.exit("wheel: the installed wheel fails its tests, which are named above")


if __name__ == "__main__":
    main()
