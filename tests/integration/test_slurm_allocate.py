"""Leases through a real Slurm: what is requested, what is allocated, who may end it."""

from __future__ import annotations

import json
import re
import signal
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from gpuboard.model.rankmap import RankMap, problems
from tests.integration.keeper_lab import watched_by
from tests.integration.slurm_leases import (
    DETACHED,
    all_gone,
    allocate,
    do,
    gpuboard,
    keepers,
    left,
    line_of,
    refused,
    shell,
)
from tests.nvml import Gpu
from tests.slurm import SlurmCluster, configured
from tests.waiting import Stopwatch, until

pytestmark = pytest.mark.nodes


def occupy(slurm: SlurmCluster, **nodes: int) -> list[int]:
    """Have bob hold this many GPUs of each node."""
    return [slurm.submit(["-N1", f"--gpus={count}", "-w", name, "--wrap", "sleep 600"], user="bob", running=True)
            for name, count in nodes.items()]  # fmt: skip


def held(slurm: SlurmCluster, job: str) -> dict[str, set[int]]:
    return slurm.held(int(job))


def test_a_shell_evaluates_it_and_the_job_ends_with_the_shell(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "2", "--purpose", "fine; tuning") as process:
        assert line_of(process) == "code 0"
        variables = do(process, 'echo "$GPUBOARD_LEASE|$GPUBOARD_NODES|$CUDA_VISIBLE_DEVICES|$CUDA_DEVICE_ORDER"')
        lease, nodes, visible, order = variables.split("|")
        assert (nodes, visible, order) == ("gpu01", "", "PCI_BUS_ID")
        found = msgspec.json.decode(do(process, 'cat "$GPUBOARD_RANK_MAP"'), type=RankMap)
        [number] = slurm.jobs()
        job = slurm.job(number)
        assert (job["JobName"], job["JobState"], job["TimeLimit"], job["Requeue"], job["Comment"]) == (
            f"gpuboard-{lease}", "RUNNING", "01:00:00", "0", "fine; tuning",
        )  # fmt: skip
        assert found.job == str(number)
        assert problems(found) == []
        assert slurm.held(number) == {"gpu01": {rank.index for rank in found.ranks}} == {"gpu01": {0, 1}}
        assert left(slurm) == [f"{lease}.alive", f"{lease}.alive.seen", f"{lease}.json", f"{lease}.json"]
        process.send_signal(signal.SIGKILL)
        started = Stopwatch()
        until(lambda: not slurm.jobs(), "the job ends")
        assert started.stop() < 30.0  # without a keeper it would take minutes
    all_gone(slurm)


def test_a_process_with_the_variable_of_the_lease_keeps_it(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "1") as process:
        assert line_of(process) == "code 0"
        pid = do(process, "setsid sleep 600 >/dev/null 2>&1 & echo $!")
        [train] = until(lambda: slurm.nodes["login1"].processes(lambda p: p.argv[:1] == ("sleep",)), "it runs")
        process.send_signal(signal.SIGKILL)
        until(lambda: any(train.pid in watched_by(keeper) for keeper in keepers(slurm)), "the keeper finds it")
        [number] = slurm.jobs()
        assert slurm.job(number)["JobState"] == "RUNNING"
        slurm.run(["kill", pid], check=True)
    all_gone(slurm)


