"""The ways to nodes of a real Slurm: jobs open and close them, pam_slurm_adopt refuses, srun leads past sshd."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host
from tests.integration.slurm_truth import Status, configure, states, status
from tests.integration.test_ladder import give_smi, without_python
from tests.integration.test_slurm_faults import Watch
from tests.integration.test_sources_nodes import put
from tests.slurm import SlurmCluster, configured
from tests.waiting import until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(240)]

ADOPT = Path("/lib/security/pam_slurm_adopt.so")
SLEEP = ("--wrap", "sleep 600")
# As the module's manual has it for compute nodes: nobody but root gets in without a job.
PAM = """
auth required pam_permit.so
account required pam_permit.so
account required pam_slurm_adopt.so
session required pam_permit.so
"""

CONTAIN = configured("PrologFlags=contain")


@pytest.fixture
def adopting(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """Slurm whose node gpu01 only accepts users with a job running on it; with the configuration ``CONTAIN``."""
    if not ADOPT.exists():
        pytest.skip("pam_slurm_adopt (package libpam-slurm-adopt) is not installed")
    gpu01 = slurm.nodes["gpu01"]
    path = gpu01.path("/etc/pam.d/sshd")
    before = path.read_text()
    path.write_text(PAM)
    gpu01.sshd("UsePAM yes")
    yield slurm
    path.write_text(before)


@contextmanager
def watching(slurm: SlurmCluster, *settings: str) -> Iterator[Watch]:
    """What alice sees of gpu01, each half second; Slurm is asked each second."""
    configure(slurm, "alice", *settings, nodes="gpu01")
    with slurm.nodes["login1"].popen(["gpuboard", "status", "--watch", "0.5", "--json"], user="alice") as process:
        try:
            yield Watch(process)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def node(line: Status) -> dict[str, Any]:
    [found] = line["nodes"]
    assert isinstance(found, dict)
    return found


def source(line: Status) -> tuple[str, str | None]:
    return node(line)["source"], node(line)["error"]


def denied(host: Host) -> int:
    return (host.folder / "sshd.log").read_text().count("Access denied for user alice by PAM account configuration")


def asked(host: Host) -> int:
    return (host.folder / "sshd.log").read_text().count(f"Connection from {'10.88.0.21'}")


def assert_left_alone(host: Host, before: int, refused: int) -> None:
    """Check that alice, who was let in once, asked at most once more: where Slurm's word of the end came late."""
    again = asked(host) - before - 1
    assert denied(host) - refused <= again <= 1


def agents(host: Host) -> list[str]:
    """Return what of ours runs on a node for alice."""
    return [p.name for p in host.processes(user="alice") if p.name.startswith(("python", "sshd", "sh"))]


@CONTAIN
@pytest.mark.parametrize(
    ("gpus", "seen"), [([], "ffffffff"), (["--gres=gpu:2"], "aaffffff")], ids=["without GPUs", "with GPUs"]
)
def test_a_job_opens_the_way_of_ssh_when_its_node_is_ready_and_its_end_closes_it(
    adopting: SlurmCluster, gpus: list[str], seen: str
) -> None:
    """Until Slurm's prolog has run there, pam_slurm_adopt finds no job to let her into."""
    gpu01 = adopting.nodes["gpu01"]
    before, refused = asked(gpu01), denied(gpu01)
    with watching(adopting) as watch:
        shown = watch.until(lambda line: source(line) == ("slurm", None), "Slurm shows it")
        assert states(shown, "gpu01") == "ffffffff"
        adopting.daemon("gpu01", "stop")
        number = adopting.submit([*gpus, "-w", "gpu01", "--wrap", "exec sleep 600"], running=True)
        assert adopting.job(number)["Reason"] == "Prolog"
        lines = len(watch.lines)
        watch.until(lambda line: len(watch.lines) > lines + 6, "three seconds have passed, and Slurm was asked thrice")
        assert (source(watch.lines[-1]), asked(gpu01)) == (("slurm", None), before)
        adopting.daemon("gpu01", "continue")
        watch.until(lambda line: source(line) == ("nvml", None), "the job opens the way")
        watch.until(lambda line: states(line, "gpu01") == seen, "two readings have been made")
        assert (asked(gpu01), denied(gpu01)) == (before + 1, refused)
        steps = adopting.run(["squeue", "--steps", "-h", "-u", "alice", "-o", "%j"], check=True).stdout
        assert "gpuboard" not in steps
        adopting.run(["scancel", str(number)], check=True)
        watch.until(lambda line: source(line) == ("slurm", None), "the job's end closes it")
        until(lambda: not agents(gpu01), "nothing is left on the node")
    assert_left_alone(gpu01, before, refused)


@configured("PrologFlags=contain", cgroups=True)
def test_gpus_that_a_job_without_gpus_hides_stay_as_slurm_shows_them(adopting: SlurmCluster) -> None:
    adopting.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], user="bob", running=True)
    with watching(adopting) as watch:
        adopting.submit(["-w", "gpu01", *SLEEP], running=True)
        shown = watch.until(lambda line: source(line) == ("nvml", None), "the job opens the way")
        assert (states(shown, "gpu01"), {line["error"] for line in node(shown)["gpus"]}) == ("aaffffff", {None})
        assert node(shown)["gpus"][2]["reason"] == "free for Slurm; NVML not seen"
        assert all(states(line, "gpu01") in {"aaffffff", "ffffffff"} for line in watch.lines), "none was ever lost"


