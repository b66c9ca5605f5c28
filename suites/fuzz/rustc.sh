#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `make fuzz`: instruments this crate for libFuzzer with cargo-fuzz's flags, without a sanitizer.
case " $* " in
*" --crate-name cs336 "* | *" --crate-name fuzz "*) ;;
*) exec "$@" ;;
esac
exec "$@" --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0
