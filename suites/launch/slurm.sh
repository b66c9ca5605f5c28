#!/bin/sh
# Two nodes of eight GPUs under Slurm: sbatch suites/launch/slurm.sh, from a folder that all nodes see.
#
# Tried: the variables that srun sets, in unit tests.
# Not tried: this script, Slurm itself, NCCL between two machines.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=00:20:00
set -eu
# A rank waits this many seconds for the others, and says every 10 s which one it awaits.
export CS336_DEADLINE_S=120
# No NVLink multicast (NVIDIA/nccl#1455); ranks would turn it off themselves.
export NCCL_NVLS_ENABLE=0
srun --kill-on-bad-exit=1 ./cs336 doctor --ranks
srun --kill-on-bad-exit=1 ./cs336 rank --task nccl_selftest --backend nccl --output results.json
