"""Which of the caller's environment variables are sent to the ranks (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from gpuboard.errors import UsageError
from gpuboard.model.text import quoted

_SENT = frozenset({"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS"})
_SENT_PREFIXES = ("CONDA_", "NCCL_", "GLOO_", "TORCH_", "HF_", "WANDB_")

# Variables of torchrun that launch sets for each rank.
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
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)
# Slurm's variables of the whole job (sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"); SLURM_JOB_GPUS is the first node's.
_JOB = frozenset({"SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST"})
_JOB_PREFIXES = ("SLURM_JOB_", "SLURM_ARRAY_")
_FIRST_NODES = frozenset({"SLURM_JOB_GPUS"})
_REFUSED = frozenset(
    {*OWN, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUBOARD_RUN", "GPUBOARD_ATTEMPT", "GPUBOARD_LEASE"}
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def sent(env: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """Return the variables to send: the known families of ``env``, then those of ``--env`` (``K=V``, or ``K`` alone).

    Raises UsageError for an invalid name, a variable that ``env`` lacks, and one that launch sets itself.
    """
    chosen = {k: v for k, v in env.items() if k in _SENT or k.startswith(_SENT_PREFIXES)}
    for word in extra:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {quoted(name)}: not a variable name; write --env NAME=VALUE or --env NAME")
        if name in _REFUSED:
            raise UsageError(f"--env {name}: gpuboard sets {name} for each rank")
        if not equals and name not in env:
            raise UsageError(f"--env {name}: not set in your environment; write --env {name}=VALUE")
        chosen[name] = value if equals else env[name]
    return dict(sorted(chosen.items()))


def of_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the Slurm job as a whole, for the ranks on all nodes: a step lacks some of them.

    Those of one node or task (SLURM_JOB_GPUS, SLURM_PROCID, …) are left out.
    """
    return {k: v for k, v in env.items() if (k.startswith(_JOB_PREFIXES) or k in _JOB) and k not in _FIRST_NODES}


def stale(env: Mapping[str, str]) -> list[str]:
    """Return the names in ``env`` that are left from another launcher and that launch overwrites."""
    return [name for name in OWN if name in env]


def ignored_gpus(env: Mapping[str, str], here: Collection[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES of ``env`` if it selects other GPUs than the ranks on this machine get, else "".

    ``here``: what launch sets on this machine. In a lease's shell and in a Slurm job it is of that lease or job.
    """
    value = env.get("CUDA_VISIBLE_DEVICES", "")
    return (
        "" if value in here or not any(here) or not env.keys().isdisjoint({"GPUBOARD_LEASE", "SLURM_JOB_ID"}) else value
    )


def redacted(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the values of keys and tokens, for files and screens."""
    return {name: "(not shown)" if _SECRET.search(name) else value for name, value in environ.items()}