@CONTAIN
@pytest.mark.parametrize("transport", ["asyncssh", "openssh", "paramiko"])
def test_a_refusal_without_a_job_is_reported_and_not_retried(adopting: SlurmCluster, transport: str) -> None:
    if transport == "paramiko":
        pytest.importorskip("paramiko")
    gpu01 = adopting.nodes["gpu01"]
    before, refused = asked(gpu01), denied(gpu01)
    with watching(adopting, 'ssh = "all"', f'transport = "{transport}"') as watch:
        line = watch.until(lambda line: node(line)["error"], "the refusal is told")
        assert node(line)["error"] == (
            "ssh: gpu01 only accepts users with a job running on it: Access denied by pam_slurm_adopt: you have no "
            "active jobs on this node; start a job there (salloc -w gpu01); gpuboard connects when it runs"
        )
        assert states(line, "gpu01") == "ffffffff"  # for Slurm, which goes on
        seen = len(watch.lines)
        watch.until(lambda line: len(watch.lines) > seen + 12, "six seconds have passed")
        assert (asked(gpu01) - before, denied(gpu01) - refused) == (1, 1)
        adopting.submit(["--gres=gpu:1", "-w", "gpu01", *SLEEP], running=True)
        watch.until(lambda line: source(line) == ("nvml", None), "it is let in with a job")
        assert denied(gpu01) - refused == 1


def test_where_ssh_is_refused_a_step_of_ones_job_leads_there(slurm: SlurmCluster) -> None:
    gpu01 = slurm.nodes["gpu01"]
    gpu01.sshd("DenyUsers alice")
    with watching(slurm) as watch:
        number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
        watch.until(lambda line: source(line) == ("nvml", None), "a step reads it")
        watch.until(lambda line: states(line, "gpu01") == "aaffffff", "two readings have been made")
        assert len(slurm.run(["squeue", "--steps", "-h", "-u", "alice"], check=True).stdout.splitlines()) == 2
        slurm.run(["scancel", str(number)], check=True)
        watch.until(lambda line: source(line) == ("slurm", None), "the way ends with its job")
        errors = {node(line)["error"] for line in watch.lines} - {None}  # until Slurm has said that the job is over
        over = ("Slurm has ended job", f"Slurm job {number} has ended", "refused")
        assert all(any(words in error for words in over) for error in errors), errors
        until(lambda: not agents(gpu01), "nothing is left on the node")


def test_a_step_leads_to_a_node_that_slurm_knows_by_another_name(slurm: SlurmCluster) -> None:
    alias = "Host lab-a\n    HostName gpu01\n\n"
    own = (slurm.nodes.home("alice") / ".ssh" / "config").read_text()
    configure(slurm, "alice", nodes="hostfile:~/hosts")  # the only source of nodes that says as whom to log in
    slurm.nodes["gpu01"].stop_sshd()
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    for name in ("lab-a", "gpu01.lab.example", "alice@gpu01"):
        put(slurm.nodes, "alice", {".ssh/config": alias + own, "hosts": f"{name}\n"})
        found = status(slurm, "alice")
        assert (node(found)["name"], source(found)) == (name.rpartition("@")[2], ("nvml", None))
        assert [{job["id"] for job in gpu["jobs"]} for gpu in node(found)["gpus"][:3]] == [{str(number)}] * 2 + [set()]
        asked = slurm.run(["gpuboard", "allocate", "--n", "1", "--dry-run"])
        assert "sbatch" in asked.stderr + asked.stdout, "it is Slurm's: no claim may be made there"


def test_a_step_leads_to_any_component_of_a_heterogeneous_job(slurm: SlurmCluster) -> None:
    configure(slurm, "alice", nodes="gpu01,gpu03")
    for name in ("gpu01", "gpu03"):  # in the first component and in the second
        slurm.nodes[name].stop_sshd()
    first, second = (["--gres=gpu:2", "-w", "gpu01"], ["--gres=gpu:1", "-w", "gpu02"])
    slurm.submit([*first, ":", *second, *SLEEP], running=True)
    first, second = (["--gres=gpu:1", "-w", "gpu02"], ["--gres=gpu:2", "-w", "gpu03"])
    slurm.submit([*first, ":", *second, *SLEEP], running=True)
    for found in status(slurm, "alice")["nodes"]:
        assert (found["source"], found["error"]) == ("nvml", None)
        assert [len(gpu["jobs"]) for gpu in found["gpus"]] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_without_python_and_without_ssh_nvidia_smi_is_asked_in_a_step(slurm: SlurmCluster) -> None:
    gpu01 = slurm.nodes["gpu01"]
    gpu01.sshd("DenyUsers alice")
    give_smi(gpu01)
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    with without_python(gpu01), watching(slurm, 'python = "/usr/bin/python3"') as watch:
        read = watch.until(lambda line: source(line) == ("nvidia-smi", None), "it is read")
        assert len(node(read)["gpus"]) == 2
    until(lambda: not agents(gpu01), "nothing is left on the node")