@pytest.mark.parametrize(
    ("slurm", "cgroups", "users"),
    [({}, False, ["alice"]), ({"cgroups": True}, True, ["alice", "root"])],
    indirect=["slurm"],
    ids=["", "cgroups"],
)
def test_the_gpus_of_uneven_nodes(slurm: SlurmCluster, cgroups: bool, users: list[str]) -> None:
    upside_down = [Gpu(minor=7 - k) for k in range(8)]
    gpus = {name: slurm.nodes[name].script(upside_down) for name in ("gpu01", "gpu02", "gpu03")}
    occupy(slurm, gpu01=3, gpu02=6, gpu03=8)
    for user in users:
        made = allocate(slurm, "--n", "7", user=user)
        found = msgspec.convert(made["rank_map"], RankMap)
        assert problems(found) == []
        assert [(node.name, node.local_world_size, node.address) for node in found.nodes] == [
            ("gpu01", 5, "10.88.0.11"), ("gpu02", 2, "10.88.0.12"),
        ]  # fmt: skip
        given = held(slurm, made["lease"]["job"])
        assert given == {"gpu01": {3, 4, 5, 6, 7}, "gpu02": {6, 7}}
        # A device cgroup gives the job these device files, here in the reverse order of NVML's indexes; without one the
        # job's CUDA_VISIBLE_DEVICES has these numbers as indexes.
        truth = {(name, gpus[name][7 - k if cgroups else k].uuid) for name, numbers in given.items() for k in numbers}
        assert {(rank.node, rank.uuid) for rank in found.ranks} == truth
        seen = {0, 1} if cgroups else {6, 7}  # in a device cgroup NVML and CUDA count only visible GPUs
        assert {rank.index for rank in found.ranks if rank.node == "gpu02"} == seen
        assert {(gpu["node"], gpu["uuid"]) for gpu in made["lease"]["gpus"]} == truth
        assert (made["lease"]["owner"], made["lease"]["holder"]) == (user, None)
        assert gpuboard(slurm, "release", "--mine", user=user).returncode == 0
        until(lambda: len(slurm.jobs()) == 3, "the job has ended")
        until(lambda: not left(slurm) and not left(slurm, "root"), "nothing is left of it")


def test_other_shells_evaluate_it(slurm: SlurmCluster) -> None:
    for command in (
        ["tcsh", "-fc", 'eval "`gpuboard allocate --n 1 --uuid`"; echo $GPUBOARD_NODES'],
        ["fish", "-c", "gpuboard allocate --n 1 | source; echo $GPUBOARD_NODES"],
    ):
        done = slurm.run(command)
        assert (done.returncode, done.stdout) == (0, "gpu01\n"), done.stderr
        assert "Slurm job" in done.stderr and "srun --jobid=" in done.stderr
        all_gone(slurm)


def test_a_refusal_fails_closed(slurm: SlurmCluster) -> None:
    with shell(slurm, "--n", "99") as process:
        assert line_of(process) == "code 3"
        assert do(process, 'echo "[$CUDA_VISIBLE_DEVICES][$GPUBOARD_LEASE]"') == "[][]"
    all_gone(slurm)


@configured(gres="Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia[4-7]")
def test_the_requested_model_and_exit_codes_of_never_possible_not_now_and_usage(slurm: SlurmCluster) -> None:
    assert "matching GPUs in total: 12, at most 4 on one node; try --n 12" in refused(
        slurm, "--n", "13", "--model", "a100", code=3
    )
    assert "here: a100, h100; try without --model" in refused(slurm, "--n", "1", "--model", "v100", code=3)
    assert "can never start job 1: PartitionTimeLimit" in refused(slurm, "--n", "1", "--partition", "short", code=3)
    assert "Invalid partition name" in refused(slurm, "--n", "1", "--partition", "nope", code=2)
    assert "Requested reservation is invalid" in refused(slurm, "--n", "1", "--reservation", "nope", code=2)
    assert "Invalid feature" in refused(slurm, "--n", "1", "--slurm=--constraint=nope", code=2)
    assert "node configuration is not available" in refused(slurm, "--n", "1", "--slurm=--mem-per-gpu=9999G", code=3)
    assert "unrecognized option" in refused(slurm, "--n", "1", "--slurm=--bogus=1", code=2)
    assert "no node 'gpu09' in Slurm" in refused(slurm, "--n", "1", "--exclude", "gpu09", code=2)
    assert slurm.jobs() == set()
    assert held(slurm, allocate(slurm, "--n", "2", "--model", "A100")["lease"]["job"]) == {"gpu01": {4, 5}}
    assert held(slurm, allocate(slurm, "--n", "5", "--model", "h100")["lease"]["job"]) == {
        "gpu01": {0, 1, 2, 3}, "gpu02": {0},
    }  # fmt: skip


