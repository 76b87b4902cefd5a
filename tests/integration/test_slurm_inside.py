"""Inside a Slurm job: gpuboard uses that job's GPUs on all its nodes, over steps of the job; no node has an sshd."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch_lab import FAMILY, SLEEP
from tests.integration.slurm_lab import FAKE, HOME, ON_GPUS, Lab, opened
from tests.integration.slurm_truth import configure, states, status
from tests.slurm import SlurmCluster, configured
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

EXAMPLES = Path(__file__).parents[2] / "examples"
WHO = "import os\nprint(*(os.environ.get(k, '-') for k in %r.split()), os.uname().nodename)\n"


@pytest.fixture
def lab(slurm: SlurmCluster) -> Iterator[Lab]:
    """See slurm_lab."""
    with opened(slurm) as lab:
        yield lab


def ranks(out: str) -> list[str]:
    """Return what the ranks of a launch printed, by rank."""
    return [line.partition("] ")[2] for line in sorted(out.splitlines()) if line.startswith("[rank ")]


@pytest.mark.torch
def test_the_example_trains_on_two_nodes(lab: Lab) -> None:
    lab.login.run(["cp", "-r", str(EXAMPLES), "examples"], check=True)
    options = ["--gpus-per-node=1", f"--output={HOME}/out", "--export=ALL,DEVICE=cpu,OMP_NUM_THREADS=1"]
    number = lab.slurm.submit([*options, "examples/slurm_job.sh"])
    until(lambda: lab.slurm.job(number)["JobState"] in {"COMPLETED", "FAILED"}, "the job ends", 150)
    out = lab.text("out")
    losses = [float(loss) for loss in re.findall(r"^\[rank 0 gpu01:0\] epoch \d+ +loss ([0-9.]+)", out, re.MULTILINE)]
    assert lab.slurm.job(number)["ExitCode"] == "0:0", out
    assert len(losses) == 3, out
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("slurm", "shape", "devices"),
    [
        ({}, ["--gpus=4"], "1,2,3"),
        # a device cgroup hides the others, and CUDA counts from 0
        ({"cgroups": True}, ["--ntasks=4", "--gpus-per-task=1"], "0,1,2"),
    ],
    indirect=["slurm"],
    ids=["gpus", "gpus of tasks, in cgroups"],
)
def test_uneven_nodes_give_all_their_gpus(lab: Lab, shape: list[str], devices: str) -> None:
    first = lab.submit("sleep 600", "--gres=gpu:1", "--nodelist=gpu01")  # so that the job's indexes do not begin at 0
    until(lambda: first.state == "RUNNING")
    lab.put("script.py", WHO % "RANK LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES MASTER_ADDR")
    script = f"gpuboard launch {ON_GPUS} script.py; scontrol show job -d $SLURM_JOB_ID"
    job = lab.run(script, *shape, "--nodes=2", "--nodelist=gpu0[1-2]")
    assert re.findall(r"Nodes=(\S+) .*GRES=(\S+)", job.out) == [
        ("gpu01", "gpu:h100:3(IDX:1-3)"),
        ("gpu02", "gpu:h100:1(IDX:0)"),
    ]
    assert ranks(job.out) == [f"{n} {n} 3 {devices} 10.88.0.11 gpu01" for n in range(3)] + [
        "3 0 1 0 10.88.0.11 gpu02"
    ], job.err
    assert job.state == "COMPLETED"


@configured(gres="Name=gpu Type=h100 File=/dev/nvidia[2-5]")
def test_gpus_are_numbered_as_by_slurm(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK CUDA_VISIBLE_DEVICES")
    script = f"""
