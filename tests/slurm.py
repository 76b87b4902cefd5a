"""A real Slurm on the test nodes: slurmctld on login1, slurmd on gpu01 to gpu03, munge and the commands everywhere.

Eight GPUs per node by the files /dev/nvidia0 to 7 (devices of NVIDIA's number without a driver, in the node's own
/dev), partitions ``gpu`` (the default) and ``short`` (at most 5 minutes). The configuration is in /etc/slurm, so
programs on a host find Slurm by default. Slurm is stopped at the end of the module whose tests use it.

Tests use the fixture ``slurm`` (tests/conftest.py): restarted without jobs before each test (0.2 s). It skips,
with the reason, where a package is missing.

    def test_x(slurm):
        number = slurm.submit(["--gres=gpu:2", "-w", "gpu01", "--wrap", "sleep 600"], user="alice", running=True)
        slurm.job(number)["JobState"], slurm.held(number)            # "RUNNING", {"gpu01": {0, 1}}
        done = slurm.run(["squeue"], user="bob", host="login2")      # CompletedProcess; any command on any host
        slurm.nodes["login1"].popen(["gpuboard", "status", "--watch"], user="alice")
        slurm.update("node", "gpu02", State="DRAIN", Reason="bad NVLink")
        slurm.controller("kill")                                     # "stop", "continue", "restart" (keeps all jobs)
        slurm.daemon("gpu03", "kill")                                # the same for a node's slurmd
        slurm.configure("PrivateData=jobs")                          # restarts; the next test has the default again
        slurm.configure(gres="Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia[4-7]")
        slurm.configure(cgroups=True)                                # jobs see only the devices of their own GPUs

    @configured("PrivateData=jobs")                                  # the same from the start, with one start less
    def test_y(slurm):
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import PATH, Host, NodeProcess, processes_of
from tests.nodes import Cluster
from tests.waiting import read_line, until

CONTROLLER = "login1"
GRES = "Name=gpu Type=h100 File=/dev/nvidia[0-7]"

_START_S = 60.0  # sufficient even if several of these clusters share a machine
_SIGNALS = {
    "kill": [signal.SIGKILL],
    "stop": [signal.SIGSTOP],
    "continue": [signal.SIGCONT],
    "restart": [signal.SIGTERM, signal.SIGCONT],
}

_DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd"}
_CURRENT = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED"}  # states of jobs

_CONF = """
ClusterName=lab
SlurmctldHost={controller}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
# configure CPUs and memory that this machine lacks
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
# quick answers
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
KillWait=2
InactiveLimit=0
WaitTime=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
PropagateResourceLimits=NONE
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 OverSubscribe=NO State=UP
PartitionName=short Nodes=ALL MaxTime=5 DefaultTime=5 OverSubscribe=NO State=UP
"""

_CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/run/slurm/cgroup
ConstrainDevices=yes
ConstrainCores=no
ConstrainRAMSpace=no
"""

# Each host gets a private /etc/slurm, GPU nodes also a private /dev.
_PREPARE = """
set -e
mkdir -p /etc/slurm /run/munge /run/slurm
mount -t tmpfs -o mode=755 tmpfs /etc/slurm
[ -z "$1" ] && exit
mkdir -p /run/slurm/dev
mount -t tmpfs -o mode=755 tmpfs /run/slurm/dev
cd /run/slurm/dev
mkdir upper work pts shm
mount --rbind /dev/pts pts
mount --rbind /dev/shm shm
mount -t overlay overlay -o lowerdir=/dev,upperdir=upper,workdir=work /dev
mount --rbind pts /dev/pts
mount --rbind shm /dev/shm
rm -rf /dev/nvidia*
"""

_REMOVE = """
grep -q " /dev overlay " /proc/mounts && umount -R -l /dev && umount -R -l /run/slurm/dev
umount -l /etc/slurm
for kind in devices freezer; do  # else the next module would mount over removed folders
    ! grep -q " /run/slurm/cgroup/$kind " /proc/mounts || umount -l "/run/slurm/cgroup/$kind"
done
rm -rf --one-file-system /run/slurm /run/munge
"""


