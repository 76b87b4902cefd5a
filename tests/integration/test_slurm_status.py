"""`gpuboard status` beside a real Slurm: it agrees with `scontrol`, GPU by GPU, for every shape of job and node."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest

from tests.integration.slurm_truth import Ask, Status, agreeing, configure, gpus, holders, states, status
from tests.nvml import GIB, Gpu, Mig
from tests.slurm import SlurmCluster, configured
from tests.waiting import read_line, until

pytestmark = pytest.mark.nodes

SMALL, LARGE = (f"nvidia_h100_80gb_hbm3_{profile}" for profile in ("1g.10gb", "3g.40gb"))  # MIG devices
SLEEP = ("--wrap", "sleep 600")
PENDING = ("--hold", "--begin=now+1hour", "--dependency=afterok:1", "--gres=gpu:8")


def as_root(slurm: SlurmCluster, nodes: str = "gpu[01-03]") -> Ask:
    """Ask as root, who may connect to every node."""
    configure(slurm, "root", 'ssh = "all"', nodes=nodes)
    return partial(status, slurm, "root")


def as_user(slurm: SlurmCluster, user: str = "alice") -> Ask:
    """Ask as somebody with the default: ssh only to nodes of own jobs."""
    configure(slurm, user)
    return partial(status, slurm, user)


def running(slurm: SlurmCluster, *numbers: int) -> None:
    """Wait until jobs run."""
    until(lambda: all(slurm.job(number)["JobState"] == "RUNNING" for number in numbers), f"jobs {numbers} run")


def showing(ask: Ask, node: str, wanted: str) -> Status:
    """Return the first status in which a node's GPUs have these states."""

    def seen() -> Status:
        found = ask()
        return found if states(found, node) == wanted else {}

    return until(seen, f"{node} is {wanted}")


def test_every_shape_of_job(slurm: SlurmCluster) -> None:
    merged = slurm.submit(["--gres=gpu:2", "-N2", "-w", "gpu[02-03]", *SLEEP], user="bob")
    single = slurm.submit(["--gres=gpu:1", "-w", "gpu01", *SLEEP])
    second = slurm.submit(["--gres=gpu:1", "-w", "gpu01", *SLEEP], user="bob")
    uneven = slurm.submit(["--gpus=4", "-N2", "-w", "gpu[01-02]", *SLEEP])
    task = slurm.submit(["--ntasks=2", "--gpus-per-task=1", "-w", "gpu01", *SLEEP], user="bob")
    cpus = slurm.submit(["-n3", "-w", "gpu03", *SLEEP])
    array = slurm.submit(["--array=0-3%2", "--gres=gpu:1", "-w", "gpu02", *SLEEP])
    mixed = slurm.submit(["--gres=gpu:1", "-w", "gpu02", *SLEEP, ":", "--gres=gpu:2", "-w", "gpu03"])
    halted = slurm.submit(["--gres=gpu:1", "-w", "gpu03", "--time=unlimited", *SLEEP], running=True)
    slurm.run(["scontrol", "suspend", str(halted)], user="root", check=True)
    waiting = [slurm.submit([option, *SLEEP]) for option in PENDING]
    running(slurm, merged, single, second, uneven, task, cpus, mixed, mixed + 1)

    # the shapes are what they are called
    text = slurm.run(["scontrol", "show", "job", "-d", str(merged)], check=True).stdout
    assert "Nodes=gpu[02-03] CPU_IDs=0 Mem=100 GRES=gpu:h100:2(IDX:0-1)" in text
    assert sorted(len(held) for held in slurm.held(uneven).values()) == [1, 3]
    assert {slurm.job(number)["JobState"] for number in waiting} == {"PENDING"}
    assert slurm.job(halted)["JobState"] == "SUSPENDED"

    by_root = agreeing(slurm, as_root(slurm))
    by_alice = agreeing(slurm, as_user(slurm))
    assert [node["source"] for node in by_root["nodes"]] == ["nvml", "nvml", "nvml"]
    for found in (by_root, by_alice):
        ids = {job["id"] for node in found["nodes"] for gpu in node["gpus"] for job in gpu["jobs"]}
        expected = {f"{array}_0", f"{array}_1", f"{mixed}+0", f"{mixed}+1"}
        assert ids == expected | {str(number) for number in (merged, single, second, uneven, task, halted)}
        [gpu] = [gpu for gpu in gpus(found, "gpu03") if gpu["jobs"] and gpu["jobs"][0]["id"] == str(halted)]
        assert "suspended" in gpu["reason"]
        assert gpu["jobs"][0]["until"] is None
    assert states(by_root, "gpu01").count("f") == 8 - sum(
        len(slurm.held(n).get("gpu01", ())) for n in (single, second, uneven, task)
    )


