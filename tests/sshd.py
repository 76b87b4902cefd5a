"""A real sshd on 127.0.0.1, with keys, ssh_config and known_hosts, for tests that need ssh but no nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.waiting import until

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


class Sshd:
    """One server in ``folder``. ``alias`` lines for it are written with :meth:`host`, into ``ssh_config``."""

    def __init__(self, folder: Path, *, extra: str = "", startups: str = "200:30:400") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ssh_config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self._held = socket.socket()  # reserves the port: bound as sshd binds it, without listening
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = int(self._held.getsockname()[1])
        self.key = make_key(folder / "user_key")
        host_key = make_key(folder / "host_key")
        # With SHLVL bash does not read root's own .bashrc, which can take longer than the rest of a test.
        (folder / "authorized_keys").write_text(f'environment="SHLVL=1" {Path(f"{self.key}.pub").read_text()}')
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {Path(f'{host_key}.pub').read_text()}")
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile {folder}/sshd.pid\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups {startups}\nMaxSessions 200\n"
            f"LogLevel ERROR\nPermitUserEnvironment SHLVL\n{extra}"
        )
        self.ssh_config.write_text("")
        Path("/run/sshd").mkdir(exist_ok=True)  # required by Debian's sshd; its service creates it, too
        self.start()

    def start(self) -> None:
        """Start the server, at first and after ``stop``."""
        self.process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(self.folder / "sshd_config")])
        until(lambda: _listens(self.port), "sshd's port")

    def host(self, alias: str, **options: object) -> None:
        """Write a ``Host`` block for ``alias``; ``options`` add to the defaults or replace them."""
        lines = {
            "HostName": "127.0.0.1",
            "Port": self.port,
            "User": "root",
            "IdentityFile": self.key,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.known_hosts,
            **options,
        }
        with self.ssh_config.open("a", encoding="utf-8") as file:
            file.write(f"Host {alias}\n" + "".join(f"    {key} {value}\n" for key, value in lines.items()))

    def stop(self) -> None:
        """End the server and every session of it; it may have ended already."""
        if self.process.poll() is not None:
            return  # its pid may be reused by now
        for pid in [*children(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def make_key(path: Path) -> Path:
    """Make an ed25519 key without a passphrase at ``path``."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def _listens(port: int) -> bool:
    """Return whether a process listens on ``port``, without a connection, which sshd would start a process for."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(one[1].endswith(f":{port:04X}") and one[3] == "0A" for one in sockets)


def children(pid: int) -> list[int]:
    """Return the processes below ``pid``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(name), *children(int(name))]
    return found
