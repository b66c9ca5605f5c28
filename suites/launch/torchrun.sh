#!/bin/sh
# Two hosts under torchrun: torchrun.sh HEAD 0 on the first and torchrun.sh HEAD 1 on the second, in the bundle's folder.
# HEAD is the first host's address. A third argument is the number of ranks per host (8), BACKEND=gloo needs no GPU.
#
# Tried: Gloo with one rank in each of two network namespaces of one machine.
# Not tried: two machines, NCCL between them.
set -eu
head=${1:?name the address of the first host}
host=${2:?name this host: 0 on the first, 1 on the second}
ranks=${3:-8}
# A rank waits this many seconds for the others, and says every 10 s which one it awaits.
export CS336_DEADLINE_S=120
on_ranks() {
    torchrun --no-python --nnodes 2 --node-rank "$host" --nproc-per-node "$ranks" --master-addr "$head" \
        --master-port 29500 ./cs336 "$@" --backend "${BACKEND:-nccl}"
}
on_ranks doctor --ranks
on_ranks rank --task nccl_selftest --output results.json
