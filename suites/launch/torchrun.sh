#!/bin/sh
# Two hosts under torchrun; run it on both: suites/launch/torchrun.sh HEAD [GPUS], HEAD being the first host's address.
#
# Tried: Gloo with one rank on each side of two network namespaces of one machine (BACKEND=gloo, GPUS=1).
# Not tried: two machines, NCCL between them.
set -eu
head=${1:?name the address of the first host}
ranks=${2:-8}
backend=${BACKEND:-nccl}
# A rank waits this many seconds for the others, and says every 10 s which one it awaits.
export CS336_DEADLINE_S=120
on_ranks() {
    torchrun --no-python --nnodes 2 --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
        --rdzv-id "$1" ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} ./cs336 "$@" --backend "$backend"
}
on_ranks doctor --ranks
on_ranks rank --task nccl_selftest --output results.json