gpuboard launch {ON_GPUS} script.py
(eval "$(gpuboard allocate --n 2)"; gpuboard doctor --json --rank-map "$GPUBOARD_RANK_MAP")
echo $SLURM_JOB_GPUS"""
    job = lab.run(script, "--gpus=2", "-N2")
    assert ranks(job.out) == ["0 0 gpu01", "1 0 gpu02"], job.err
    checks = next(json.loads(line)["checks"] for line in job.out.splitlines() if line.startswith("{"))
    found = {(c["node"], c["status"], c["cause"]) for c in checks if c["name"] == "GPU"}
    assert found == {("gpu01", "ok", ""), ("gpu02", "ok", "")}, "Slurm's own allocation to this job does not count"
    assert job.out.splitlines()[-1] == "0", "CUDA_VISIBLE_DEVICES of the job's other programs"


def test_launches_share_a_job_without_overlap(lab: Lab) -> None:
    lab.put("script.py", SLEEP)
    lab.put("quick.py", WHO % "RANK")
    script = f"""
gpuboard launch --n 3 {ON_GPUS} script.py &
until [ -e up ]; do sleep 0.1; done
gpuboard launch --n 2 {ON_GPUS} quick.py; echo two $?
gpuboard launch --n 1 {ON_GPUS} quick.py; echo one $?
kill %1; wait"""
    job = lab.submit(script, "--gpus=4", "--nodes=2")
    job.wait_out("up", 3)
    lab.put("up", "")
    job.wait()
    assert re.findall(r"^(?:two|one) \d+", job.out, re.MULTILINE) == ["two 4", "one 0"], job.err
    assert "requested 2 GPUs; " in job.err
    assert "3 reserved" in job.err
    assert f"only GPUs of Slurm job {job.number} were considered" in job.err
    assert "\n0 gpu02\n" in job.out, "the first launch uses this node's"
    assert lab.claims() == []


def test_claims_of_a_killed_job_neither_count_nor_block_once_slurm_reports_its_end(lab: Lab) -> None:
    lab.host("gpu01").resume_sshd()
    configure(lab.slurm, "root", 'ssh = "all"', nodes="gpu01")
    lab.put("script.py", SLEEP)
    lab.put("quick.py", WHO % "RANK")
    job = lab.submit(f"gpuboard launch {FAKE} script.py", "--gpus=2", "--nodelist=gpu01")
    job.wait_out("up", 2)

    def seen(wanted: str) -> bool:
        return states(status(lab.slurm, "root"), "gpu01") == wanted

    def leases() -> int:
        listed = lab.slurm.run(["gpuboard", "leases", "--json"], user="root", check=True).stdout
        return len(json.loads(listed)["leases"])

    until(lambda: seen("aaffffff"), "Slurm is seen")
    assert leases() == 1
    lab.kill_all("gpu01")  # the keeper, too, which would release the claims
    job.wait()
    claimed = lab.claims()
    assert len(claimed) == 2
    until(lambda: seen("ffffffff"), "it is free")
    assert leases() == 0
    assert lab.claims() == claimed, "the claims themselves are still there"
    again = lab.run(f"gpuboard launch {FAKE} quick.py; gpuboard leases", "--gpus=2", "--nodelist=gpu01")
    assert ranks(again.out) == ["0 gpu01", "1 gpu01"], again.err
    assert "no leases" in again.out, "claims of another job are not listed"


def test_a_rank_that_fails_ends_both_nodes(lab: Lab) -> None:
    lab.put("fails.py", "import os, time\nos.environ['RANK'] == '1' and exec('raise ValueError(1)')\ntime.sleep(600)\n")
    job = lab.run(f"gpuboard launch {FAKE} fails.py; echo code $?; gpuboard leases", "--gpus=2", "--nodes=2")
    assert "code 1\nno leases" in job.out, job.err
    assert "rank 1 (gpu02:0) failed before init_process_group: ValueError: 1 at" in job.err
    until(lambda: not lab.processes(), "nothing of it is left")


def test_usr1_reaches_the_ranks_and_scancel_ends_all_of_it(lab: Lab) -> None:
    saves = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('saved', flush=True))\n"
    lab.put("script.py", saves + FAMILY)
    job = lab.submit(f"exec gpuboard launch {FAKE} script.py", "--gpus=2", "--nodes=2", "--signal=B:USR1@60")
    job.wait_out("up", 2)
    job.cancel("--signal=USR1", "--batch")  # as Slurm does a minute before the end with --signal=B:
    job.wait_out("saved", 2)
    until(lambda: "forwarding SIGUSR1 to ranks 0-1" in job.err, "it reports it")
    job.cancel("--signal=USR1")  # to all steps: to the ranks on the other node, past the supervisor there
    job.wait_out("saved", 3)
    job.cancel()
    job.wait()
    until(lambda: not lab.processes(), "nothing of it is left")
    assert f"Slurm is ending job {job.number}: it was cancelled, or it reached its time limit" in job.err
    assert job.out.count("saved") == 3


@configured(cgroups=True)
def test_scancel_ends_all_of_it_in_cgroups(lab: Lab) -> None:
    lab.put("script.py", FAMILY)
    job = lab.submit(f"exec gpuboard launch {FAKE} script.py", "--gpus=2", "--nodes=2")
    job.wait_out("up", 2)
    job.cancel()
    job.wait()
    until(lambda: not lab.processes(), "nothing of it is left")
    assert f"Slurm is ending job {job.number}: it was cancelled, or it reached its time limit" in job.err


def test_a_requeued_job_works_again(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK SLURM_RESTART_COUNT" + "\nimport sys, time\nsys.stdout.flush()\ntime.sleep(600)\n")
    job = lab.submit(f"gpuboard launch {FAKE} script.py", "--gpus=2", "--nodes=2", "--requeue", "--open-mode=append")
    job.wait_out("[rank ", 2)
    lab.slurm.run(["scontrol", "requeue", str(job.number)], check=True)
    until(lambda: job.state == "PENDING" and not lab.processes(), "all has ended, and the job is pending again")
    assert lab.claims(), "no step can release the claims on the other node"
    lab.slurm.run(["scontrol", "update", f"jobid={job.number}", "StartTime=now"], user="root", check=True)
    job.wait_out("[rank ", 4)
    assert ranks(job.out)[::2] == ["0 - gpu01", "1 - gpu02"]
    assert ranks(job.out)[1::2] == ["0 1 gpu01", "1 1 gpu02"]
    job.cancel()


def test_a_job_without_gpus_has_none(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK")
    script = f"""
