#!/bin/sh
# Reserve GPUs for as long as this script lives, train on exactly those, then train something else on the same ones.
#   GPUS=4 examples/job.sh
#   DEVICE=cpu examples/job.sh      the same where torch has no CUDA
set -u
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

# Emptied first: whatever goes wrong (gpuboard missing, killed, nothing free), no process sees a GPU it does not hold.
export CUDA_VISIBLE_DEVICES=
eval "$(gpuboard allocate --n "${GPUS:-2}" --purpose 'ddp example')" || exit

echo "lease $GPUBOARD_LEASE on $GPUBOARD_NODES, here CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
gpuboard launch --device "${DEVICE:-cuda}" "$here/train_ddp.py" --epochs 3 --lr 1e-3 || exit
gpuboard launch --device "${DEVICE:-cuda}" "$here/train_ddp.py" --epochs 3 --lr 1e-2
