"""The client of the keeper: start it, hand it a lease, remove one. On allocate's measured path: it imports little.

started = start_early(env)                      # as soon as a reservation is likely; 1 ms
handed = hand_over(record(…), env, started)     # returns after the first heartbeat on every claim
handed.confirm()                                # its owner has the lease
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpuboard import paths
from gpuboard.keeper.holder import Holder
from gpuboard.keeper.record import KeptJob, KeptNode, LeaseRecord, decode, login_of
from gpuboard.keeper.runtime_dir import (
    KeeperError,
    check_owner,
    connect,
    folder_name,
    make_private,
    peer_pid,
    prune,
    receive,
    send,
    unresponsive,
)
from gpuboard.keeper.timing import TIMING, KeeperTiming
from gpuboard.transport.spawn import SLURM_SETUP, import_path, readable

__all__ = [
    "Handover",
    "HeartbeatFailed",
    "KeeperError",
    "KeptJob",
    "KeptNode",
    "LeaseRecord",
    "Started",
    "announce_end",
    "forget",
    "hand_over",
    "record",
    "recover",
    "renew",
    "restart_if_needed",
    "start_early",
    "warn",
]

RESTARTS = 3  # attempts to start a keeper that ends before it is handed a lease

# Variables removed from the keeper's environment: a lease's, which would make the keeper a carrier of it, and those by
# which CI runners and batch systems find the processes of a job to kill them. A ProxyCommand may need any other.
_JOB_VARIABLES = ("GPUBOARD_", "CUDA_", "SLURM_", "PBS_", "LSB_", "BUILD_", "JENKINS_", "HUDSON_", "CI_", "RUNNER_")

# The loader inherits no descriptor of the caller (an open pipe of `$(…)` would hang it, one under flock would keep the
# lock), and its parent is init, so that no `wait` waits for it.
_BOOT = (
    "import os, sys; os.closerange(3, 65536); os.fork() and os._exit(0); sys.path += {path!r}; "
    "from gpuboard.keeper.daemon.main import main; main()"
)

# Processes that forked a keeper that is not needed. The next start reaps them: waiting for one takes 20 ms.
_unreaped: set[int] = set()


class HeartbeatFailed(KeeperError):
    """The keeper could not send the first heartbeat to ``node``."""

    def __init__(self, node: str, words: str) -> None:
        super().__init__(words)
        self.node = node


class Started:
    """A keeper that is running or starting."""

    def __init__(self, folder: str, env: Mapping[str, str], timing: KeeperTiming = TIMING) -> None:
        self.folder = folder
        self.timing = timing
        self.connection = connect(folder)
        self.pid: int | None = None
        self.pipe = -1
        if self.connection is None:
            self.pid, self.pipe = _spawn(folder, env, timing)

    def link(self) -> socket.socket | None:
        """Return a connection, waiting for the keeper's start; None: it has ended. Raises KeeperError.

        A keeper without a lease ends after some seconds, which claiming can exceed on a busy host. A keeper that finds
        another one running ends at once, and that other one may end too.
        """
        if self.connection is None and self.pid is not None:
            self._await()
            self.connection = connect(self.folder)
        return self.connection

    def close(self) -> None:
        """Close the connection; a keeper without a lease ends by itself."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        pipe, self.pipe = self.pipe, -1  # before it is closed: an interrupted close is repeated
        if pipe >= 0:
            os.close(pipe)
        if self.pid is not None:
            _unreaped.add(self.pid)
            self.pid = None

    def _await(self) -> None:
        output = b""
        deadline = time.monotonic() + self.timing.start_s
        while not output.endswith(b"ready\n"):
            ready = readable(self.pipe, max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.pipe, 4096) if ready else b""
            if ready and not chunk and not output:
                break  # killed before it could report
            if not chunk:
                error = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise KeeperError(
                    f"the keeper did not start: {error or f'no report within {self.timing.start_s:.0f} s'}"
                )
            output += chunk
        if self.pid is not None:
            os.waitpid(self.pid, 0)  # the process that forked the keeper; it has ended
            self.pid = None


def record(
    lease: str,
    nodes: Sequence[KeptNode],
    settings: dict[str, Any],
    holder: Holder | None,
    for_s: float,
    *,
    job: KeptJob | None = None,
    shared: bool = False,
) -> LeaseRecord:
    """Return the record of a lease reserved for ``for_s`` seconds from now. ``settings``: config.Settings as a dict.

    ``shared``: the lease of another keeper, for which this host's sends heartbeats, too, while ``holder`` runs.
    """
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return LeaseRecord(lease, list(nodes), settings, holder, 0, 0, now, now + for_s, job, shared)


def start_early(env: Mapping[str, str], timing: KeeperTiming = TIMING) -> Started:
    """Start a keeper unless one is running, without waiting for it. Raises KeeperError."""
    return Started(_folder(env), env, timing)