@configured(
    "PartitionName=small Nodes=ALL MaxMemPerNode=1000 State=UP\n"
    "PartitionName=pairs Nodes=ALL MinNodes=2 State=UP\n"
    "PartitionName=theirs Nodes=ALL AllowAccounts=physics State=UP\n"
    "PartitionName=closed Nodes=ALL State=INACTIVE\n"
    "PartitionName=down Nodes=ALL State=DOWN"
)
def test_exit_codes_of_a_partitions_limits_and_of_closed_partitions(slurm: SlurmCluster) -> None:

    def message(partition: str, code: int, *more: str) -> str:
        return refused(slurm, "--n", "1", "--partition", partition, *more, code=code)

    assert ": MaxMemPerLimit: more memory" in message("small", 3, "--slurm=--mem=200000")
    assert ": PartitionNodeLimit: the partition allows a job fewer or more nodes" in message("pairs", 3)
    assert "try --account, --qos or --partition" in message("theirs", 3, "--account", "chemistry")
    assert "Required partition not available (inactive or drain)" in message("closed", 4)
    assert "is pending (PartitionDown); try --wait" in message("down", 4)


def test_nodes_are_chosen_as_requested(slurm: SlurmCluster) -> None:
    assert held(slurm, allocate(slurm, "--n", "1", "--nodes", "gpu03")["lease"]["job"]) == {"gpu03": {0}}
    assert held(slurm, allocate(slurm, "--n", "9", "--exclude", "gpu02")["lease"]["job"]).keys() == {"gpu01", "gpu03"}
    made = allocate(slurm, "--n", "4", "--per-node", "2")
    assert [node["local_world_size"] for node in made["rank_map"]["nodes"]] == [2, 2]
    assert len(allocate(slurm, "--n", "4", "--max-nodes", "1")["rank_map"]["nodes"]) == 1


def test_settings_and_flags_reach_the_job(slurm: SlurmCluster) -> None:
    config = slurm.nodes.home("alice") / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[slurm]\ntime = "20m"\npartition = "short"\ncpus_per_gpu = 3\nmem_per_gpu = "2GiB"\n')
    done = gpuboard(slurm, "allocate", "--n", "2", "--format", "json", "--detach", "--for", "4m", "--slurm=--nice=5")
    job = slurm.job(int(json.loads(done.stdout)["lease"]["job"]))
    assert (job["Partition"], job["TimeLimit"], job["NumCPUs"], job["Nice"]) == ("short", "00:04:00", "6", "5")
    assert "mem=4G" in job["TRES"]
    with shell(slurm, "--n", "1") as process:  # without --for: the setting, but not longer than the partition allows
        assert line_of(process) == "code 0"
        assert slurm.job(max(slurm.jobs()))["TimeLimit"] == "00:05:00"
    number = json.loads(done.stdout)["lease"]["job"]
    script = slurm.run(["scontrol", "write", "batch_script", number, "-"], check=True).stdout
    assert script.startswith("#!/bin/sh\n# gpuboard")


def test_variables_of_the_shell_do_not_reach_the_job(slurm: SlurmCluster) -> None:
    env = {"WANDB_API_KEY": "s3cret", "SBATCH_ARRAY_INX": "1-5", "SLURM_GPUS": "5"}
    with shell(slurm, "--n", "1", env=env) as process:
        assert line_of(process) == "code 0"
        [number] = slurm.jobs()
        scripts = slurm.nodes["gpu01"].processes(lambda p: p.name == "slurm_script", user="alice")
        script = min(scripts, key=lambda p: p.inner)  # a younger one is a fork that has not called exec yet
        assert b"s3cret" not in Path(f"/proc/{script.pid}/environ").read_bytes()
        assert slurm.job(number)["NumNodes"] == "1"
    all_gone(slurm)


def test_waiting_shows_reason_place_and_estimate_until_it_succeeds(slurm: SlurmCluster) -> None:
    blockers = [slurm.submit(["-t5", "-N3", "--gpus-per-node=8", "--wrap", "sleep 600"], user="bob", running=True)]
    blockers.append(slurm.submit(["-t5", "-N3", "--gpus-per-node=8", "--wrap", "sleep 600"], user="bob"))
    with shell(slurm, "--n", "2", "--wait", "5m") as process:
        assert process.stderr is not None
        words = ""
        while "number 2 of 2 in gpu, expected start" not in words:
            words = process.stderr.readline()
            assert "is pending (" in words, words
        assert "(Priority)" in words or "(Resources)" in words
        for number in blockers:
            slurm.run(["scancel", str(number)], user="root", check=True)
        assert line_of(process) == "code 0"
        where = do(process, "echo $GPUBOARD_NODES")
        [number] = slurm.jobs() - set(blockers)  # the cancelled ones may still be ending
        assert {name: len(gpus) for name, gpus in slurm.held(number).items()} == {where: 2}
    all_gone(slurm)


