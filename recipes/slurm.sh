#!/usr/bin/env bash
#SBATCH --job-name=cmexam_tune --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32 --time=24:00:00
#SBATCH --signal=TERM@120 --requeue --open-mode=append
# One training on several machines under Slurm; killed or requeued, it goes on from its last checkpoint.
#   sbatch recipes/slurm.sh --config full_disc_medllm_cmb.yaml training.deepspeed=zero3 out=/shared/runs/disc
# `out` must be a folder that all machines share.
set -euo pipefail
# torchrun would kill its workers 30 seconds after the signal; all that Slurm gives is for the checkpoint. Full tuning of
# 13B writes 156 GB: if your disk needs longer, raise both.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun has not taken it from sbatch since Slurm 22.05
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" --rdzv_id "$SLURM_JOB_ID" \
  --rdzv_backend c10d --rdzv_endpoint "$head:29500" -m cmexam_tune.train "$@"
