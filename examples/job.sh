#!/bin/sh
# Reserve GPUs while this script runs, and train on them twice.
#   GPUS=4 examples/job.sh
#   DEVICE=cpu examples/job.sh      the same without CUDA in torch
set -u
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

# Empty first: if anything fails (gpuboard is missing or killed, nothing is free), no process sees unreserved GPUs.
export CUDA_VISIBLE_DEVICES=
eval "$(gpuboard allocate --n "${GPUS:-2}" --purpose 'ddp example')" || exit

echo "lease $GPUBOARD_LEASE on $GPUBOARD_NODES, here CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
gpuboard launch --device "${DEVICE:-cuda}" "$here/train_ddp.py" --epochs 3 --lr 1e-3 || exit
gpuboard launch --device "${DEVICE:-cuda}" "$here/train_ddp.py" --epochs 3 --lr 1e-2