def test_an_exclusive_job_holds_its_node_whole(slurm: SlurmCluster) -> None:
    slurm.submit(["--exclusive", "--gres=gpu:1", "-w", "gpu02", *SLEEP], running=True)
    found = agreeing(slurm, as_root(slurm, "gpu[01-02]"), node_names="gpu[01-02]")
    assert [states(found, name) for name in ("gpu01", "gpu02")] == ["f" * 8, "a" * 8]
    assert found["nodes"][1]["scheduler_state"] == "allocated"


def test_nodes_without_ones_own_job_are_shown_by_slurm_alone(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=gpu:3", "-w", "gpu02", *SLEEP], user="bob", running=True)
    logs = {host.name: host.folder / "sshd.log" for host in slurm.nodes}
    begun = {name: path.stat().st_size for name, path in logs.items()}

    def log(name: str) -> str:
        return logs[name].read_bytes()[begun[name] :].decode(errors="replace")

    found = agreeing(slurm, as_user(slurm))
    assert [node["source"] for node in found["nodes"]] == ["nvml", "slurm", "slurm"]
    assert [node["error"] for node in found["nodes"]] == [None, None, None]
    assert [states(found, name) for name in ("gpu01", "gpu02", "gpu03")] == ["aaffffff", "aaafffff", "ffffffff"]
    assert {gpu["reason"] for gpu in gpus(found, "gpu03")} == {"free for Slurm; NVML not seen"}
    [view] = [gpu for gpu in gpus(found, "gpu02") if gpu["index"] == 0]
    assert (view["memory_used"], view["utilization"], view["processes"]) == (None, None, None)
    assert "Accepted publickey for alice" in log("gpu01")
    assert "alice" not in log("gpu02") + log("gpu03")  # no ssh even tried


@configured("Epilog=/srv/home/root/epilog")
def test_a_job_that_is_ending_keeps_its_node_from_others(slurm: SlurmCluster) -> None:
    epilog, hold = (slurm.nodes.home("root") / name for name in ("epilog", "hold"))
    hold.touch()
    epilog.write_text("#!/bin/sh\nwhile [ -e /srv/home/root/hold ]; do sleep 0.05; done\n")
    epilog.chmod(0o755)
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu02", *SLEEP], running=True)
    slurm.run(["scancel", str(number)], check=True)
    until(lambda: slurm.job(number)["JobState"] == "COMPLETING", "the job is ending")
    ask = as_root(slurm, "gpu[01-02]")
    found = showing(ask, "gpu02", "r" * 8)
    assert found["nodes"][1]["scheduler_state"] == "idle+completing"
    # Slurm counts its GPUs no more, and yet starts nothing on that node until the epilog has ended
    assert slurm.node("gpu02")["GresUsed"] == "gpu:h100:0(IDX:N/A)"
    next_one = slurm.submit(["-w", "gpu02", *SLEEP])
    until(lambda: slurm.job(next_one)["Reason"] == "Resources", "Slurm starts nothing there")
    assert states(found, "gpu01") == "f" * 8
    assert {f"job {number}" in gpu["reason"] for gpu in gpus(found, "gpu02")} == {True}
    hold.unlink()
    until(lambda: slurm.job(next_one)["JobState"] == "RUNNING", "Slurm starts the next job")
    showing(ask, "gpu02", "f" * 8)


def test_drained_down_and_reserved_nodes(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu02", *SLEEP], running=True)
    slurm.update("node", "gpu02", State="DRAIN", Reason="bad NVLink on GPU 3")
    slurm.daemon("gpu03", "kill")
    slurm.update("node", "gpu03", State="DOWN", Reason="dead fan")
    what = ["reservation=course", "nodes=gpu01", "users=bob", "starttime=now", "duration=60"]
    slurm.run(["scontrol", "create", *what], user="root", check=True)
    until(lambda: slurm.node("gpu01")["State"] == "IDLE+RESERVED", "the reservation is in force")
    found = agreeing(slurm, as_root(slurm))
    assert [node["scheduler_state"] for node in found["nodes"]] == ["idle+reserved", "mixed+drain", "down"]
    assert [states(found, name) for name in ("gpu01", "gpu02", "gpu03")] == ["r" * 8, "aarrrrrr", "u" * 8]
    assert "course" in gpus(found, "gpu01")[0]["reason"]
    assert "bad NVLink on GPU 3" in gpus(found, "gpu02")[7]["reason"]
    assert "dead fan" in gpus(found, "gpu03")[0]["reason"]
    assert found["nodes"][0]["scheduler_reservation"] == "course"
    assert found["nodes"][1]["scheduler_reason"].startswith("bad NVLink on GPU 3 (root, ")


@configured(
    "SlurmdTimeout=2\nNodeName=gpu04 NodeAddr=10.88.0.14 CPUs=64 RealMemory=512000 Gres=gpu:h100:8 State=UNKNOWN"
)
def test_a_node_that_does_not_respond_and_one_that_never_came(slurm: SlurmCluster) -> None:
    slurm.daemon("gpu03", "kill")
    until(lambda: "NOT_RESPONDING" in slurm.node("gpu03")["State"], "Slurm misses the node", timeout_s=60)
    configure(slurm, "root", 'ssh = "all"', 'connect_timeout = "1s"', nodes="gpu[01-04]")
    found = status(slurm, "root")
    assert states(found, "gpu03") == "u" * 8
    assert "not responding" in gpus(found, "gpu03")[0]["reason"].lower()
    assert "f" not in states(found, "gpu04")
    assert found["nodes"][3]["scheduler_state"] == slurm.node("gpu04")["State"].lower()


@configured("PrivateData=jobs")
def test_private_jobs_belong_to_an_unknown_user(slurm: SlurmCluster) -> None:
    own = slurm.submit(["--gres=gpu:1", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=gpu:3", "-w", "gpu01", *SLEEP], user="bob", running=True)
    slurm.submit(["--gres=gpu:2", "-w", "gpu02", *SLEEP], user="bob", running=True)
    agreeing(slurm, as_root(slurm, "gpu[01-02]"), node_names="gpu[01-02]")  # root sees everything
    found = showing(as_user(slurm), "gpu02", "aaffffff")
    assert states(found, "gpu01") == "aaaaffff"
    assert [[job["id"] for job in gpu["jobs"]] for gpu in gpus(found, "gpu01")] == [[str(own)]] + [[]] * 7
    hidden = {gpu["reason"] for name in ("gpu01", "gpu02") for gpu in gpus(found, name) if gpu["state"] == "allocated"}
    assert any("does not show you" in reason for reason in hidden)
    assert not any("bob" in reason for reason in hidden)


@configured(gres="Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia[4-7]")
def test_two_types_on_a_node(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:h100:1,gpu:a100:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gpus=a100:3", "-N2", "-w", "gpu[02-03]", *SLEEP], user="bob", running=True)
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], user="bob", running=True)
    assert set(holders(slurm)["gpu01"]) == {0, 1, 2, 4, 5}
    found = agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
    assert states(found, "gpu01") == "aaafaaff"
    names = [gpu["name"] for gpu in gpus(agreeing(slurm, as_user(slurm, "alice")), "gpu03")]
    assert names == ["h100"] * 4 + ["a100"] * 4


@configured(gres="Name=gpu File=/dev/nvidia[0-7]")
def test_gpus_without_a_type(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=gpu:3", "-N2", "-w", "gpu[02-03]", *SLEEP], user="bob", running=True)
    assert slurm.node("gpu01")["GresUsed"] == "gpu:2"  # no numbers there
    agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
    found = agreeing(slurm, as_user(slurm))
    assert [states(found, name) for name in ("gpu01", "gpu02", "gpu03")] == ["aaffffff", "aaafffff", "aaafffff"]


@configured("PrivateData=jobs", gres="Name=gpu File=/dev/nvidia[0-7]")
def test_private_jobs_on_gpus_without_a_type_leave_none_free(slurm: SlurmCluster) -> None:
    """Slurm says how many are given away, to nobody whom it names, and not which: none of them can be called free."""
    own = slurm.submit(["--gres=gpu:1", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=gpu:3", "-w", "gpu01", *SLEEP], user="bob", running=True)
    slurm.submit(["--gres=gpu:8", "-w", "gpu02", *SLEEP], user="bob", running=True)
    found = showing(as_user(slurm), "gpu02", "a" * 8)
    assert states(found, "gpu01") == "auuuuuuu"
    assert [job["id"] for job in gpus(found, "gpu01")[0]["jobs"]] == [str(own)]
    assert states(found, "gpu03") == "f" * 8


@configured(gres="Name=gpu Type=h100 File=/dev/nvidia[0-7]\nName=shard Count=32")
def test_shards_are_parts_of_a_gpu(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=shard:3", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit(["--gres=shard:4", "-w", "gpu01", *SLEEP], user="bob", running=True)
    found = agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
    assert states(found, "gpu01") == "aaaaffff"
    assert "3 shards" in gpus(found, "gpu01")[2]["reason"]
    agreeing(slurm, as_user(slurm))


@configured(
    gres=f"NodeName=gpu01 Name=gpu Type={SMALL} File=/dev/nvidia[0-6]\n"
    f"NodeName=gpu01 Name=gpu Type={LARGE} File=/dev/nvidia[7-8]"
)
def test_mig_devices_are_counted_one_by_one(slurm: SlurmCluster) -> None:
    slurm.nodes["gpu01"].script(
        [
            Gpu(mig=tuple(Mig(f"MIG-small-{k}", "1g.10gb", gi=k, total=10 * GIB) for k in range(7))),
            Gpu(mig=tuple(Mig(f"MIG-large-{k}", gi=k) for k in range(2))),
        ]
    )
    slurm.submit([f"--gres=gpu:{SMALL}:2", "-w", "gpu01", *SLEEP], running=True)
    slurm.submit([f"--gres=gpu:{LARGE}:1", "-w", "gpu01", *SLEEP], user="bob", running=True)
    assert set(holders(slurm)["gpu01"]) == {0, 1, 7}
    ask = as_root(slurm, "gpu01")

    def shown() -> list[dict[str, Any]]:
        found = gpus(ask(), "gpu01")
        parts = ["".join(part["state"][0] for part in gpu["mig"]) for gpu in found]
        return found if parts == ["aafffff", "af"] else []

    first, second = until(shown, "the MIG devices of both jobs are seen")
    assert [job["user"] for part in first["mig"] for job in part["jobs"]] == ["alice", "alice"]
    assert [job["user"] for part in second["mig"] for job in part["jobs"]] == ["bob"]


def test_a_jobs_gpus_are_those_that_cuda_shows_it_where_device_files_count_otherwise(slurm: SlurmCluster) -> None:
    """NVML goes by PCI address, device files by the order in which the driver found the GPUs."""
    listed = slurm.nodes["gpu01"].script([Gpu(minor=7 - k) for k in range(8)])
    allocated = ["sh", "-c", "gpuboard allocate --n 3 --format uuids; echo; sleep 600"]
    with slurm.nodes["login1"].popen(["srun", "--gres=gpu:3", "-w", "gpu01", *allocated]) as process:
        ours = read_line(process).strip().split(",")
        assert ours == [gpu.uuid for gpu in listed[:3]], "the indexes that Slurm gives to CUDA"
        found = agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
        shown = gpus(found, "gpu01")
        assert [gpu["uuid"] for gpu in shown if gpu["jobs"]] == ours
        assert "by order: device files are numbered in another order there" in shown[0]["reason"]
        process.send_signal(signal.SIGTERM)


@configured(cgroups=True)
def test_a_jobs_gpus_are_its_device_files_where_cgroups_have_those(slurm: SlurmCluster) -> None:
    slurm.submit(["--gres=gpu:3", "-w", "gpu01", *SLEEP], running=True)
    gpu01 = slurm.nodes["gpu01"]
    own = until(lambda: gpu01.processes(lambda p: p.name == "sleep", user="alice"), "the job's process is there")[0]
    used = Gpu(used=GIB, minor=0, processes=(("compute", own.inner, GIB),))
    gpu01.script([*[Gpu(minor=7 - k) for k in range(7)], used])
    found = agreeing(slurm, as_root(slurm, "gpu01"), {k: 7 - k for k in range(8)}, "gpu01")
    assert states(found, "gpu01") == "fffffaaa"
    assert "by device file" in gpus(found, "gpu01")[7]["reason"]


@configured(gres="Name=gpu Type=h100 File=/dev/nvidia[1,3,5-7]")
def test_a_list_of_files_with_holes_frees_no_gpu_that_is_held(slurm: SlurmCluster) -> None:
    """Slurm numbers the files that it was given, the node has more GPUs: what is not certain is not called free."""
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "env; sleep 600"], running=True)
    assert slurm.held(number) == {"gpu01": {0, 1}}  # which are /dev/nvidia1 and 3
    ask = as_root(slurm, "gpu01")

    def seen() -> Status:
        found = ask()
        return {} if "f" in states(found, "gpu01") else found

    shown = gpus(until(seen, "the job is seen"), "gpu01")
    assert all(f"job {number}" in shown[file]["reason"] for file in (1, 3))


def test_processes_that_contradict_slurm(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], running=True)
    gpu01 = slurm.nodes["gpu01"]
    own = until(lambda: gpu01.processes(lambda p: p.name == "sleep", user="alice"), "the job's process is there")[0]
    with gpu01.popen(["sleep", "600"], user="bob") as foreign:
        stranger = foreign.process.inner
        gpu01.script(
            [
                Gpu(used=GIB, processes=(("compute", own.inner, GIB),)),
                Gpu(used=GIB, processes=(("compute", stranger, GIB),)),
                Gpu(used=GIB, processes=(("compute", stranger, GIB),)),
                *[Gpu()] * 5,
            ]
        )
        found = agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
        foreign.kill()
    first, second, third = gpus(found, "gpu01")[:3]
    assert (first["state"], first["flags"]) == ("allocated", [])
    assert first["reason"].startswith(f"job {number} of alice in gpu, until ")
    assert (second["state"], second["flags"]) == ("allocated", ["rogue"])
    assert f"bob: sleep (pid {stranger}) does not belong to that job" in second["reason"]
    assert (third["state"], third["reason"]) == (
        "busy",
        f"free for Slurm, yet in use: bob: sleep (pid {stranger})",
    )


@configured(cgroups=True)
def test_a_processs_job_comes_from_its_cgroup(slurm: SlurmCluster) -> None:
    number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", *SLEEP], user="bob", running=True)
    gpu01 = slurm.nodes["gpu01"]
    own = until(lambda: gpu01.processes(lambda p: p.name == "sleep", user="bob"), "the job's process is there")[0]
    used = Gpu(used=GIB, processes=(("compute", own.inner, GIB),))
    gpu01.script([used, Gpu(), used, *[Gpu()] * 5])
    found = agreeing(slurm, as_root(slurm, "gpu01"), node_names="gpu01")
    first, _, third = gpus(found, "gpu01")[:3]
    assert (first["state"], first["flags"], first["processes"][0]["job"]) == ("allocated", [], str(number))
    assert (third["state"], third["processes"][0]["job"]) == ("busy", str(number))
    assert f"of job {number}, which Slurm's last answer does not list here" in third["reason"]
