"""Helpers of the tests of leases in Slurm: commands on the login node, shells that hold leases, remaining files."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.hosts import Running
from tests.slurm import SlurmCluster
from tests.waiting import read_line, until

DETACHED = ("--detach", "--for", "20m")


def gpuboard(
    slurm: SlurmCluster, *args: str, user: str = "alice", host: str = "login1", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run gpuboard on a host."""
    return slurm.nodes[host].run(["gpuboard", *args], user=user, env=env)


def settled(slurm: SlurmCluster) -> None:
    """Wait until no job is ending: until then Slurm allocates neither its GPUs nor, usually, its nodes."""
    until(lambda: slurm.jobs() == slurm.jobs(ending=False), "no job is ending")


def allocate(slurm: SlurmCluster, *args: str, user: str = "alice", code: int = 0) -> Any:
    """Reserve without a holder and return the JSON that was printed."""
    settled(slurm)
    done = gpuboard(slurm, "allocate", *DETACHED, "--format", "json", *args, user=user)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def refused(slurm: SlurmCluster, *args: str, code: int) -> str:
    """Return the message of a refused reservation; checks that nothing remains of it."""
    error = allocate(slurm, *args, code=code)["error"]
    assert error["code"] == code
    until(lambda: not left(slurm), "nothing is left of it")
    return str(error["message"])


def shell(slurm: SlurmCluster, *args: str, user: str = "alice", env: dict[str, str] | None = None) -> Running:
    """Start a shell on the login node that evaluates `allocate`, prints its exit code, and runs commands from stdin."""
    settled(slurm)
    options = " ".join(f"'{arg}'" for arg in args)
    script = f"""
        export CUDA_VISIBLE_DEVICES=stale
        eval "$(gpuboard allocate {options})"; echo "code $?"
        while IFS= read -r line; do eval "$line"; done
    """
    return slurm.nodes["login1"].popen(["bash", "-c", script], user=user, env=env, stdin=subprocess.PIPE)


def line_of(process: Running) -> str:
    """Return the next line that a shell prints."""
    return read_line(process).rstrip("\n")


def do(process: Running, command: str) -> str:
    """Have a shell run a command and return the first line that it prints."""
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    return line_of(process)


def keepers(slurm: SlurmCluster) -> list[int]:
    """The pids of alice's keepers, as seen from outside."""
    return [p.pid for p in slurm.nodes["login1"].processes(lambda p: "keeper.daemon" in " ".join(p.argv), user="alice")]


def left(slurm: SlurmCluster, user: str = "alice") -> list[str]:
    """Return the names of all files of leases in the user's state folder, for any host."""
    state = slurm.nodes.home(user) / ".local" / "state" / "gpuboard"
    names = [path for folder in ("leases", "keeper") for path in (state / folder).rglob("*")]
    return sorted(path.name for path in names if path.suffix in {".json", ".alive", ".seen", ".bad"})


def all_gone(slurm: SlurmCluster, user: str = "alice", timeout_s: float = 60.0) -> None:
    """Wait until no job and no file of one is left."""
    until(lambda: not slurm.jobs(), "no job is left", timeout_s)
    until(lambda: not left(slurm, user), f"nothing is left: {left(slurm, user)}", timeout_s)
