"""The faults: how each is made, what gpuboard must print about it, and what is enough for torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.faults.places import MASTER_PORT, TARGET, OneNode, Place, RankMap, TwoNodes
from tests.nvml import GIB, LOST, Gpu
from tests.waiting import kill_each

NEVER = r"(?!)"
_USAGE, _PREFLIGHT = 2, 7  # exit codes of refused launches
_STALLED = 130  # exit code of a run that is ended by ctrl-C after its explanation
_LABEL = r"rank 1 \((\w|\.|-)+:\d\)"
_VALUE_ERROR = r"ValueError: label 17 is out of range"
_SIZES = r"data size doesn't match"

Launched = subprocess.Popen[str]


class Fault(msgspec.Struct, frozen=True):
    """One fault. ``words``: what one message of gpuboard must contain, None for a fault that must not end the run.

    ``torchrun``: what its output must contain, NEVER if it has no such message, None if it cannot be given that fault.
    """

    title: str
    words: str | None
    code: int  # exit code of the launch; _STALLED: the bench ends it after the explanation
    torchrun: str | None = NEVER
    target: tuple[str, ...] = ()  # fault of target.py and its seconds; (): the fault's own name
    script: Path = TARGET
    options: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    change: Callable[[RankMap], object] = lambda _: None
    around: Callable[[Any], contextlib.AbstractContextManager[object]] = lambda _: contextlib.nullcontext()
    during: Callable[[Any, Launched], object] | None = None  # once ranks train: makes the fault

    @property
    def stands_still(self) -> bool:
        """Whether the run does not end by itself."""
        return self.code == _STALLED

    @property
    def at_launch(self) -> bool:
        """Whether it is there before the launch."""
        return self.code in {_PREFLIGHT, _USAGE}


def _behind(place: str) -> str:
    return rf"waiting \d+ s for {_LABEL}, which .*target\.py:\d+ in {place}"


# In a rank, on one node and on two
IN_A_RANK: dict[str, Fault] = {
    "raise-before-init": Fault("raises before init", rf"{_LABEL} .*{_VALUE_ERROR}", 1, _VALUE_ERROR),
    "exit0-before-init": Fault("exits 0 before init", rf"{_LABEL} .*exit code 0 before init_process_group", 1),
    "hang-before-init": Fault(
        "hangs before init", rf"{_LABEL}, which has not called init_process_group.*target\.py:\d+ in hang", _STALLED
    ),
    "raise": Fault("raises in the loop", rf"{_LABEL} .*{_VALUE_ERROR}.*target\.py:\d+ in raise_error", 1, _VALUE_ERROR),
    "exit0": Fault("exits 0 in the loop", rf"{_LABEL} .*exit code 0", 1),
    "exit3": Fault("exits 3 in the loop", rf"{_LABEL} .*exit code 3", 3, r"exitcode: 3"),
    "kill": Fault("SIGKILL", rf"{_LABEL} .*was killed by SIGKILL", 137, "SIGKILL"),
    "segfault": Fault("SIGSEGV", rf"{_LABEL} .*was killed by SIGSEGV", 139, "SIGSEGV"),
    "out-of-memory": Fault("no more memory (rlimit)", rf"{_LABEL} .*can't allocate memory", 1, "can't allocate memory"),
    "stop": Fault("SIGSTOP", rf"{_LABEL}.* is stopped", _STALLED),
    "hang": Fault("Python hang", _behind("hang"), _STALLED),
    "spin": Fault("C-level spin with the GIL held", _behind("spin") + ".*GIL", _STALLED),
    "skip": Fault("skipped collective", rf"{_LABEL} .*exit code 0", 1),
    "op": Fault("different op", rf"ranks differ at collective \d+.*{_LABEL} .*broadcast", _STALLED, _SIZES),
    "shape": Fault("different shape", rf"ranks differ at collective \d+.*{_LABEL} .*5x5", 1, _SIZES),
    "dtype": Fault("different dtype", rf"ranks differ at collective \d+.*{_LABEL} .*double", 1, _SIZES),
    "order": Fault("different order", rf"ranks differ at collective \d+.*{_LABEL} .*3x3", 1, _SIZES),
    "uneven": Fault("uneven inputs", _behind("hang"), _STALLED),
    "swallow": Fault("exception swallowed in forward", rf"{_LABEL} .*parameters without a gradient: head", 1, NEVER),
    "unused": Fault(
        "unused parameters", r"rank \d .*parameters without a gradient: head", 1, "Expected to have finished reduction"
    ),
    "loader-raises": Fault("DataLoader worker raises", rf"{_LABEL} .*{_VALUE_ERROR}", 1, _VALUE_ERROR),
    "loader-hangs": Fault(
        "DataLoader worker hangs", rf"{_LABEL}.*DataLoader.*worker \d+ is at target\.py:\d+ in hang", _STALLED
    ),
    "loader-killed": Fault(
        "DataLoader worker killed", rf"{_LABEL} .*DataLoader worker .*killed", 1, "DataLoader worker .*killed"
    ),
    "cuda-fork": Fault(
        "CUDA touched before fork (emulated)",
        rf"{_LABEL} .*Cannot re-initialize CUDA in forked subprocess",
        1,
        "Cannot re-initialize CUDA",
    ),
    "unpicklable": Fault("unpicklable target", rf"{_LABEL} .*[Pp]ickl.*lambda", 1, r"[Pp]ickl.*lambda"),
    "no-guard": Fault(
        "missing main guard",
        rf"{_LABEL} .*bootstrapping phase",
        1,
        "bootstrapping phase",
        script=TARGET.with_name("no_guard.py"),
    ),
    "straggler": Fault(
        "one rank 30 % slower", rf"slow: the other ranks wait .* for {_LABEL}", 130, NEVER, ("straggler", "600")
    ),
    "sigterm-ignored": Fault("SIGTERM ignored", rf"{_LABEL} .*{_VALUE_ERROR}", 1, _VALUE_ERROR),
}


# Of the launch, on this machine


@contextlib.contextmanager
def _other_program(_: Place) -> Iterator[object]:
    with socket.create_server(("127.0.0.1", MASTER_PORT)) as server:
        yield server


@contextlib.contextmanager
def _other_job(_: Place) -> Iterator[object]:
    """Another job, which has been launched with that port."""
    other = OneNode()
    running = other.launch(words("run", "600"), (), (), _master_port)
    try:
        _until(other.begun.exists, running)
        yield running
    finally:
        other.close()
        running.communicate()


def _until(condition: Callable[[], object], running: Launched | None = None) -> None:
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until or (running is not None and running.poll() is not None):
            raise TimeoutError("the fault could not be made")
        time.sleep(0.05)


def words(*target: str, script: Path = TARGET) -> list[str]:
    """Return the script with its arguments; launches run in the folder of ``Place.begun``."""
    return [str(script), target[0], "fault", *target[1:]]


def _master_port(mapped: RankMap) -> None:
    mapped["master_port"] = MASTER_PORT


def _rank(number: int) -> Callable[[RankMap], object]:
    return lambda mapped: mapped["ranks"][1].update(rank=number)


def _devices(value: str) -> Callable[[RankMap], object]:
    return lambda mapped: mapped["nodes"][0].update(cuda_visible_devices=value)


def _twice(_: Place, running: Launched) -> None:
    running.send_signal(signal.SIGINT)
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)


def _signal(number: int) -> Callable[[Place, Launched], object]:
    return lambda _, running: running.send_signal(number)


@contextlib.contextmanager
def _memory_cgroup(_: Place) -> Iterator[object]:
    _CGROUP.mkdir(exist_ok=True)
    (_CGROUP / "memory.limit_in_bytes").write_text(str(3 * 2**30))
    try:
        yield _CGROUP
    finally:
        _until(lambda: not (_CGROUP / "cgroup.procs").read_text())
        _CGROUP.rmdir()


_CGROUP = Path(f"/sys/fs/cgroup/memory/gpuboard-faults-{os.getpid()}")
_SMALL_SHM = 'mount -t tmpfs -o size=1m shm /dev/shm && exec "$@"'
_WRAP = TARGET.with_name("never_starts.sh")
ONE_NODE: dict[str, Fault] = {
    "oom-kill": Fault(
        "OOM kill (cgroup)",
        rf"{_LABEL} .*was killed by SIGKILL: out of memory",
        137,
        "SIGKILL",
        before=("sh", "-c", f'echo $$ > {_CGROUP}/cgroup.procs; exec "$@"', "sh"),
        around=_memory_cgroup,
    ),
    "shm-full": Fault(
        "/dev/shm full",
        rf"{_LABEL} .*(Bus error|shared memory).*/dev/shm: \d+ of 1 MiB in use",
        1,
        r"DataLoader worker .*Bus error|shared memory",
        before=("unshare", "-m", "sh", "-c", _SMALL_SHM, "sh"),
        options=("--skip", "/dev/shm"),
    ),
    "rank-never-starts": Fault(
        "rank never starts",
        rf"{_LABEL}.*has not started Python: its process still runs sleep",
        _STALLED,
        None,
        options=("--wrap", f"{_WRAP} fault"),
    ),
    "port-of-a-program": Fault(
        "port taken by another program",
        rf"fail master port: .*{MASTER_PORT}.*in use by pid {os.getpid()} ",
        _PREFLIGHT,
        None,
        target=("run", "1"),
        change=_master_port,
        around=_other_program,
    ),
    "port-of-a-job": Fault(
        "port of another job",
        rf"fail master port: .*{MASTER_PORT}.*in use by pid \d+ ",
        _PREFLIGHT,
        None,
        target=("run", "1"),
        change=_master_port,
        around=_other_job,
    ),
    "duplicate-rank": Fault("duplicate rank", r"rank 0 is listed 2 times", _USAGE, None, change=_rank(0)),
    "rank-out-of-range": Fault(
        "rank out of range", r"ranks must be 0 to 2: missing \[1\], .*\[7\]", _USAGE, None, change=_rank(7)
    ),
    **{
        f"devices-{name}": Fault(
            f"CUDA_VISIBLE_DEVICES {value or 'empty'}",
            rf"cuda_visible_devices '{value}'.*(lists|not a list)|would see GPU '?{value.rpartition(',')[2]}",
            _USAGE,
            None,
            options=("--device", "cuda"),
            change=_devices(value),
        )
        for name, value in {
            "empty": "",
            "word": "0,abc,2",
            "duplicate": "0,0,2",
            "out-of-range": "0,1,9",
            "semicolon": "0;1;2",
            "uuid": "GPU-0,GPU-1,GPU-9",
        }.items()
    },
    "head-killed": Fault(
        "launcher SIGKILL", r"head-died", -signal.SIGKILL, None, ("run", "600"), during=_signal(signal.SIGKILL)
    ),
    "head-terminated": Fault(
        "launcher SIGTERM",
        r"forwarding SIGTERM to ranks 0-2",
        143,
        None,
        ("run", "600"),
        during=_signal(signal.SIGTERM),
    ),
    "head-interrupted-twice": Fault(
        "launcher SIGINT twice", r"ctrl-C; stopping ranks 0-2", 130, None, ("run", "600"), during=_twice
    ),
    "slow": Fault("rank 0 slow by 45 s", None, 0, None, ("slow", "45")),
    "save": Fault("rank 0 saves for 60 s after the others ended", None, 0, None, ("save", "60")),
}

# Of nodes and network


def _hosts(line: str) -> Callable[[TwoNodes], contextlib.AbstractContextManager[object]]:
    """Put a line in front of gpu01's /etc/hosts."""

    @contextlib.contextmanager
    def around(place: TwoNodes) -> Iterator[object]:
        file = place.cluster["gpu01"].path("/etc/hosts")
        whole = file.read_text()
        file.write_text(f"{line}\n{whole}")
        yield file
        file.write_text(whole)

    return around