gpuboard allocate --n 1; echo code $?
gpuboard launch script.py; echo code $?
gpuboard launch --n 2 {FAKE} script.py"""
    job = lab.run(script, "--nodes=2", "--nodelist=gpu0[1-2]")
    message = f"gpuboard: Slurm job {job.number} has no GPUs; request them when you submit it, e.g. --gpus=2"
    assert job.err.count(message) == 2
    assert job.out.count("code 3") == 2
    assert ranks(job.out) == ["0 gpu01", "1 gpu02"], job.err


def test_one_node_needs_no_controller(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK")
    script = f"until [ -e go ]; do sleep 0.1; done; gpuboard launch {FAKE} script.py; date +%s.%N"
    job = lab.submit(script, "--gpus=2", "--nodelist=gpu01")
    until(lambda: lab.processes(["gpu01"]), "its script runs")
    lab.slurm.controller("stop")
    started = time.time()
    lab.put("go", "")
    until(lambda: len(job.out.splitlines()) == 3, "it runs without a controller")
    assert float(job.out.split()[-1]) - started < 20.0, "srun and scontrol give up after 10 s each"
    lab.slurm.controller("continue")
    job.wait()


def test_a_node_that_answers_late_does_not_make_the_others_unknown(lab: Lab) -> None:
    """A reading is current for 5 s; a job's other nodes are read again."""
    lab.login.run(["mkdir", "bin"], check=True)
    lab.put("bin/srun", '#!/bin/sh\nsleep 6\nexec /usr/bin/srun "$@"\n')
    lab.put("script.py", WHO % "RANK")
    job = lab.run(f"PATH={HOME}/bin:$PATH gpuboard launch {FAKE} script.py", "--gpus=2", "--nodes=2")
    assert ranks(job.out) == ["0 gpu01", "1 gpu02"], job.err


