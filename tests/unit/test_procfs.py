"""What the agent takes from /proc, on folders that look like it and on this process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuboard.agent.proc import COMMAND_LIMIT, Host, parse_cgroup, parse_stat, ptrace_scope
from gpuboard.agent.processes import Processes, delegated_to, first_person
from tests.waiting import until

CONTAINER = "3f4c0d" + "ab" * 29


def proc(root: Path, pid: int, *, comm: str = "python", start: int = 500, **files: bytes) -> None:
    """Make one process of a /proc."""
    folder = root / str(pid)
    folder.mkdir()
    fields = ["S", *["0"] * 18, str(start), *["0"] * 30]
    (folder / "stat").write_bytes(f"{pid} ({comm}) {' '.join(fields)}\n".encode())
    for name in ("cmdline", "environ", "cgroup"):
        (folder / name).write_bytes(files.get(name, b""))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1 1\nbtime 1700000000\n")
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:  400 kB\n")
    (tmp_path / "loadavg").write_text("1.25 1.00 0.50 2/345 6789\n")
    return tmp_path


def test_comm_may_hold_brackets_and_blanks() -> None:
    line = b"12 (a) (b c) S 11 10 9 " + b"0 " * 15 + b"777 0 2\n"
    assert parse_stat(line) == (12, "a) (b c", "S", 11, 10, 9, 0.0, 777, 2 * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/user.slice/user-1001.slice/session-2.scope\n", (None, None)),
        ("8:cpuset:/slurm/uid_1001/job_4711/step_0/task_1\n", ("4711", None)),
        ("0::/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0\n", ("12", None)),
        (f"0::/system.slice/docker-{CONTAINER}.scope\n", (None, CONTAINER[:12])),
        (f"4:memory:/docker/{CONTAINER}\n", (None, CONTAINER[:12])),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope\n", (None, CONTAINER[:12])),
        (f"0::/machine.slice/libpod-{CONTAINER}.scope/container\n", (None, CONTAINER[:12])),
        (f"0::/job_7/docker-{CONTAINER}.scope\n", ("7", CONTAINER[:12])),
        ("0::/user.slice/user-1001.slice/user@1001.service/slurm/uid_1/job_12/step_0\n", (None, None)),
        ("0::/home/job_x/" + "g" * 64 + "\n", (None, None)),
        ("", (None, None)),
    ],
)
def test_jobs_and_containers_in_cgroups(text: str, expected: tuple[str | None, str | None]) -> None:
    assert parse_cgroup(text) == expected


def test_a_process_is_described_whole(root: Path) -> None:
    proc(
        root,
        42,
        cmdline=b"python\0train.py\0--lr\x003e-4\0",
        environ=b"HOME=/x\0GPUBOARD_LEASE=k3f9\0NOT_GPUBOARD_LEASE=no\0",
        cgroup=b"0::/slurm/job_9/step_0\n",
    )
    assert Processes(str(root)).describe(42, "compute", 1024) == {
        "pid": 42,
        "type": "compute",
        "memory": 1024,
        "uid": os.getuid(),
        "system": os.getuid() < first_person(Path("/etc/login.defs").read_text()),
        "user": Processes().user(os.getuid()),
        "name": "python",
        "command": "python train.py --lr 3e-4",
        "started": 1700000000 + 500 / os.sysconf("SC_CLK_TCK"),
        "lease": "k3f9",
        "job": "9",
        "container": None,
    }


def test_a_process_that_cannot_be_seen_has_no_owner(root: Path) -> None:
    assert Processes(str(root)).describe(99, "graphics", None) == {"pid": 99, "type": "graphics", "memory": None}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_root_in_a_container_is_hidden_unless_its_lease_can_be_read(root: Path) -> None:
    cgroup = f"0::/docker/{CONTAINER}\n".encode()
    proc(root, 1, cgroup=cgroup)
    proc(root, 2, cgroup=cgroup, environ=b"GPUBOARD_LEASE=k3f9\0")
    proc(root, 3)
    processes = Processes(str(root))
    seen = [(p["user"], p["lease"], p["container"]) for p in (processes.describe(k, "compute", 0) for k in (1, 2, 3))]
    assert seen == [(None, None, CONTAINER[:12]), ("root", "k3f9", CONTAINER[:12]), ("root", None, None)]


def test_a_reused_pid_is_read_again(root: Path, tmp_path: Path) -> None:
    proc(root, 7, comm="first", start=1)
    processes = Processes(str(root))
    assert processes.describe(7, "compute", 0)["name"] == "first"
    for path in (root / "7").iterdir():
        path.unlink()
    (root / "7").rmdir()
    proc(root, 7, comm="second", start=2, cmdline=b"second\0")
    seen = processes.describe(7, "compute", 0)
    assert (seen["name"], seen["command"]) == ("second", "second")


def test_a_command_line_is_cut_and_hostile_bytes_are_kept_decodable(root: Path) -> None:
    proc(root, 5, cmdline=b"x" * 10_000_000)
    proc(root, 6, cmdline=b"\xff\xfe\x1b[31m\0[/x]\0")
    processes = Processes(str(root))
    assert processes.describe(5, "compute", 0)["command"] == "x" * COMMAND_LIMIT
    assert processes.describe(6, "compute", 0)["command"] == "\ufffd\ufffd\x1b[31m [/x]"


def test_a_uid_without_a_name_is_its_digits() -> None:
    assert Processes().user(54321987) == "54321987"


def test_container_uids_belong_to_their_user() -> None:
    subuid = "alice:100000:65536\n# nonsense\nbob:165536:65536\n:x\n"
    assert [delegated_to(uid, subuid) for uid in (99999, 100000, 165535, 165536, 231071, 231072)] == [
        None, "alice", "alice", "bob", "bob", None,
    ]  # fmt: skip


def test_uid_min_is_read_from_login_defs() -> None:
    assert [first_person(text) for text in ("", "#UID_MIN 5\nUID_MIN\t500\n", "UID_MIN x\n")] == [1000, 500, 1000]


def test_carriers_leave_out_others_and_the_agent_itself(root: Path) -> None:
    lease = b"GPUBOARD_LEASE=k3f9\0"
    proc(root, 10, environ=lease, start=11)
    proc(root, 11, environ=b"GPUBOARD_LEASE=k3f90\0")
    proc(root, 12, environ=b"")
    proc(root, 13, environ=lease)
    processes = Processes(str(root))
    assert sorted(processes.carriers("k3f9", {12, 99}, os.getuid(), [13]), key=lambda p: int(p["pid"])) == [
        {"pid": 10, "start": 11, "name": "python", "why": "environment"},
        {"pid": 12, "start": 500, "name": "python", "why": "gpu"},
    ]
    assert processes.carriers("k3f9", {12}, os.getuid() + 1) == []


def test_host_load_is_measured_between_readings(root: Path) -> None:
    host = Host(str(root))
    assert host.reading() == {
        "cpu_percent": None,
        "memory_used": 600 * 1024,
        "memory_total": 1000 * 1024,
        "load1": 1.25,
    }
    (root / "stat").write_text("cpu  160 0 110 720 110 0 0 0 99 0\n")
    assert host.reading()["cpu_percent"] == 70.0


def test_a_host_without_proc_is_unknown_not_idle(tmp_path: Path) -> None:
    assert set(Host(str(tmp_path / "none")).reading().values()) == {None}


def test_this_process_and_a_real_child() -> None:
    env = {**os.environ, "GPUBOARD_LEASE": "abcd"}
    processes = Processes()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as child:
        # in the middle of its exec it has neither arguments nor environment; what was seen then is not kept
        until(lambda: processes.describe(child.pid, "compute", 0)["lease"], "it has its environment")
        seen = processes.describe(child.pid, "compute", 0)
        assert child.stdin is not None
        child.stdin.close()
    assert (seen["uid"], seen["name"], seen["command"], seen["lease"]) == (os.getuid(), "cat", "cat", "abcd")


def test_cpu_time_of_a_reused_pid_begins_again(root: Path) -> None:
    """CPU utilization is the difference of two descriptions of one process, over ``CPU_SPAN_S`` at least."""
    times = iter((0.0, 0.1, 2.0, 2.1, 4.0, 5.0))
    processes, ticks = Processes(str(root), lambda: next(times)), os.sysconf("SC_CLK_TCK")
    seen = []
    for cpu_s, start in ((5, 1), (6, 1), (8, 1), (9, 1), (8, 2), (8, 2)):
        folder = root / "7"
        folder.mkdir(exist_ok=True)
        fields = ["S", *["0"] * 10, str(cpu_s * ticks), *["0"] * 7, str(start), "0", "3", *["0"] * 30]
        (folder / "stat").write_text(f"7 (python) {' '.join(fields)}\n")
        processes.describe(7, "compute", None)
        seen.append(processes.load(7))
    page = os.sysconf("SC_PAGE_SIZE")
    assert seen == [(percent, 3 * page) for percent in (None, None, 150.0, 150.0, None, 0.0)]
    processes.forget(set())
    assert processes.load(7) == (None, None)


def test_the_scope_of_ptrace_is_what_applies_to_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/yama"
    folder.mkdir(parents=True)
    assert ptrace_scope(str(tmp_path)) == 0, "a kernel without Yama"
    found = []
    for scope in range(4):
        (folder / "ptrace_scope").write_text(f"{scope}\n")
        found.append(ptrace_scope(str(tmp_path)))
    assert found == ([0, 0, 0, 3] if os.geteuid() == 0 else [0, 1, 2, 3])