def _master(name: str) -> Callable[[RankMap], object]:
    return lambda mapped: mapped.update(master_addr=name)


def _firewall(*rules: str) -> Callable[[TwoNodes], contextlib.AbstractContextManager[object]]:
    """Set rules on gpu01; the end of the test resets them."""

    def around(place: TwoNodes) -> contextlib.AbstractContextManager[object]:
        place.cluster["gpu01"].firewall(*(f"add rule inet t in iif eth0 {rule}" for rule in rules))
        return contextlib.nullcontext()

    return around


@contextlib.contextmanager
def _unplugged(place: TwoNodes) -> Iterator[object]:
    place.cluster["gpu02"].unplug()
    yield place
    place.cluster["gpu02"].plug()


@contextlib.contextmanager
def _other_torch(place: TwoNodes) -> Iterator[object]:
    """Another version of torch on gpu02, in a folder that gpu01 lacks."""
    folder = place.cluster["gpu02"].path("/tmp/other/torch")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "2.4.0"\n')
    (folder / "version.py").write_text('__version__ = "2.4.0"\ncuda = None\n')
    yield folder


def _cut(place: TwoNodes, _: Launched) -> None:
    """End the ssh sessions on gpu02."""
    sessions = place.cluster["gpu02"].processes(lambda p: p.name.startswith("sshd") and "-D" not in p.argv)
    kill_each(process.pid for process in sessions)


