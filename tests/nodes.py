"""Test nodes: real hosts in namespaces, with real sshd, real users, and an NVML library that a script drives.

    gpu01 gpu02 gpu03 (8 scripted H100s each), login1 login2 (no GPUs)
    users root, alice (2001), bob (2002), carol (2003)

Each host has its own network namespace (eth0 on one bridge, not visible outside), hostname, process namespace,
/etc (hosts, passwd, …), /tmp, /var/tmp, /run, /dev/shm; homes are in /srv/home, shared by all hosts as on a cluster
with NFS homes. ``ssh gpu01`` works from every host for every user: keys, known_hosts and config are in place. The
node's ``python3`` is the system's; this test run's interpreter, packages and repository are visible at their own paths.

Tests use the fixture ``nodes`` (tests/conftest.py), a :class:`Cluster` started once and reset before each
test. It skips, with the reason, where root, namespaces or sshd are missing.

    def test_x(nodes):
        gpu01 = nodes["gpu01"]
        gpus = gpu01.script([Gpu(), Gpu(used=5 * GIB)])                    # tests.nvml; returns them with their UUIDs
        done = nodes["login1"].run(["gpuboard", "status", "--json"], user="alice")     # CompletedProcess, text
        with nodes["login1"].popen(["gpuboard", "status", "--watch"], user="bob") as process:
            process.send_signal(signal.SIGKILL)                  # sent to the process itself; .inner is its pid
        gpu01.processes(user="alice")                                      # the processes in its namespace
        gpu01.pause_sshd(); gpu01.resume_sshd(); gpu01.unplug(); gpu01.plug()
        gpu01.firewall("add rule inet t in tcp dport 29500 drop")          # in table inet t, chain in (input hook)
        gpu01.sshd("SetEnv PATH=/nowhere")                                 # restart with more configuration
        gpu01.hide_library(); gpu01.use_python("/opt/python3.6/bin/python3")
        gpu01.remount("/var/tmp", "size=64k")
        gpu01.path("/var/tmp")                                             # that folder for access from outside
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.hosts import ADDRESSES, HIDDEN, SSHD, USERS, Host, eight, end_processes, inside
from tests.waiting import read_line

__all__ = ["ADDRESSES", "USERS", "Cluster", "Host", "eight", "missing", "old_python"]

REPOSITORY = Path(__file__).resolve().parent.parent


def missing() -> str | None:
    """Return what this machine lacks for test nodes, or None."""
    if os.geteuid() != 0:
        return "root"
    for tool in ("unshare", "nsenter", "setpriv", "ip", "ssh-keygen", "cc"):
        if shutil.which(tool) is None:
            return tool
    if not SSHD:
        return "sshd (openssh-server)"
    if subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True).returncode:
        return "namespaces (unshare is refused)"
    return None


class Cluster:
    """The hosts, by name; see the module's docstring."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gpuboard-nodes-"))
        self.root.chmod(0o755)
        self.hosts = {name: Host(name, self.root) for name in ADDRESSES}
        self._switch: subprocess.Popen[str] | None = None

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def home(self, user: str) -> Path:
        """Return a user's home for access from outside (inside it is /srv/home/USER)."""
        return self.root / "srv" / "home" / user

    def start(self) -> None:
        """Start every host; takes about two seconds."""
        self._prepare()
        self._switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "sh", "-c", "echo ready; exec sleep 1000000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        paths = _needed_paths()
        for host in self:
            host.begin(paths)
        read_line(self._switch)
        inside(self._switch.pid, "link add lan type bridge forward_delay 0")
        inside(self._switch.pid, "link set lan up")
        for host in self:
            host.finish(self._switch.pid)

    def reset(self) -> None:
        """Reset every host and home.

        Processes are ended on all hosts first: one left by a test, such as a keeper, could otherwise connect to hosts
        that are reset already.
        """
        end_processes(self.hosts.values())
        for host in self:
            host.reset()
        for user in USERS:
            self._fill_home(user)

    def stop(self) -> None:
        """Stop every host and remove all files."""
        for host in self:
            host.stop()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            assert self._switch.stdout is not None
            self._switch.stdout.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _prepare(self) -> None:
        keys = self.root / "keys"
        keys.mkdir(mode=0o700)
        for name in (*ADDRESSES, *USERS):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", keys / name], check=True)
        known = [f"{n},{a} {(keys / n).with_suffix('.pub').read_text()}" for n, a in ADDRESSES.items()]
        (keys / "known_hosts").write_text("".join(known))
        for user in USERS:
            self._fill_home(user)
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items())
        people = {name: uid for name, uid in USERS.items() if uid}
        passwd = [x for x in _entries("/etc/passwd") if x.split(":")[0] not in USERS]
        passwd += [f"{name}:x:{uid}:{uid}::/srv/home/{name}:/bin/bash" for name, uid in USERS.items()]
        group = _entries("/etc/group") + [f"{name}:x:{uid}:" for name, uid in people.items()]
        for host in self:
            for folder in ("work", "nvml", "etc/ssh", "etc/ld.so.conf.d"):
                (host.folder / folder).mkdir(parents=True)
            etc = host.folder / "etc"
            (etc / "hosts").write_text(hosts)
            (etc / "hostname").write_text(host.name + "\n")
            (etc / "passwd").write_text("\n".join(passwd) + "\n")
            (etc / "group").write_text("\n".join(group) + "\n")
            (etc / "shadow").write_text("".join(f"{x.split(':')[0]}:*:19000:0:99999:7:::\n" for x in passwd))
            (etc / "shadow").chmod(0o600)
            (etc / "ld.so.conf.d" / "fake-nvml.conf").write_text("/run/fake-nvml\n")
            shutil.copy(keys / host.name, etc / "ssh" / "test_host_key")
            if host.has_gpus:
                host.show_library()
                host.script(eight())

    def _fill_home(self, user: str) -> None:
        home, uid, keys = self.home(user), USERS[user], self.root / "keys"
        cache = home / ".cache" / "gpuboard"
        # What a first command makes is kept: it takes a third of a command's CPU time.
        kept = {path: path.replace(self.root / f"{user}-{path.name}") for path in cache.glob("bundle-node-*")}
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        if kept:
            cache.mkdir(mode=0o700, parents=True)
            for path in (cache.parent, cache):
                os.chown(path, uid, uid)
        for path, away in kept.items():
            away.replace(path)
        ssh = home / ".ssh"
        ssh.mkdir(mode=0o700)
        shutil.copy(keys / user, ssh / "id_ed25519")
        shutil.copy((keys / user).with_suffix(".pub"), ssh / "authorized_keys")
        shutil.copy(keys / "known_hosts", ssh / "known_hosts")
        # curve25519: the default key exchange takes ten times as long on processors without its instructions
        (ssh / "config").write_text("Host *\n    IdentityFile ~/.ssh/id_ed25519\n    KexAlgorithms curve25519-sha256\n")
        for path in (home, ssh, *ssh.iterdir()):
            os.chown(path, uid, uid)
        home.chmod(0o755)