def missing() -> str | None:
    """Return what this machine lacks for Slurm on the test nodes, or None."""
    for tool in ("slurmctld", "slurmd", "sbatch", "munged"):
        if shutil.which(tool, path=PATH) is None:
            return f"{tool} (packages slurmctld, slurmd, slurm-client, munge)"
    return None


def configured(conf_lines: str = "", **options: Any) -> pytest.MarkDecorator:
    """Start a test's ``slurm`` with this configuration (see ``SlurmCluster.configure``) instead of the default."""
    settings = {"conf_lines": conf_lines, **options}
    return pytest.mark.parametrize("slurm", [settings], indirect=True, ids=["configured"])


class SlurmCluster:
    """Slurm on the test nodes; see the module's docstring."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self._compute = [host for host in nodes if host.has_gpus]
        self._children: list[subprocess.Popen[str]] = []
        self._client: subprocess.Popen[str] | None = None
        self._cgroups: list[Path] = []

    def start(self) -> None:
        """Prepare every host for Slurm and start munge; ``configure`` starts Slurm itself."""
        key = os.urandom(1024)
        for host in self.nodes:
            host.run(["sh", "-c", _PREPARE, "prepare", "gpus" if host.has_gpus else ""], user="root", check=True)
            host.spare = _is_daemon
            host.path("/run/munge/key").touch(mode=0o600)
            host.path("/run/munge/key").write_bytes(key)
            files = [f"--{name}-file=/run/munge/{name}" for name in ("key", "pid", "log", "seed")]
            self._run_daemon(host, ["munged", "--foreground", "--force", "--num-threads=2", *files])
        for host in self.nodes:
            until(host.path("/run/munge/munge.socket.2").is_socket, f"munged listens on {host.name}", _START_S)

    def stop(self) -> None:
        """Stop everything and remove all traces on the hosts."""
        self._end(_DAEMONS)
        for host in self.nodes:
            host.spare = None
            host.run(["sh", "-c", _REMOVE], user="root")
        for folder in self._cgroups:
            _remove_cgroup(folder)
        self._cgroups.clear()

    def configure(self, conf_lines: str = "", *, gres: str = GRES, cgroups: bool = False) -> None:
        """Stop everything and restart without jobs, with job numbers from 1 and the default or the given configuration.

        ``conf_lines``: lines of slurm.conf that replace those of the same key. ``gres``: lines of gres.conf, for all
        nodes or those that a line names; ``Gres=`` of the nodes is derived from it. ``cgroups``: each job is put into
        a device cgroup that hides other jobs' GPUs; skips the test where this machine has no such cgroups.
        """
        self._end(_DAEMONS - {"munged"})
        if cgroups:
            self._make_cgroups()
            conf_lines += "\nProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
        conf = _merged(_CONF.format(controller=CONTROLLER), conf_lines)
        names = {"gpu"}
        for host in self._compute:
            counts, files = _counted(gres, host.name)
            names.update(kind.partition(":")[0] for kind in counts)
            have = ",".join(f"{kind}:{count}" for kind, count in counts.items()) or "(null)"
            conf.append(f"NodeName={host.name} CPUs=64 RealMemory=512000 Gres={have} State=UNKNOWN")
            _make_devices(host, files)
        conf.append("GresTypes=" + ",".join(sorted(names)))
        for host in self.nodes:
            for folder in ("state", "spool"):
                shutil.rmtree(host.path(f"/run/slurm/{folder}"), ignore_errors=True)
            etc = host.path("/etc/slurm")
            (etc / "cgroup.conf").unlink(missing_ok=True)
            (etc / "slurm.conf").write_text("\n".join(conf) + "\n")
            (etc / "gres.conf").write_text(f"AutoDetect=off\n{gres}\n")
            if cgroups:
                (etc / "cgroup.conf").write_text(_CGROUP_CONF)
        self._start_controller("-c")
        for host in self._compute:
            self._run_daemon(host, ["slurmd", "-D"])
        until(self._all_idle, "all nodes of Slurm are idle", _START_S)

    def controller(self, what: str) -> None:
        """``kill`` (-9), ``stop``, ``continue`` or ``restart`` the controller.

        A restart keeps jobs and nodes; after a kill it has the state saved last: see ``save``.
        """
        if self._signalled(CONTROLLER, {"slurmctld", "slurmscriptd"}, what):
            self._start_controller()

    def save(self) -> None:
        """Wait until the controller has saved the current state of all jobs (at least one must exist)."""
        mark = f"saved-{os.urandom(8).hex()}"  # a write under way may hold older states
        self.update("jobid", str(max(self.jobs())), AdminComment=mark)
        file = self.nodes[CONTROLLER].path("/run/slurm/state/job_state")

        def saved() -> bool:
            with contextlib.suppress(FileNotFoundError):  # not written yet, or being replaced
                return mark.encode() in file.read_bytes()
            return False

        until(saved, "slurmctld saves its jobs")

    def daemon(self, node: str, what: str) -> None:
        """Like ``controller``, for the slurmd of ``node``; jobs there continue."""
        if self._signalled(node, {"slurmd"}, what):
            self._run_daemon(self.nodes[node], ["slurmd", "-D"])

    def run(
        self, argv: Sequence[str], *, user: str = "alice", host: str = CONTROLLER, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; see tests.hosts.Host.run."""
        return self.nodes[host].run(argv, user=user, check=check)

    def submit(self, args: Sequence[str], *, user: str = "alice", host: str = CONTROLLER, running: bool = False) -> int:
        """Submit a batch job with these sbatch arguments; return its number. ``running``: wait until it runs."""
        done = self.run(["sbatch", "--parsable", *args], user=user, host=host, check=True)
        number = int(done.stdout.partition(";")[0])
        if running:
            until(lambda: self.job(number)["JobState"] == "RUNNING", f"job {number} runs")
        return number

    def job(self, number: int) -> dict[str, str]:
        """Return the values of `scontrol show job -d`; for a repeated key, the last value."""
        return _pairs(self._show("job", str(number)))

    def held(self, number: int) -> dict[str, set[int]]:
        """Return the GPUs that a job holds, by node: Slurm's indexes in `scontrol show job -d`."""
        held: dict[str, set[int]] = {}
        for nodes, gres in re.findall(r"^ +Nodes=(\S+) .*GRES=(\S*)", self._show("job", str(number)), re.MULTILINE):
            indexes = {k for part in re.findall(r"gpu:[^()]*\(IDX:([\d,-]*)\)", gres) for k in _numbers(part)}
            for name in self._names(nodes):
                held.setdefault(name, set()).update(indexes)
        return {name: indexes for name, indexes in held.items() if indexes}

    def node(self, name: str) -> dict[str, str]:
        """Return the values of `scontrol show node -d`."""
        return _pairs(self._show("node", name))

    def jobs(self, *, ending: bool = True) -> set[int]:
        """Return the numbers of all users' jobs that have not ended; ``ending``: include those that are completing."""
        states = _CURRENT | {"COMPLETING"} if ending else _CURRENT
        text = self._ask("show job")
        assert "slurm_load_jobs error" not in text, text
        records = re.findall(r"^JobId=(\d+)(?:.*\n)+? +JobState=(\w+)", text, re.MULTILINE)
        return {int(number) for number, state in records if state in states}

    def update(self, kind: str, name: str, **values: str) -> None:
        """Run `scontrol update` as root: ``update("node", "gpu02", State="DRAIN", Reason="bad link")``."""
        words = [f"{key}={value}" for key, value in values.items()]
        entity = kind if kind == "jobid" else f"{kind}name"
        self.run(["scontrol", "update", f"{entity}={name}", *words], user="root", check=True)

    def log(self, host: str) -> str:
        """Return the log of a host's daemons."""
        return (self.nodes[host].folder / "slurm.log").read_text(errors="replace")

    def _show(self, what: str, name: str) -> str:
        text = self._ask(f"show {what} {name}")
        assert text.startswith(("JobId=", "NodeName=")), text
        return text

    def _names(self, nodes: str) -> list[str]:
        """Return the names of ``gpu[01-03]`` or ``gpu02``."""
        if "[" not in nodes:
            return [nodes]
        return self.run(["scontrol", "show", "hostnames", nodes], check=True).stdout.split()

    def _ask(self, command: str) -> str:
        """Return root's answer of scontrol: one process takes all commands, as tests poll (2 ms instead of 16)."""
        if self._client is None or self._client.poll() is not None:
            enter = ["nsenter", "-t", str(self.nodes[CONTROLLER].pid), "-m", "-u", "-n"]  # not seen by the host
            self._client = subprocess.Popen(
                [*enter, "scontrol", "--all", "--details"], env={"PATH": PATH, "LANG": "C.UTF-8"}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            )  # fmt: skip
        assert self._client.stdin is not None
        self._client.stdin.write(f"{command}\nversion\n")  # the version marks the answer's end
        self._client.stdin.flush()
        lines: list[str] = []
        while not re.match(r"slurm[\w-]* \d", line := read_line(self._client)):
            assert line, f"scontrol has ended: {lines}"
            lines.append(line)
        return "".join(line for line in lines if not line.startswith("scontrol: "))

    def _run_daemon(self, host: Host, argv: Sequence[str]) -> None:
        with (host.folder / "slurm.log").open("a") as log:
            # each slurmd and slurmstepd would load hwloc's plugins for PCI, OpenCL and X11: a third of their start
            env = {"HWLOC_PLUGINS_PATH": "/nowhere"}
            self._children.append(host.popen(argv, user="root", env=env, cwd="/", stdout=log, stderr=log))

    def _start_controller(self, *options: str) -> None:
        host = self.nodes[CONTROLLER]
        self._run_daemon(host, ["slurmctld", "-D", *options])
        # a slurmd that cannot reach the controller retries only after 10 s
        until(lambda: _listens(host, 6817), "slurmctld listens", _START_S)

    def _end(self, daemons: set[str]) -> None:
        if self._client is not None:
            with self._client as client:
                client.kill()
        until(lambda: self._killed(daemons), "no Slurm process runs on the hosts", _START_S)
        self._wake_nsenter()
        self._children = [child for child in self._children if child.poll() is None]
        for folder in self._cgroups:  # rules of an earlier job would apply to a later one with the same number
            for inner in [entry for entry in folder.iterdir() if entry.is_dir()]:
                _remove_cgroup(inner)

    def _killed(self, daemons: set[str]) -> bool:
        """Kill these daemons and all processes of jobs; return True if there were none."""
        running = [process for processes in processes_of(self.nodes.hosts.values()).values() for process in processes]
        found = [p for p in running if p.name in daemons or p.name == "slurmstepd" or _in_job(p)]
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not found

    def _signalled(self, name: str, daemons: set[str], what: str) -> bool:
        """Send a signal to daemons of a host; return whether they must be started again."""
        host = self.nodes[name]
        running = functools.partial(host.processes, lambda p: p.name in daemons)
        for number in _SIGNALS[what]:
            for process in running():
                with contextlib.suppress(ProcessLookupError):  # it ended with the other one
                    os.kill(process.pid, number)
            if number != signal.SIGSTOP:
                self._wake_nsenter()
        if what in {"kill", "restart"}:
            until(lambda: not running(), f"{', '.join(daemons)} of {name} end")
        return what == "restart"

    def _wake_nsenter(self) -> None:
        for child in self._children:  # nsenter stops itself when its child is stopped, and must be resumed too
            if child.poll() is None:
                os.kill(child.pid, signal.SIGCONT)

    def _all_idle(self) -> bool:
        states = dict(re.findall(r"^NodeName=(\S+)(?:.*\n)+? +State=(\S+)", self._ask("show node"), re.MULTILINE))
        return all(states.get(host.name) == "IDLE" for host in self._compute)

    def _make_cgroups(self) -> None:
        for host in self._compute if not self._cgroups else ():
            for kind in ("devices", "freezer"):
                folder = Path("/sys/fs/cgroup", kind, f"gpuboard-{os.getpid()}-{host.name}")
                try:
                    folder.mkdir()
                except OSError:
                    pytest.skip(f"needs the cgroup controller {kind} (v1) for Slurm's device cgroups")
                self._cgroups.append(folder)
                mount = 'mkdir -p "$2" && mount --bind "$1" "$2"'
                target = f"/run/slurm/cgroup/{kind}"
                host.run(["sh", "-c", mount, "mount", str(folder), target], user="root", check=True)


