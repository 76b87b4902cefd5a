"""Which of the caller's variables travel to the ranks (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpuboard.errors import UsageError
from gpuboard.model.text import quoted

_SENT = frozenset({"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS"})
_SENT_PREFIXES = ("CONDA_", "NCCL_", "GLOO_", "TORCH_", "HF_", "WANDB_")

# What launch alone decides: a script written for torchrun reads these.
OWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)
# Slurm's variables of a job as a whole (sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"), and the one of them that is not.
_JOB = frozenset({"SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST"})
_JOB_PREFIXES = ("SLURM_JOB_", "SLURM_ARRAY_")
_FIRST_NODES = frozenset({"SLURM_JOB_GPUS"})
_REFUSED = frozenset({*OWN, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUBOARD_RUN", "GPUBOARD_LEASE"})
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def sent(env: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """Return the variables that travel: the known families of ``env``, then ``--env`` words (``K=V``, or ``K`` alone).

    Raises UsageError for a word that is not a variable, that the caller lacks, or that launch itself decides.
    """
    chosen = {k: v for k, v in env.items() if k in _SENT or k.startswith(_SENT_PREFIXES)}
    for word in extra:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"--env {quoted(name)} is not the name of a variable; write --env NAME=VALUE or --env NAME"
            )
        if name in _REFUSED:
            raise UsageError(f"--env {name}: launch itself sets {name} for every rank")
        if not equals and name not in env:
            raise UsageError(f"--env {name}: you have no variable {name}; write --env {name}=VALUE")
        chosen[name] = value if equals else env[name]
    return dict(sorted(chosen.items()))


def of_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a batch script may read of its Slurm job, for ranks on all nodes: a step there has less of it.

    Not what is one node's or one task's own (SLURM_JOB_GPUS, SLURM_PROCID, …).
    """
    return {k: v for k, v in env.items() if (k.startswith(_JOB_PREFIXES) or k in _JOB) and k not in _FIRST_NODES}


def stale(env: Mapping[str, str]) -> list[str]:
    """Return the names of ``env`` that an earlier launcher left behind and that this launch overwrites."""
    return [name for name in OWN if name in env]


def redacted(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` as it may lie in a file or stand on a screen: values of keys and tokens are left out."""
    return {name: "(not shown)" if _SECRET.search(name) else value for name, value in environ.items()}
