"""One host of the test nodes: namespaces, sshd, users' commands, faults. tests/nodes.py has an overview."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from tests.nvml import Gpu, library, write_script
from tests.waiting import read_line

USERS = {"root": 0, "alice": 2001, "bob": 2002, "carol": 2003}
ADDRESSES = {
    "gpu01": "10.88.0.11",
    "gpu02": "10.88.0.12",
    "gpu03": "10.88.0.13",
    "login1": "10.88.0.21",
    "login2": "10.88.0.22",
}
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", "")) or ""

_CD = 'cd "$0" && exec "$@"'

HIDDEN = ("/run", "/var/tmp", "/dev/shm", "/tmp")  # private folders of each host

# The first process of a host: sets up its mounts, prints `ready`, then reaps orphaned processes.
_INIT = r"""
set -e
host=$1 root=$2; shift 2
mount --make-rprivate /
hostname "$host"
work=$root/hosts/$host/work
mount -t tmpfs -o mode=755 tmpfs "$work"
mkdir "$work/upper" "$work/overlay" "$work/cgroup" "$work/keep"
# Private folders of the host; paths below them that this test run needs are mounted at the same place.
own="/run /var/tmp /dev/shm /tmp"
for folder in $own; do
    mkdir -p "$work/own$folder"; mount -t tmpfs -o mode=1777 tmpfs "$work/own$folder"
done
chmod 755 "$work/own/run"
while [ "$1" != -- ]; do
    mkdir -p "$work/own$1"; mount --rbind "$1" "$work/own$1"; shift
