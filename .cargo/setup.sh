#!/bin/sh
# Makes .venv with the pinned PyTorch, and .venv/libtorch, the stable link that .cargo/config.toml points cargo at.
# Idempotent: a finished set-up is recognised by its stamp; anything half-finished is made again.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/.complete
wanted=$(cksum <requirements.txt)

missing() { printf 'setup: %s is missing: %s\n' "$1" "$2" >&2; exit 1; }
command -v g++ >/dev/null || missing "g++" "apt-get install g++"
command -v make >/dev/null || missing "make" "apt-get install make"
command -v cargo >/dev/null || missing "cargo (Rust 1.92 or newer)" "install Rust with rustup: https://rustup.rs"
command -v "$python" >/dev/null || missing "$python (3.11 or newer)" "apt-get install python3 python3-venv"

rust=$(cargo --version | sed 's/^cargo 1\.\([0-9]*\).*/\1/')
if ! [ "$rust" -ge 92 ] 2>/dev/null; then
  missing "Rust 1.92 or newer (this is $(cargo --version))" "rustup update stable"
fi

# libtorch is usable when its main library, a header and its version all answer to the pin.
complete() {
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] &&
    [ -x .venv/bin/python ] &&
    [ -e .venv/libtorch/lib/libtorch_cpu.so ] &&
    [ -e .venv/libtorch/include/torch/csrc/api/include/torch/version.h ] &&
    grep -q "2\.11\.0" .venv/libtorch/version.py
}
if complete; then exit 0; fi

# One set-up at a time: a second one waits here and then finds the work done.
if [ -z "${CS336_SETUP_LOCKED:-}" ] && command -v flock >/dev/null; then
  CS336_SETUP_LOCKED=1 exec flock .cargo/setup.sh sh .cargo/setup.sh
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  missing "Python 3.11 or newer (this is $("$python" --version))" "apt-get install python3, or name another with PYTHON=python3.12 make setup"
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing "python3-venv" "apt-get install python3-venv"

[ ! -e .venv ] || echo "setup: .venv is incomplete or of another version; making it again"
rm -rf .venv
echo "setup: installing requirements.txt into .venv (PyTorch is about 5 GB unpacked; this takes a few minutes)"
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt || {
  echo "setup: pip failed (its words are above): check the network and 6 GB of free disk, then 'make setup' again" >&2
  exit 1
}
(cd .venv && ln -sfn lib/python*/site-packages/torch libtorch)
printf '%s\n' "$wanted" >"$stamp"
complete || { echo "setup: libtorch is still incomplete in .venv; run 'rm -rf .venv' and 'make setup' again" >&2; exit 1; }
echo "setup: done"