@configured("PrologFlags=contain")
def test_a_job_in_its_prolog_is_waited_for(slurm: SlurmCluster) -> None:
    slurm.daemon("gpu01", "stop")
    with shell(slurm, "--n", "2", "--nodes", "gpu01") as process:
        assert process.stderr is not None
        assert "Slurm prepares the nodes of job 1" in process.stderr.readline()
        job = slurm.job(1)
        assert (job["JobState"], job["Reason"]) == ("RUNNING", "Prolog")
        done = gpuboard(slurm, "env", job["JobName"].partition("-")[2])
        assert (done.returncode, "has prepared its nodes" in done.stderr) == (4, True)
        slurm.daemon("gpu01", "continue")
        assert line_of(process) == "code 0"
    all_gone(slurm)


def test_a_wait_that_times_out_leaves_no_job(slurm: SlurmCluster) -> None:
    occupy(slurm, gpu01=8, gpu02=8, gpu03=8)
    for args, words in (((), "not free now: Slurm job"), (("--wait", "3s"), "not free within 3s: Slurm job")):
        started = Stopwatch()
        error = allocate(slurm, "--n", "2", *args, code=4)["error"]
        assert started.stop() < 25.0
        assert error["message"].startswith(words)
        assert "pending (Resources)" in error["message"]
        assert error["nearest"] == "--wait"
        assert len(slurm.jobs()) == 3
        until(lambda: not left(slurm), "nothing is left of it")


def test_of_two_concurrent_requests_for_the_same_gpus_one_succeeds(slurm: SlurmCluster) -> None:
    args = ["gpuboard", "allocate", "--n", "16", "--detach", "--for", "5m", "--format", "json"]
    both = [slurm.nodes[host].popen(args, user=user) for host, user in (("login1", "alice"), ("login2", "bob"))]
    outs = [process.communicate(timeout=60)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 4]
    [number] = slurm.jobs()
    won = json.loads(outs[codes.index(0)])
    assert won["lease"]["job"] == str(number)
    assert sum(map(len, slurm.held(number).values())) == 16


def test_leases_of_all_users_and_their_release(slurm: SlurmCluster) -> None:
    slurm.submit(["-N1", "--gpus=1", "-w", "gpu03", "--job-name=gpuboard-$(reboot);\x1b[31m", "--wrap", "sleep 600"],
                 user="bob", running=True)  # fmt: skip
    slurm.submit(["-N1", "--gpus=1", "-w", "gpu03", "--job-name=gpuboard-abcdef", "--comment=\x1b[31m<b>", "--wrap",
                  "sleep 600"], user="bob", running=True)  # fmt: skip
    mine = allocate(slurm, "--n", "2", "--purpose", "sweep")["lease"]
    listed = json.loads(gpuboard(slurm, "leases", "--json").stdout)["leases"]
    assert [(lease["id"], lease["owner"], lease["purpose"], lease["job"]) for lease in listed] == [
        ("abcdef", "bob", "[31m<b>", "2"), (mine["id"], "alice", "sweep", "3"),
    ]  # fmt: skip
    assert listed[1]["gpus"] == mine["gpus"]
    assert [(gpu["node"], gpu["index"]) for gpu in listed[0]["gpus"]] == [("gpu03", 1)]
    table = gpuboard(slurm, "leases").stdout
    assert "Slurm job 3" in table and "gpu03:2-3" in table
    for command in (["release", "abcdef"], ["renew", "abcdef", "--for", "5m"]):
        done = gpuboard(slurm, *command)
        assert done.returncode == 5
        assert "lease abcdef belongs to bob" in done.stderr
    assert gpuboard(slurm, "release", "abcdef", user="root").stdout == "released abcdef: gpu03:?\n"
    assert gpuboard(slurm, "release", "nosuch").returncode == 5
    assert gpuboard(slurm, "release", mine["id"][:4]).stdout == f"released {mine['id']}: gpu03:2-3\n"
    until(lambda: slurm.jobs() == {1}, "both have ended")
    until(lambda: not left(slurm), "nothing is left of them")


