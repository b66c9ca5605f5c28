# Every target is one thin line over cargo and cs336; `make help` lists them.
CS336 = cargo run --quiet --
.DEFAULT_GOAL = help
.PHONY: help setup build writeup test check fuzz measure bundle wheel submission clean
SECONDS = 60

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## make .venv with the pinned PyTorch and the link to its libtorch
	@sh .cargo/setup.sh

build: setup ## compile everything once
	@cargo build --bins --tests

writeup: setup ## measure what is missing or stale here, then build report/writeup.pdf and writeup.html
	@$(CS336) writeup

test: setup ## grade correctness; afterwards plain `cargo test` does the same
	cargo test

check: setup ## what CI runs: format, clippy with warnings denied, tests, snapshot drift
	cargo fmt --check
	cargo clippy --all-targets -- --deny warnings
	INSTA_UPDATE=no cargo test
	$(CS336) writeup --check

fuzz: setup ## fuzz every reader of outside data under libFuzzer, each for SECONDS=60
	@sh suites/fuzz/run.sh $(SECONDS)

measure: setup ## measure this machine's whole profile anew
	@$(CS336) measure

bundle: setup ## pack dist/cs336.tar.gz for a machine with PyTorch and no Rust
	@$(CS336) bundle

wheel: setup ## pack dist/cs336-*.whl, our operators for PyTorch in Python, and test it in a new environment
	@cargo rustc --quiet --lib --crate-type staticlib
	@.venv/bin/python src/python/build.py

submission: setup ## pack dist/writeup.pdf and dist/code.zip; refuses a stale PDF
	@test -z "$$(git status --porcelain)" || { echo "submission: commit your changes first; code.zip holds what is committed" >&2; exit 1; }
	@$(CS336) writeup --fresh
	@mkdir -p dist && cp report/writeup.pdf dist/writeup.pdf
	@git archive --format=zip --output=dist/code.zip HEAD -- . ':!*.pt' ':!*.pth' ':!*.bin' ':!*.pkl' ':!*.pickle' ':!*.log' ':!*.npz'
	@echo "dist/writeup.pdf and dist/code.zip are ready"

clean: ## remove build output and local results; keeps .venv and accepted records
	cargo clean
	git clean -fdXq report dist
