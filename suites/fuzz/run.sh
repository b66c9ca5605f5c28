#!/bin/sh
# Fuzzes each target (or those named) for SECONDS from its committed inputs; what it finds stays in target/fuzz.
# usage: run.sh SECONDS [TARGET..]
set -eu
cd "$(dirname "$0")/../.."
seconds=$1
shift
[ $# -gt 0 ] || set -- suites records cases templates safetensors lines
export RUSTC_WORKSPACE_WRAPPER="$PWD/suites/fuzz/rustc.sh"
for target; do
  echo "fuzz: $target, $seconds s"
  mkdir -p "target/fuzz/$target"
  CS336_FUZZ=$target ${CARGO:-cargo} run --quiet --example fuzz -- "target/fuzz/$target" "suites/fuzz/$target" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=8192 -dict=suites/fuzz/tokens.dict \
    -artifact_prefix="target/fuzz/$target-" -verbosity=0 -print_final_stats=1
done