def test_renewing_shortens_and_is_not_granted_more(slurm: SlurmCluster) -> None:
    lease = allocate(slurm, "--n", "1")["lease"]
    assert gpuboard(slurm, "renew", lease["id"], "--for", "5m").returncode == 0
    until(lambda: slurm.job(int(lease["job"]))["RunTime"] != "00:00:00", "it has run for a second")
    renewed = json.loads(gpuboard(slurm, "renew", lease["id"], "--for", "4m", "--json").stdout)
    assert slurm.job(int(lease["job"]))["TimeLimit"] == "00:05:00"  # counted from its start, rounded up
    [listed] = json.loads(gpuboard(slurm, "leases", "--json").stdout)["leases"]
    ends = [datetime.fromisoformat(each["until"]) for each in (renewed, listed)]
    assert abs(ends[1] - ends[0]) < timedelta(seconds=3)
    done = gpuboard(slurm, "renew", lease["id"], "--for", "2h")
    assert done.returncode == 1
    assert f"Slurm does not allow you to extend job {lease['job']}: Access/permission denied" in done.stderr
    assert "make a new reservation before it ends" in done.stderr
    theirs = allocate(slurm, "--n", "1", user="root")["lease"]
    assert gpuboard(slurm, "renew", theirs["id"], "--for", "2h", user="root").returncode == 0
    assert slurm.job(int(theirs["job"]))["TimeLimit"] in {"02:00:00", "02:01:00"}


def test_env_gives_a_second_shell_the_variables(slurm: SlurmCluster) -> None:
    lease = allocate(slurm, "--n", "10")["lease"]
    done = gpuboard(slurm, "env", lease["id"], "--node", "gpu02")
    assert "export CUDA_VISIBLE_DEVICES='0,1'\n" in done.stdout
    assert f"export GPUBOARD_LEASE='{lease['id']}'\n" in done.stdout
    assert gpuboard(slurm, "env", lease["id"], "--node", "gpu03").returncode == 2
    step = ["srun", f"--jobid={lease['job']}", "--overlap", "-N1", "-n1", "-w", "gpu02", "--gpus=2"]
    there = slurm.run([*step, "sh", "-c", f'eval "$(gpuboard env {lease["id"]})"; echo "got $CUDA_VISIBLE_DEVICES"'])
    assert "got 0,1" in there.stdout, there.stderr


def test_a_dry_run_shows_the_line_and_slurms_estimate(slurm: SlurmCluster) -> None:
    done = gpuboard(slurm, "allocate", "--n", "12", "--dry-run", "--format", "env")
    assert done.returncode == 0, done.stderr
    line, why, answer = done.stdout.splitlines()[1:4]
    assert line.startswith("sbatch --time=60 --nodes=1-2 --gpus=h100:12 ")
    assert why == "12 GPUs: at most 2 nodes, the fewest possible; free for Slurm: gpu01 8, gpu02 8, gpu03 8; type h100"
    assert re.match(r"Slurm: Job 1 to start at [0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2} using ", answer)
    assert "on nodes gpu[01-02] in partition gpu" in answer
    assert slurm.jobs() == set()


def test_slurms_options_are_refused_outside_slurm_and_without_a_scheduler_claims_are_used(slurm: SlurmCluster) -> None:
    done = gpuboard(slurm, "allocate", "--n", "1", "--nodes", "login2", "--qos", "high", "--detach", "--for", "5m")
    assert done.returncode == 2
    assert "apply to Slurm nodes only" in done.stderr
    done = gpuboard(slurm, "allocate", "--n", "1", "--nodes", "login2,gpu01", "--detach", "--for", "5m")
    assert done.returncode == 2
    assert "a lease cannot combine nodes of Slurm with others, here 'login2'" in done.stderr
    args = ("allocate", "--n", "1", "--nodes", "gpu01", "--detach", "--for", "5m", "--format", "json")
    done = gpuboard(slurm, *args, env={"GPUBOARD_SCHEDULER": "none"})
    assert json.loads(done.stdout)["lease"]["job"] is None, done.stderr
    assert slurm.jobs() == set()


