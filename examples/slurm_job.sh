#!/bin/bash
#SBATCH --job-name=train_ddp
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# Train on all GPUs of a Slurm job, one rank per GPU on each of its nodes:
#
#   sbatch examples/slurm_job.sh
#   sbatch --nodes=4 --gpus-per-node=8 examples/slurm_job.sh      another size with the same script
#   DEVICE=cpu sbatch examples/slurm_job.sh                       without CUDA in torch
#
# No --ntasks and no srun: gpuboard starts a supervisor on each node through a step of this job, which starts the ranks.
# The ranks' output goes to the job's output, each line with its rank; after a failure it also has the folder of their
# logs. The job's exit code is that of the rank that failed first.
#
# For a checkpoint before the time limit, add `#SBATCH --signal=B:USR1@120`, handle SIGUSR1 in the training script, and
# keep the `exec` below: Slurm then signals gpuboard itself, which forwards the signal to every rank.
#
# Several launches can share a job: `gpuboard launch --n 4 a.py & gpuboard launch --n 4 b.py & wait`.

exec gpuboard launch --device "${DEVICE:-cuda}" examples/train_ddp.py --epochs 3