class Handover:
    """A lease handed to the keeper, which releases it if this process ends before :meth:`confirm`."""

    def __init__(self, started: Started, lease: LeaseRecord) -> None:
        self._started = started
        self._lease = lease.lease
        self._is_job = lease.job is not None

    def confirm(self) -> None:
        """Confirm that the owner has the lease: from now on only its holder determines when it ends.

        For a job, the record must show this too, for a keeper that takes over: this method then waits for the record.
        Raises KeeperError when the keeper has ended, does not answer or cannot write the record.
        """
        message = {"op": "known", "lease": self._lease}
        try:
            if self._is_job:
                answer = _request(self._started, message, self._started.timing.adopt_s)
                if answer is None:
                    raise KeeperError(f"the keeper has ended; its log is {self._started.folder}/log")
                if "error" in answer:
                    raise KeeperError(f"the keeper did not confirm lease {self._lease}: {answer['error']}")
                return
            link = self._started.link()
            if link is not None:
                send(link, message)
        except OSError:
            return  # the keeper was killed since: its successor reads the record and treats the lease as confirmed
        finally:
            self._started.close()

    def job_started(self, number: int, for_s: float) -> None:
        """Report the number of the lease's job, which ends ``for_s`` from now. Raises KeeperError."""
        message = {"op": "job", "lease": self._lease, "number": number, "for_s": for_s}
        answer = _request(self._started, message, self._started.timing.adopt_s)
        if answer is None or "error" in answer:
            raise KeeperError(f"the keeper lost lease {self._lease}: {answer['error'] if answer else 'it has ended'}")

    @property
    def lost(self) -> bool:
        """Whether the keeper that has the lease has ended: it must be handed to another one."""
        try:
            link = self._started.link()
            return link is None or (readable(link.fileno(), 0) and not link.recv(1, socket.MSG_PEEK))
        except (OSError, KeeperError):
            return True

    def abandon(self) -> None:
        """Make the keeper release the lease now, as it does when this process ends."""
        self._started.close()


def hand_over(
    lease: LeaseRecord, env: Mapping[str, str], started: Started | None = None, timing: KeeperTiming = TIMING
) -> Handover:
    """Hand ``lease`` to the keeper; return after its first heartbeat on every claim.

    Raises KeeperError when the keeper does not start, does not answer or refuses, HeartbeatFailed when a node is the
    reason; the caller then releases the claims.
    """
    remote = any(node.host is not None for node in lease.nodes)
    timeout_s = timing.adopt_remote_s * lease.rounds if remote else timing.adopt_s
    message = {"op": "adopt", "record": lease.plain(), "login": login_of(env)}
    at = started or start_early(env, timing)
    try:
        answer = _request(at, message, timeout_s)
        for _ in range(RESTARTS):
            if answer is not None:
                break
            at.close()  # it ended before it received the lease
            at = start_early(env, timing)
            answer = _request(at, message, timeout_s)
        if answer is None:
            raise KeeperError(
                f"the keeper ended {RESTARTS + 1} times before it accepted the lease; its log: {at.folder}/log"
            )
        if "error" in answer:
            words = f"the keeper refused the lease: {answer['error']}"
            raise HeartbeatFailed(answer["node"], words) if answer.get("node") else KeeperError(words)
    except BaseException:
        at.close()
        raise
    return Handover(at, lease)


def forget(lease: str, env: Mapping[str, str]) -> None:
    """Stop the keeper's heartbeats for ``lease``, which is released. Without a keeper, remove its record."""
    message = {"op": "forget", "lease": lease}
    if not _notify(message, env, TIMING.forget_s):
        try:
            os.unlink(f"{_folder(env)}/{lease}.json")
        except FileNotFoundError:
            return  # also where two commands release the lease at once
        _notify(message, env, TIMING.forget_s)  # a keeper started meanwhile may have read the record


def announce_end(lease: str, env: Mapping[str, str]) -> None:
    """Announce that the owner is about to end ``lease``, so that the keeper does not report its end as a loss."""
    try:
        _notify({"op": "ending", "lease": lease}, env, TIMING.forget_s)
    except KeeperError:
        return  # a stopped keeper reports nothing either


def renew(lease: str, for_s: float, env: Mapping[str, str]) -> None:
    """Report to the keeper that ``lease`` now ends ``for_s`` seconds from now."""
    _notify({"op": "renew", "lease": lease, "for_s": for_s}, env, TIMING.adopt_s)


def restart_if_needed(env: Mapping[str, str]) -> list[str]:
    """Start a keeper if leases of this host have none; return and remove the messages about lost leases.

    Without leases it costs one listing of a folder. Raises KeeperError.
    """
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    try:
        names = os.listdir(folder)
        check_owner(folder)
    except OSError:
        return []  # no lease was ever reserved on this host
    if any(name.endswith(".json") for name in names):
        Started(folder, env).close()
    return [message for name in names if _is_lost(name) for message in _taken(f"{folder}/{name}")]


def _is_lost(name: str) -> bool:
    """Return whether a file has messages: the keeper's, or those taken by a command that was killed since."""
    what, _, pid = name.partition(".")
    return what == "lost" and (not pid or (pid.isdecimal() and not os.path.exists(f"/proc/{pid}")))


