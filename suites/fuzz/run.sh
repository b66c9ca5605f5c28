#!/bin/sh
# Fuzzes each target (or those named) for SECONDS from its committed inputs, as many at a time as there are processors; what it
# finds stays in target/fuzz.
# usage: run.sh SECONDS [TARGET..]
set -eu
cd "$(dirname "$0")/../.."
export seconds="$1" RUSTC_WORKSPACE_WRAPPER="$PWD/suites/fuzz/rustc.sh"
shift
[ $# -gt 0 ] || set -- suites records cases templates safetensors lines
${CARGO:-cargo} build --quiet --example fuzz
# shellcheck disable=SC2016 # The variables are those of the inner shell.
printf '%s\n' "$@" | xargs -n 1 -P "$(nproc)" sh -euc '
  echo "fuzz: $1, $seconds s"
  mkdir -p "target/fuzz/$1"
  CS336_FUZZ=$1 exec ${CARGO:-cargo} run --quiet --example fuzz -- "target/fuzz/$1" "suites/fuzz/$1" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=8192 -dict=suites/fuzz/tokens.dict \
    -artifact_prefix="target/fuzz/$1-" -verbosity=0 -print_final_stats=1
' sh