def test_a_shell_that_outlived_its_job_is_outside(lab: Lab) -> None:
    job = lab.run("export -p > env; env | grep -c ^SLURM", "--gpus=1", "--nodelist=gpu01")
    assert int(job.out) > 10
    gpu01 = lab.host("gpu01")
    command = ". ./env; gpuboard run --n 2 -- sh -c 'echo $SLURM_JOB_ID $CUDA_VISIBLE_DEVICES'"
    done = gpu01.run(["bash", "-c", command], check=True)
    assert done.stdout == f"{job.number + 1} 0,1\n", "through a job of its own"
    assert f"SLURM_JOB_ID={job.number} of this shell names a job that is not running; ignored" in done.stderr


def test_variables_of_the_inner_of_two_jobs_count(lab: Lab) -> None:
    """As after `salloc` inside another job; the shell is outside the inner job's processes and uses a step."""
    outer = lab.submit("export -p > env; sleep 600", "--gpus=2", "--nodelist=gpu01")
    inner = lab.submit("sleep 600", "--gpus=3", "--nodelist=gpu01")
    until(lambda: lab.text("env") and inner.state == "RUNNING")
    command = f". ./env; export SLURM_JOB_ID={inner.number}; gpuboard allocate --n 3 --dry-run --format json"
    done = lab.host("gpu01").run(["bash", "-c", command], check=True)
    assert [gpu["index"] for gpu in json.loads(done.stdout)["gpus"]] == [2, 3, 4]
    outer.cancel()


@configured(cgroups=True)
def test_a_lease_and_its_keeper_end_with_the_job(lab: Lab) -> None:
    script = 'eval "$(gpuboard allocate --n 3)"; echo $GPUBOARD_NODES $CUDA_VISIBLE_DEVICES; date +%s.%N'
    job = lab.run(script, "--gpus=3", "--nodes=2", "--nodelist=gpu0[1-2]")
    nodes, _, ended = job.out.split()[0], None, float(job.out.split()[-1])
    assert nodes == "gpu[01-02]", job.err
    assert time.time() - ended < 30.0, "no remaining process delays the end of the job"
    until(lambda: not lab.processes(), "nothing is left on the nodes")


def test_this_node_is_preferred_and_only_the_jobs_other_nodes_are_used(lab: Lab) -> None:
    lab.put(
        "lease.py",
        "import gpuboard, os\nwith gpuboard.lease(n=3) as lease:\n"
        "    print(*[f'{g.node}:{g.index}' for g in lease.gpus], os.environ['CUDA_VISIBLE_DEVICES'])\n",
    )
    script = """
python lease.py
gpuboard allocate --gpus gpu02:0 --dry-run 2>&1 >/dev/null | head -1
export CUDA_VISIBLE_DEVICES=
eval "$(gpuboard allocate --n 2)" || exit
echo "$GPUBOARD_NODES $CUDA_VISIBLE_DEVICES"
unset GPUBOARD_LEASE
echo words | gpuboard run --n 1 -- sh -c 'read line; hostname; echo "$CUDA_VISIBLE_DEVICES $line"; exit 7'; echo $?
gpuboard allocate --nodes gpu03 --n 1 >refused; echo $?
eval "$(gpuboard allocate --n 1)"; date +%s.%N"""
    job = lab.run(script, "--gpus=3", "--nodes=2", "--nodelist=gpu0[1-2]")
    *lines, ended = job.out.splitlines()
    assert lines == [
        "gpu01:0 gpu01:1 gpu02:0 0,1",  # the Python interface
        "would take gpu02:0",
        "gpu01 0,1",
        *("gpu02", "0 words", "7"),  # over a step
        "2",
    ], job.err
    message = (
        f"'gpu03' is not a node of Slurm job {job.number}, which has gpu01, gpu02; "
        "unset SLURM_JOB_ID to work outside the job"
    )
    assert message in job.err
    assert lab.text("refused").endswith("(exit 2)\n")
    assert time.time() - float(ended) < 30.0, "no keeper or lease, on this node or over a step, delays the job's end"
    until(lambda: not lab.processes(), "nothing is left on the nodes")