done
shift
mount --rbind /sys/fs/cgroup "$work/cgroup"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$work/upper,workdir=$work/overlay" /etc
cp -r "$root/hosts/$host/etc/." /etc/
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount --rbind "$work/cgroup" /sys/fs/cgroup
# Folders that this test run needs and other users may not enter: replace each by an accessible one.
n=0
while [ $# -gt 0 ]; do
    closed=$1; n=$((n + 1)); shift
    mkdir "$work/keep/$n"; mount --rbind "$closed" "$work/keep/$n"
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        mkdir -p "$1"; mount --rbind "$work/keep/$n${1#"$closed"}" "$1"; shift
    done
    shift
done
mount --rbind "$root/srv" /srv
mkdir -p "$work/own/run/sshd" "$work/own/run/fake-nvml"
mount --bind "$root/hosts/$host/nvml" "$work/own/run/fake-nvml"
for folder in $own; do  # /tmp last: sources of these mounts may be below it
    mount --rbind "$work/own$folder" "$folder"
done
# ldconfig locks neither its cache nor the machine's links, and hosts start at the same time: each has its own cache.
[ ! -d /var/cache/ldconfig ] || mount -t tmpfs tmpfs /var/cache/ldconfig
ldconfig -X
ip link set lo up
echo ready
exec "$PYTHON" -I -S -c '
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    try:
        os.wait()
    except ChildProcessError:
        signal.sigwait([signal.SIGCHLD])
'
"""

_SSHD_CONFIG = """
Port 22
HostKey /etc/ssh/test_host_key
PidFile none
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 500
MaxSessions 100
LogLevel VERBOSE
"""


class NodeProcess(msgspec.Struct, frozen=True):
    """A process of a host: ``pid`` outside the host, ``inner`` in the host's namespace."""

    pid: int
    inner: int
    uid: int
    name: str
    argv: tuple[str, ...]


class Running(subprocess.Popen[str]):
    """A process in a host; signals are sent to the process itself, not to its nsenter."""

    @property
    def process(self) -> NodeProcess:
        """The process, once it runs the command. Raises TimeoutError after 60 s."""
        until = time.monotonic() + 60
        while time.monotonic() < until and self.poll() is None:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            found = _process(children[0]) if children else None
            if found is not None and found.name not in {"nsenter", "setpriv", "env"} and _CD not in found.argv:
                return found
            time.sleep(0.005)
        raise TimeoutError(f"no process started: {self.args!r} exit code {self.returncode}")

    @property
    def inner(self) -> int:
        """Its pid outside the host, to send signals to."""
        return self.process.pid

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process itself."""
        if self.poll() is None:
            try:
                target = self.inner
            except TimeoutError:
                if self.poll() is None:
                    raise
                return  # it has ended meanwhile
            if sig == signal.SIGSTOP:
                self._stop(target)
            else:
                _signal(target, sig)
                _signal(self.pid, signal.SIGCONT)

    def _stop(self, pid: int) -> None:
        """Stop process ``pid`` and wait until nsenter is stopped too: only then can SIGCONT resume it.

        nsenter stops itself when its child is stopped, and resumes its child when it is resumed. If that happens
        late, the child is stopped again.
        """

        def still() -> bool:
            _signal(pid, signal.SIGSTOP)
            return self.poll() is not None or _stopped(self.pid)

        _until(still, f"nsenter stops with {self.args!r}")


class Host:
    """One host of the cluster; see the module's docstring."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.address = ADDRESSES[name]
        self.folder = root / "hosts" / name
        self.has_gpus = name.startswith("gpu")
        self.changed = False  # python3, a mount or sshd differs from the start
        self._filtered = False  # it has nftables rules
        self._unplugged = False
        self.spare: Callable[[NodeProcess], bool] | None = None  # processes that ``reset`` keeps (tests/slurm.py)
        self._root = root
        self._init: subprocess.Popen[str] | None = None
        self._sshd: Running | None = None
        self.pid = 0  # of its first process, outside the host
        self._switch = 0

    def begin(self, paths: Sequence[str]) -> None:
        """Start the first process; ``finish`` waits for it (all hosts do this at once). ``paths``: see _INIT."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "-m", "-u", "-n", "-p", "-f"]
        self._init = subprocess.Popen(
            [*command, "sh", "-c", _INIT, "init", self.name, str(self._root), *paths],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": PATH, "PYTHON": os.path.realpath(sys.executable)},
        )

    def finish(self, switch: int) -> None:
        """Wait for the mounts, connect the host to the switch and start sshd."""
        assert self._init is not None
        if read_line(self._init) != "ready\n":
            raise RuntimeError(f"{self.name} did not start; its messages are above")
        self.pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())
        inside(switch, f"link add {self.name} type veth peer name eth0 netns {self.pid}")
        inside(switch, f"link set {self.name} master lan up")
        inside(self.pid, f"addr add {self.address}/24 dev eth0")
        inside(self.pid, "link set eth0 up")
        self._switch = switch
        self.sshd()

    def sshd(self, more: str = "") -> None:
        """(Re)start sshd, with ``more`` configuration before the default (the first line of a key counts)."""
        self.changed = self.changed or bool(more)
        self.stop_sshd()
        self.path("/etc/ssh/test_sshd_config").write_text(more + "\n" + _SSHD_CONFIG)
        with (self.folder / "sshd.log").open("ab") as log:
            command = [*self._enter(), SSHD, "-D", "-e", "-f", "/etc/ssh/test_sshd_config"]
            self._sshd = Running(command, text=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _until(self._listens, f"sshd on {self.name} listens")

    def stop_sshd(self) -> None:
        """End sshd and its sessions."""
        _until(lambda: not self._signal_sshd(signal.SIGKILL), f"no sshd runs on {self.name}")
        if self._sshd is not None:
            _until(self._sshd_has_ended, f"the sshd of {self.name} is reaped")
            self._sshd = None

    def pause_sshd(self) -> None:
        """Send SIGSTOP to sshd and its sessions: connections stay open without answers."""
        stopped: set[int] = set()
        while new := self._signal_sshd(signal.SIGSTOP) - stopped:  # sshd may have accepted a connection meanwhile
            stopped |= new
        if self._sshd is not None:
            self._sshd.send_signal(signal.SIGSTOP)

    def resume_sshd(self) -> None:
        """Undo ``pause_sshd``."""
        self._signal_sshd(signal.SIGCONT)
        self.resume_listener()

    def resume_listener(self) -> None:
        """Resume sshd, but not its sessions."""
        if self._sshd is not None:
            self._sshd.send_signal(signal.SIGCONT)

    def unplug(self) -> None:
        """Pull the network cable: packets are dropped without an error."""
        self._unplugged = True
        inside(self._switch, f"link set {self.name} nomaster")

    def plug(self) -> None:
        """Put the network cable back."""
        inside(self._switch, f"link set {self.name} master lan")
        self._unplugged = False

    def firewall(self, *rules: str) -> None:
        """Set the nftables rules of this host; without arguments, remove them."""
        base = ["flush ruleset"]
        self._filtered = True
        if rules:
            base += ["add table inet t", "add chain inet t in { type filter hook input priority 0; }"]
        text = "\n".join([*base, *rules])
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "nft", "-f", "-"], input=text, text=True, check=True)
        self._filtered = bool(rules)

    def script(self, gpus: Sequence[Gpu], **settings: Any) -> list[Gpu]:
        """Set the output of NVML (tests.nvml.write_script); return the GPUs with their UUIDs."""
        return write_script(self.folder / "nvml" / "script", gpus, seed=self.name, **settings)

    def hide_library(self) -> None:
        """Remove the NVML library (as on a host without a driver); ``show_library`` restores it."""
        (self.folder / "nvml" / "libnvidia-ml.so.1").unlink(missing_ok=True)

    def show_library(self, *, old: bool = False) -> None:
        """Install the NVML library; ``old``: that of an old driver."""
        target = self.folder / "nvml" / "libnvidia-ml.so.1"
        shutil.copy(library(old=old) / target.name, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)

    def use_python(self, interpreter: str) -> None:
        """Make ``python3`` this interpreter for new ssh sessions."""
        self.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/usr/local/bin"], user="root", check=True)
        self.run(["ln", "-s", interpreter, "/usr/local/bin/python3"], user="root", check=True)
        self.changed = True

    def remount(self, folder: str, options: str) -> None:
        """Change the tmpfs at /var/tmp, /tmp or /dev/shm, e.g. with ``size=64k`` for a disk that is nearly full."""
        self.run(["mount", "-o", f"remount,{options}", folder], user="root", check=True)
        self.changed = True

    def path(self, path: str) -> Path:
        """Return a path of this host for access from outside."""
        return Path(f"/proc/{self.pid}/root{path}")

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 60,
        check: bool = False,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and return its output. Raises TimeoutExpired, after killing it."""
        with self.popen(argv, user=user, env=env, cwd=cwd, stdin=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {argv} ended with {done.returncode}\n{out}\n{err}")
        return done

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "alice",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: int | IO[str] = subprocess.DEVNULL,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
    ) -> Running:
        """Start a command on this host as ``user``, in a login's environment plus ``env``, in the user's home."""
        command = self.command(argv, user=user, env=env, cwd=cwd)
        return Running(command, text=True, stdin=stdin, stdout=stdout, stderr=stderr)

    def command(
        self, argv: Sequence[str], *, user: str, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> list[str]:
        """Return the command line that runs ``argv`` on this host, for callers that start it themselves."""
        home = f"/srv/home/{user}"
        full = {"HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": PATH, "LANG": "C.UTF-8"}
        full |= env or {}
        uid = str(USERS[user])
        return [
            *self._enter(),
            *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i"),
            *(f"{key}={value}" for key, value in full.items()),
            *("sh", "-c", _CD, cwd or home, *argv),
        ]

    def processes(
        self, keep: Callable[[NodeProcess], bool] = lambda _: True, *, user: str | None = None
    ) -> list[NodeProcess]:
        """Return the processes of this host, without its first one; ``user``: only that user's."""
        return [p for p in processes_of([self])[self.name] if (user is None or p.uid == USERS[user]) and keep(p)]

    def reset(self) -> None:
        """Restore the state after the start, once ``end_processes`` has ended what tests left running."""
        if self._filtered:
            self.firewall()
        if self._unplugged:
            self.plug()
        # In the host's namespace a mount point (this repository, if it is in /tmp) cannot be removed; find reports it
        # and continues.
        if used := [folder for folder in ("/var/tmp", "/tmp", "/dev/shm") if os.listdir(self.path(folder))]:
            self.run(["find", *used, "-xdev", "-mindepth", "1", "-delete"], user="root")
        if self.changed or self.listener is None:
            self.run(["umount", "-q", "/usr/local/bin"], user="root")
            for folder in ("/var/tmp", "/tmp", "/dev/shm"):
                self.remount(folder, "rw,size=50%,nr_inodes=0,mode=1777")
            self.sshd()
            self.changed = False
        if self.has_gpus:
            self.script(eight())
            self.show_library()

    @property
    def listener(self) -> int | None:
        """The pid of sshd outside the host, if it runs."""
        return self._sshd.inner if self._sshd is not None and self._sshd.poll() is None else None

    def stop(self) -> None:
        """Stop the host and everything in it."""
        if self._init is not None:
            self._init.kill()
            self._init.wait()
            assert self._init.stdout is not None
            self._init.stdout.close()
        if self._sshd is not None:
            _until(self._sshd_has_ended, f"the sshd of {self.name} is reaped")

    def _signal_sshd(self, number: int) -> set[int]:
        """Send a signal to sshd and its sessions; return their pids."""
        found = {process.pid for process in self.processes() if process.name.startswith("sshd")}
        for pid in found:
            _signal(pid, number)
        return found

    def _sshd_has_ended(self) -> bool:
        assert self._sshd is not None
        if self._sshd.poll() is None:
            _signal(self._sshd.pid, signal.SIGCONT)  # nsenter is stopped together with a paused sshd
        return self._sshd.poll() is not None

    def _listens(self) -> bool:
        done = self.run(["sh", "-c", "cat /proc/net/tcp"], user="root")
        return any(line.split()[1:4:2] == ["00000000:0016", "0A"] for line in done.stdout.splitlines()[1:])

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p"]


def eight() -> list[Gpu]:
    """Return the GPUs that every node starts with: eight idle H100s behind NVSwitch, four on each NUMA node."""
    return [
        Gpu(
            numa=k // 4,
            cpus="0-15,32-47" if k < 4 else "16-31,48-63",
            links=("switch",) * 18,
            levels=tuple((peer, 40 if peer // 4 == k // 4 else 50) for peer in range(8) if peer != k),
        )
        for k in range(8)
    ]


def processes_of(hosts: Iterable[Host]) -> dict[str, list[NodeProcess]]:
    """Return the processes of each host, by its name, without its first one; one pass over /proc for all hosts."""
    found: dict[str, list[NodeProcess]] = {host.name: [] for host in hosts}
    names = {os.readlink(f"/proc/{host.pid}/ns/pid"): host.name for host in hosts if host.pid}
    for entry in os.listdir("/proc") if names else ():
        try:
            name = names.get(os.readlink(f"/proc/{entry}/ns/pid")) if entry.isdigit() else None
        except OSError:
            continue  # it has ended
        process = _process(entry) if name else None
        if name and process and process.inner != 1:
            found[name].append(process)
    return found


def end_processes(hosts: Collection[Host]) -> None:
    """Kill the processes that tests left running on these hosts: all but sshd and those that a host spares."""
    for host in hosts:
        host.resume_listener()
    listeners = {host.listener for host in hosts}

    def ended() -> bool:
        running = processes_of(hosts)
        left = [
            process.pid
            for host in hosts
            for process in running[host.name]
            if process.pid not in listeners and not (host.spare and host.spare(process))
        ]
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return not left

    _until(ended, "only sshd and spared processes run on the hosts")


def _process(pid: str) -> NodeProcess | None:
    """Return a process, or None if it has ended."""
    try:
        status = dict(x.split(":", 1) for x in Path(f"/proc/{pid}/status").read_text().splitlines())
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return None
    if status["State"].split()[0] == "Z":
        return None
    inner, uid = int(status["NSpid"].split()[-1]), int(status["Uid"].split()[1])
    return NodeProcess(int(pid), inner, uid, status["Name"].strip(), tuple(argv))


def inside(pid: int, ip: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *ip.split()], check=True)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _signal(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return  # it has ended


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not in {timeout_s:.0f} s: {what}")
        time.sleep(0.02)