def _is_daemon(process: NodeProcess) -> bool:
    return process.name in _DAEMONS


def _in_job(process: NodeProcess) -> bool:
    here = Path(f"/proc/{process.pid}")
    try:  # the process of an extern step has no variables
        return b"SLURM_JOB_ID=" in (here / "environ").read_bytes() or b"/job_" in (here / "cgroup").read_bytes()
    except OSError:
        return False  # it has ended


def _listens(host: Host, port: int) -> bool:
    lines = Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def _remove_cgroup(folder: Path) -> None:
    for inner, _, _ in os.walk(folder, topdown=False):
        until(functools.partial(_removed, inner), f"{inner} can be removed", _START_S)


def _removed(folder: str) -> bool:
    """Remove a cgroup; return False while the kernel still counts processes that have ended there."""
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _merged(conf: str, more: str) -> list[str]:
    """Return lines of slurm.conf with ``more`` in place of those of the same key, partition or node."""
    added = [line for line in more.splitlines() if line.strip()]
    taken = {_key(line) for line in added}
    return [line for line in conf.splitlines() if line.strip() and _key(line) not in taken] + added


def _key(line: str) -> str:
    """Return the key that a line of slurm.conf sets; Slurm rejects duplicates."""
    first = line.split(maxsplit=1)[0].lower()
    return first if first.startswith(("nodename=", "partitionname=")) else first.partition("=")[0]