def old_python() -> str | None:
    """Return the oldest interpreter of Python 3.6 to 3.8 on this machine, or None."""
    found = [shutil.which(f"python3.{minor}") for minor in (6, 7, 8)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found += [str(path) for minor in (6, 7, 8) for path in sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))]
    return next((path for path in found if path and "/shims/" not in path), None)


def _needed_paths() -> list[str]:
    """Return the paths that this test run needs in every host, in the form of tests.hosts.

    First the folders that a host's own /tmp and the like would hide, then ``--``, then folders that other users may
    not enter, each with the paths needed below it: ``A x y -- B z --``.
    """
    needed = {Path(sys.base_prefix), Path(sys.prefix), REPOSITORY, Path(os.path.realpath(sys.executable)).parent.parent}
    old = old_python()
    if old:
        needed.add(Path(old).parent.parent)
    hidden: list[str] = []
    by_folder: dict[Path, list[str]] = {}
    for path in sorted({part for folder in needed for part in _enterable(folder)}):
        if any(path.is_relative_to(folder) for folder in HIDDEN):
            hidden.append(str(path))
            continue
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                by_folder.setdefault(folder, []).append(str(path))
                break
    return [*hidden, "--", *(word for folder, paths in by_folder.items() for word in (str(folder), *paths, "--"))]


def _enterable(path: Path) -> list[Path]:
    """Return ``path``, or, if others may not enter it (a clone made in a private folder), the folders in it."""
    return [path] if path.stat().st_mode & 0o001 else [part for part in path.iterdir() if part.is_dir()]


def _entries(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