def test_on_a_slurm_node_its_own_gpus_are_requested(slurm: SlurmCluster) -> None:
    done = slurm.nodes["gpu02"].run(["gpuboard", "allocate", "--n", "1", "--detach", "--for", "5m", "--format", "json"])
    made = json.loads(done.stdout)
    assert held(slurm, made["lease"]["job"]) == {"gpu02": {0}}
    done = slurm.nodes["gpu02"].run(["gpuboard", "allocate", "--n", "9", *DETACHED])
    assert done.returncode == 3
    assert "only this machine was considered; add --nodes 'gpu[01-03]' for all nodes" in done.stderr


def test_another_users_process_on_an_allocated_gpu_is_reported(slurm: SlurmCluster) -> None:
    gpu02 = slurm.nodes["gpu02"]
    with gpu02.popen(["sleep", "600"], user="bob") as process:
        try:
            used = Gpu(processes=(("compute", process.process.inner, 2**30),))
            gpus = gpu02.script([used, *(Gpu() for _ in range(7))])
            done = gpuboard(slurm, "allocate", "--n", "1", "--nodes", "gpu02", *DETACHED, "--format", "uuids")
        finally:
            process.kill()
    assert (done.returncode, done.stdout) == (0, f"{gpus[0].uuid}\n")
    assert "gpu02:0 of Slurm job 1 is busy: " in done.stderr and "bob" in done.stderr, done.stderr


def test_the_python_interface(slurm: SlurmCluster) -> None:
    script = """if True:
        import os, subprocess, gpuboard
        with gpuboard.lease(n=2, for_="10m", slurm=["--nice=3"]) as lease:
            print(lease.allocation.lease.job, [gpu.index for gpu in lease.gpus], os.environ["GPUBOARD_NODES"])
            print(subprocess.run(["squeue", "-h", "-o", "%T %l"], capture_output=True, text=True).stdout.strip())
            lease.renew("5m")
        print(subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip())
    """
    done = slurm.run(["python3", "-W", "error", "-c", script])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["1 [0, 1] gpu01", "RUNNING 10:00"]
    all_gone(slurm)


def test_a_node_that_answers_late_does_not_make_the_others_stale(slurm: SlurmCluster) -> None:
    """A reading is current for 5 s; the job's other nodes are read again."""
    folder = slurm.nodes.home("alice") / "bin"
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/sh\ncase "$*" in *=gpu02*) sleep 6 ;; esac\nexec /usr/bin/srun "$@"\n')
    (folder / "srun").chmod(0o755)
    command = f"PATH=/srv/home/alice/bin:$PATH gpuboard allocate --n 2 --per-node 1 {' '.join(DETACHED)} --format uuids"
    done = slurm.run(["sh", "-c", command])
    assert (done.returncode, done.stdout.count("GPU-")) == (0, 2), done.stderr


def test_a_job_with_unreadable_or_broken_gpus_is_cancelled(slurm: SlurmCluster) -> None:
    gpu01 = slurm.nodes["gpu01"]
    gpu01.hide_library()
    words = refused(slurm, "--n", "1", "--nodes", "gpu01", code=1)
    assert words.startswith("could not read the GPUs of Slurm job 1 on gpu01: ")
    gpu01.show_library()
    gpu01.script([Gpu(remap=(0, 1)), *(Gpu() for _ in range(7))])
    words = refused(slurm, "--n", "1", "--nodes", "gpu01", code=1)
    assert "GPUs of Slurm job 2 are broken: gpu01:0: " in words
    assert words.endswith("try --exclude gpu01")
    gpu01.script([Gpu() for _ in range(3)])
    words = refused(slurm, "--n", "5", "--nodes", "gpu01", code=1)
    assert "could not read the GPUs" in words
    assert "Slurm lists 5 on this node, NVML shows 3" in words
    until(lambda: not slurm.jobs(), "no job is left")


def test_an_unwritable_home_is_reported_before_a_job_is_submitted(slurm: SlurmCluster) -> None:
    home = slurm.nodes.home("alice")
    (home / ".local").write_text("in the way")
    done = gpuboard(slurm, "allocate", "--n", "1", *DETACHED, "--format", "uuids")
    assert done.returncode == 1
    assert "/srv/home/alice/.local" in done.stderr
    assert slurm.jobs() == set()