def _silent(place: TwoNodes, _: Launched) -> None:
    place.cluster["gpu02"].pause_sshd()
    time.sleep(30)
    place.cluster["gpu02"].resume_sshd()


def _network_dies(place: TwoNodes, _: Launched) -> None:
    place.cluster["gpu01"].firewall(f"add rule inet t in ip saddr {place.cluster['gpu02'].address} drop")


@contextlib.contextmanager
def _leased(place: TwoNodes) -> Iterator[object]:
    place.reserve()
    yield place


def _gpu_lost(place: TwoNodes, _: Launched) -> None:
    """GPU 1 of gpu02 falls off the bus: NVML cannot read it any more, and rank 1's next kernel fails."""
    lost = Gpu(trouble=(f"fault * {LOST}",), xids=(79,))
    place.cluster["gpu02"].script([Gpu(), lost, *(Gpu() for _ in range(6))])
    place.put("lost", "")


@contextlib.contextmanager
def _taken(place: TwoNodes) -> Iterator[object]:
    """bob starts to compute on a GPU of the lease."""
    place.reserve()
    with place.cluster["gpu02"].popen(["sh", "-c", "echo $$; read line"], user="bob", stdin=subprocess.PIPE) as bob:
        assert bob.stdout is not None
        pid = int(bob.stdout.readline())
        busy = Gpu(processes=(("compute", pid, 30 * GIB),))
        place.cluster["gpu02"].script([Gpu(), busy, *(Gpu() for _ in range(6))])
        yield pid
        bob.communicate("\n")