def _taken(path: str) -> list[str]:
    taken = f"{os.path.dirname(path)}/lost.{os.getpid()}"
    try:
        os.rename(path, taken)  # of several concurrent commands, one shows them
        with open(taken, encoding="utf-8", errors="replace") as file:
            messages = file.read().splitlines()
        os.unlink(taken)
    except OSError:
        return []  # another command shows them, or they stay in a folder that cannot be written
    return messages


def recover(env: Mapping[str, str]) -> list[str]:
    """Do :func:`restart_if_needed`, with a failure as one more message for the user."""
    try:
        return restart_if_needed(env)
    except KeeperError as error:
        return [f"no heartbeats for your leases, which expire within 90 s: {error}"]


def has(lease: str, env: Mapping[str, str]) -> bool:
    """Return whether a keeper of this host has the lease or will take it over; a released one is removed."""
    return os.path.exists(f"{paths.state_dir(env)}/keeper/{folder_name(env)}/{lease}.json")


def holders(env: Mapping[str, str]) -> dict[str, Holder | None]:
    """Return the holder of each lease of this host's keeper; None: detached."""
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    found: dict[str, Holder | None] = {}
    try:
        names = os.listdir(folder)
        check_owner(folder)
    except (OSError, KeeperError):
        return found  # no lease was ever reserved on this host, or the folder is another user's
    for name in names:
        if name.endswith(".json"):
            try:
                with open(f"{folder}/{name}", encoding="utf-8") as file:
                    record = decode(json.load(file))
            except (OSError, ValueError):
                continue  # the lease has just ended
            found[record.lease] = record.holder
    return found


def record_of(lease: str, env: Mapping[str, str]) -> LeaseRecord | None:
    """Return the record of a lease of this host's keeper; None where it has none."""
    try:
        with open(f"{paths.state_dir(env)}/keeper/{folder_name(env)}/{lease}.json", encoding="utf-8") as file:
            return decode(json.load(file))
    except (OSError, ValueError):
        return None


def warn(env: Mapping[str, str]) -> list[str]:
    """Return warnings about what on this host would kill the keeper before its leases end."""
    from gpuboard.keeper.logind import reapers  # late: needed only after the lease is reserved

    return reapers(env, os.geteuid())


def _folder(env: Mapping[str, str]) -> str:
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    new = not os.path.isdir(folder)
    make_private(folder)
    if new:
        prune(folder)
    return folder


def _notify(message: dict[str, Any], env: Mapping[str, str], timeout_s: float) -> bool:
    """Send a message to the running keeper; return whether there is one. Raises KeeperError."""
    connection = connect(f"{paths.state_dir(env)}/keeper/{folder_name(env)}")
    if connection is None:
        return False
    with connection:
        try:
            send(connection, message)
            return receive(connection, timeout_s) is not None
        except (BrokenPipeError, ConnectionResetError):
            return False  # it ended before it read the message
        except TimeoutError:
            raise KeeperError(unresponsive(peer_pid(connection))) from None
        except OSError as error:
            raise KeeperError(f"cannot connect to the keeper: {error}") from error


def _request(started: Started, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Return the keeper's answer; None when it ended before it answered. Raises KeeperError."""
    connection = started.link()
    if connection is None:
        return None
    try:
        send(connection, message)
        return receive(connection, timeout_s)
    except TimeoutError:
        raise KeeperError(
            f"the keeper did not accept the lease within {timeout_s:.0f} s; its log is {started.folder}/log; "
            f"{unresponsive(peer_pid(connection))}"
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        return None
    except OSError as error:
        raise KeeperError(f"cannot connect to the keeper: {error}") from error


def _spawn(folder: str, env: Mapping[str, str], timing: KeeperTiming) -> tuple[int, int]:
    """Start a keeper; return the pid of the process that forks it, and the pipe on which it reports ``ready``."""
    import fcntl

    _reap()
    pipe, write_end = os.pipe()
    end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 3)  # not 0 to 2, which the child's file actions replace
    os.close(write_end)
    command = [sys.executable, "-I", "-S", "-c", _BOOT.format(path=import_path()), folder]
    if timing != TIMING:
        command.append(json.dumps(timing._asdict()))
    try:
        pid = os.posix_spawn(
            command[0],
            command,
            {k: v for k, v in env.items() if not k.startswith(_JOB_VARIABLES) or k in SLURM_SETUP},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, end, 1),
                (os.POSIX_SPAWN_DUP2, end, 2),
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            ],
            setsid=True,
            setsigdef=range(1, 32),
            setsigmask=(),
        )
    except OSError as error:
        os.close(pipe)
        raise KeeperError(f"cannot start the keeper with {sys.executable!r}: {error.strerror}") from error
    finally:
        os.close(end)
    return pid, pipe


def _reap() -> None:
    for pid in list(_unreaped):
        with suppress(ChildProcessError):  # reaped by the program that uses the API
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
        _unreaped.discard(pid)
