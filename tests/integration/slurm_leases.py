"""What tests of leases in Slurm share: commands on the login node, shells that hold leases, what is left behind."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.hosts import Running
from tests.slurm import SlurmCluster
from tests.waiting import until

DETACHED = ("--detach", "--for", "20m")


def gpuboard(
    slurm: SlurmCluster, *args: str, user: str = "alice", host: str = "login1", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run gpuboard on a host."""
    return slurm.nodes[host].run(["gpuboard", *args], user=user, env=env)


def settled(slurm: SlurmCluster) -> None:
    """Wait until no job is about to end: until then Slurm keeps its GPUs, and mostly all of its nodes, from others."""
    until(lambda: slurm.jobs() == slurm.jobs(ending=False), "Slurm has done with the jobs that end")


def allocate(slurm: SlurmCluster, *args: str, user: str = "alice", code: int = 0) -> Any:
    """Reserve without a holder and return the JSON that was printed."""
    settled(slurm)
    done = gpuboard(slurm, "allocate", *DETACHED, "--format", "json", *args, user=user)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def refused(slurm: SlurmCluster, *args: str, code: int) -> str:
    """Return the words with which a reservation was refused; nothing is left of it."""
    error = allocate(slurm, *args, code=code)["error"]
    assert error["code"] == code
    until(lambda: not left(slurm), "nothing is left of it")
    return str(error["message"])


def shell(slurm: SlurmCluster, *args: str, user: str = "alice", env: dict[str, str] | None = None) -> Running:
    """Start a shell on the login node that evaluates `allocate`, says how that went, and then does what it is told."""
    settled(slurm)
    words = " ".join(f"'{arg}'" for arg in args)
    script = f"""
        export CUDA_VISIBLE_DEVICES=stale
        eval "$(gpuboard allocate {words})"; echo "code $?"
        while IFS= read -r line; do eval "$line"; done
    """
    return slurm.nodes["login1"].popen(["bash", "-c", script], user=user, env=env, stdin=subprocess.PIPE)


def says(process: Running) -> str:
    """Return the next line that a shell prints."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def do(process: Running, command: str) -> str:
    """Have a shell run a command and return the first line that it prints."""
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    return says(process)


def left(slurm: SlurmCluster, user: str = "alice") -> list[str]:
    """Return what lies in the state folder for leases, on whatever host, once the keepers have done their work."""
    state = slurm.nodes.home(user) / ".local" / "state" / "gpuboard"
    names = [path for folder in ("leases", "keeper") for path in (state / folder).rglob("*")]
    return sorted(path.name for path in names if path.suffix in {".json", ".alive", ".seen", ".bad"})


def all_gone(slurm: SlurmCluster, user: str = "alice", timeout_s: float = 60.0) -> None:
    """Wait until no job is left, and no file of one."""
    until(lambda: not slurm.jobs(), "no job is left", timeout_s)
    until(lambda: not left(slurm, user), f"nothing is left: {left(slurm, user)}", timeout_s)