# The build of torch here is without CUDA
_CUDA = ("--device", "cuda", "--skip", "torch")
_HIGH = "tcp dport 1024-65535 ct state new"
_CONNECT = r"fail connect: .*gpu02.* cannot reach gpu01 at 10\.88\.0\.11, port .*"

TWO_NODES: dict[str, Fault] = {
    "name-unresolvable": Fault(
        "name unresolvable", r"fail .*nosuchnode", _PREFLIGHT, "nosuchnode", ("run", "1"), change=_master("nosuchnode")
    ),
    "name-loopback": Fault(
        "name resolves to 127.0.1.1",
        r"on gpu01 that name resolves to 127\.0\.1\.1",
        _PREFLIGHT,
        NEVER,
        ("run", "1"),
        change=_master("gpu01"),
        around=_hosts("127.0.1.1 gpu01"),
    ),
    "port-dropped": Fault(
        "port dropped", _CONNECT + "drops it", _PREFLIGHT, NEVER, ("run", "1"), around=_firewall(_HIGH + " drop")
    ),
    "port-rejected": Fault(
        "port rejected",
        _CONNECT + "rejects it",
        _PREFLIGHT,
        NEVER,
        ("run", "1"),
        around=_firewall(_HIGH + " reject with tcp reset"),
    ),
    "only-master-port": Fault(
        "only the master port open",
        _CONNECT + "drops it",
        _PREFLIGHT,
        NEVER,
        ("run", "1"),
        change=_master_port,
        around=_firewall(f"tcp dport {MASTER_PORT} accept", _HIGH + " drop"),
    ),
    "node-never-starts": Fault(
        "node never starts",
        r"fail start: gpu02: |waiting for gpu02: no reply for \d+ s",
        _PREFLIGHT,
        NEVER,
        ("run", "1"),
        around=_unplugged,
    ),
    "wrong-interface": Fault(
        "wrong network interface",
        r"fail interface: .*GLOO_SOCKET_IFNAME=lo",
        _PREFLIGHT,
        NEVER,
        ("run", "1"),
        options=("--env", "GLOO_SOCKET_IFNAME=lo"),
    ),
    "version-mismatch": Fault(
        "version mismatch",
        r"fail torch version: .*2\.4\.0 on gpu02",
        _PREFLIGHT,
        None,
        ("run", "1"),
        options=("--env", "PYTHONPATH=/tmp/other"),
        around=_other_torch,
    ),
    "network-dies": Fault(
        "packets dropped during the run",
        r"ranks 0-2 take part with equal arguments, so the network between gpu01, gpu02 may not deliver",
        _STALLED,
        NEVER,
        ("run", "600"),
        during=_network_dies,
    ),
    "gpu-taken": Fault(
        "GPU taken between lease and start",
        r"fail GPU: gpu02: GPU 1 runs processes of others; bob \(pid \d+",
        _PREFLIGHT,
        None,
        ("run", "1"),
        options=_CUDA,
        around=_taken,
    ),
    "gpu-lost": Fault(
        "GPU lost during the run",
        r"rank 1 \(gpu02:1\): GPU 1 is (lost|broken)",
        1,
        None,
        ("run", "600"),
        options=_CUDA,
        around=_leased,
        during=_gpu_lost,
    ),
    "ssh-cut": Fault("ssh connection cut", r"gpu02: connection lost", 1, None, ("run", "600"), during=_cut),
    "ssh-silent": Fault("ssh silent for 30 s", None, 0, None, ("run", "45"), during=_silent),
}