def _counted(gres: str, node: str) -> tuple[dict[str, int], list[str]]:
    """Return the resources of a node in gres.conf, as slurm.conf counts them ("gpu:h100": 8), and the device files."""
    counts: dict[str, int] = {}
    files: list[str] = []
    for line in gres.splitlines():
        words = dict(word.split("=", 1) for word in line.split())
        if words.get("NodeName", node) != node:
            continue
        found = _files(words.get("File", ""))
        files += found
        kind = ":".join(filter(None, (words["Name"], words.get("Type"))))
        counts[kind] = counts.get(kind, 0) + int(words.get("Count", len(found)))
    return counts, files


def _files(text: str) -> list[str]:
    """Return the files that ``/dev/nvidia[0-2,5]`` means."""
    before, _, numbers = text.partition("[")
    return [f"{before}{k}" for k in _numbers(numbers.rstrip("]"))] if numbers else [text] * bool(text)


def _numbers(text: str) -> list[int]:
    """Return the numbers that ``0-2,5`` means."""
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    return [k for first, last in ends for k in range(int(first), int(last or first) + 1)]


def _make_devices(host: Host, files: Sequence[str]) -> None:
    """Create the device files of a node's eight GPUs and ``files``, and remove all others."""
    numbers = {*range(8), *(int(file.removeprefix("/dev/nvidia")) for file in files)}
    for path in host.path("/dev").glob("nvidia*"):
        path.unlink()
    for number in numbers:
        path = host.path(f"/dev/nvidia{number}")
        os.mknod(path, stat.S_IFCHR, os.makedev(195, number))
        path.chmod(0o666)


def _pairs(text: str) -> dict[str, str]:
    """Return the ``Key=value`` pairs of one record of scontrol; a value extends to the next key or line end."""
    return dict(re.findall(r"(?:^|(?<=\s))([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", text, re.MULTILINE))