@configured(cgroups=True)
def test_a_keeper_outside_the_job_and_one_inside(lab: Lab) -> None:
    gpu01 = lab.host("gpu01")
    look = ["gpuboard", "leases"]
    no_slurm = {"GPUBOARD_SCHEDULER": "none"}
    gpu01.run(["gpuboard", "allocate", "--gpus", "gpu01:7", "--for", "10m", "--detach"], check=True, env=no_slurm)
    until(lambda: len(lab.processes(["gpu01"])) == 1, "only the keeper is left")
    [outside] = lab.processes(["gpu01"])
    job = lab.run('eval "$(gpuboard allocate --n 1)"; gpuboard leases', "--gpus=1", "--nodelist=gpu01")
    assert (job.err, len(job.out.splitlines())) == ("", 3), job.out
    until(lambda: lab.processes(["gpu01"]) == [outside], "the job's own has ended with it")
    assert "gpu01:7 " in gpu01.run(look, env=no_slurm, check=True).stdout
    gpu01.run(["gpuboard", "release", "--mine"], check=True, env=no_slurm)


def test_a_shell_of_salloc_on_the_login_node(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK LOCAL_RANK")
    done = lab.login.run(["salloc", "--gpus=3", "-N2", "sh", "-c", f"gpuboard launch {FAKE} script.py"], timeout=60)
    assert ranks(done.stdout) == ["0 0 gpu01", "1 1 gpu01", "2 0 gpu02"], done.stderr


def test_components_of_a_heterogeneous_job(lab: Lab) -> None:
    lab.put("script.py", WHO % "RANK LOCAL_RANK")
    options = ["--gpus=2", "--nodelist=gpu01", ":", "--gpus=1", "--nodelist=gpu02"]
    lab.put("het.sh", f"#!/bin/bash\ngpuboard launch {FAKE} script.py\n")
    number = lab.slurm.submit([f"--output={HOME}/het.out", *options, "het.sh"])
    until(lambda: lab.slurm.job(number)["JobState"] in {"COMPLETED", "FAILED"}, "it ends", 60)
    assert ranks(lab.text("het.out")) == ["0 0 gpu01", "1 1 gpu01", "2 0 gpu02"], lab.text("het.out")


def test_a_run_in_a_job_is_reached_from_the_login_node_through_a_step(lab: Lab) -> None:
    lab.put("count.sh", "#!/bin/sh\nwhile :; do echo up; sleep 0.1; done\n")
    lab.login.run(["mkdir", "-p", ".config/gpuboard"], check=True)
    lab.put(".config/gpuboard/config.toml", 'connect_timeout = "1s"\n')
    job = lab.submit("gpuboard launch --device cpu --n 2 --no-python ./count.sh", "--gpus=1", "--nodelist=gpu02")
    job.wait_out("up")
    with lab.login.popen(["gpuboard", "logs", "last", "-f", "--rank", "0"]) as logs:
        assert read_line(logs) == "up\n"
        elsewhere = lab.login.run(["gpuboard", "runs", "--node", "gpu01"])
        assert elsewhere.returncode == 6
        assert "gpu01: runs there are not listed: not permitted: you have no job running there" in elsewhere.stderr
        assert lab.login.run(["gpuboard", "stop", "last"], check=True).stdout.endswith(" stopped\n")
        logs.communicate(timeout=60)
        assert logs.returncode == 0
    until(lambda: job.state == "FAILED", "the launch has ended with 130")


def test_a_detached_launch_runs_in_its_batch_job_or_is_refused(lab: Lab) -> None:
    lab.put("quick.py", "import time\ntime.sleep(2)\nprint('bye', flush=True)\n")
    script = f"gpuboard launch --detach {FAKE} quick.py; echo code $?; gpuboard attach; echo end $?"
    job = lab.run(script, "--gpus=2", "--nodes=2")
    assert "\ncode 0\n" in job.out, job.err
    assert ranks(job.out) == ["bye", "bye"]
    assert job.out.endswith("end 0\n")
    assert f"this run ends with Slurm job {job.number}, and a batch job ends with its script" in job.err
    done = lab.login.run(["gpuboard", "launch", "--detach", "--n", "2", "quick.py"])
    assert done.returncode == 2
    assert "--detach cannot be combined with GPUs that are reached through a Slurm job" in done.stderr
