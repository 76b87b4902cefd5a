"""The client of the keeper: start it, hand it a lease, take one back. On allocate's measured path: it imports little.

started = start_early(env)                  # as soon as it is likely that a lease will be taken; 1 ms
adopt(record(…), env, started)              # returns when the keeper has shown life on every claim
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
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
from gpuboard.transport.spawn import SLURM_SETUP, readable

__all__ = [
    "Handover",
    "KeeperError",
    "KeptJob",
    "KeptNode",
    "LeaseRecord",
    "Started",
    "adopt",
    "ending",
    "forget",
    "hand_over",
    "record",
    "renew",
    "restart_if_needed",
    "start_early",
    "warn",
]

RESTARTS = 3  # of a keeper that ended before it was handed a lease

# Variables that the keeper is not started with: a lease's, by which we would take it for a carrier, and those by which
# a CI runner or a batch system knows the children of a job, to kill them. The rest may be what a ProxyCommand needs.
_JOB_VARIABLES = ("GPUBOARD_", "CUDA_", "SLURM_", "PBS_", "LSB_", "BUILD_", "JENKINS_", "HUDSON_", "CI_", "RUNNER_")

# The loader: nothing of the caller's is inherited (a descriptor of `$(…)` would hang it, one under flock keep the
# lock), and init is its parent, so that nobody's `wait` has it. `gpuboard` is a stub, as in transport/spawn.py.
_BOOT = (
    "import os, sys; os.closerange(3, 65536); os.fork() and os._exit(0); sys.path += {path!r}; "
    "package = type(sys)('gpuboard'); package.__path__ = [{package!r}]; sys.modules['gpuboard'] = package; "
    "from gpuboard.keeper.daemon import main; main()"
)


class Started:
    """A keeper that runs, or is on its way."""

    def __init__(self, folder: str, env: Mapping[str, str], timing: KeeperTiming = TIMING) -> None:
        self.folder = folder
        self.timing = timing
        self.connection = connect(folder)
        self.pid: int | None = None
        self.pipe = -1
        if self.connection is None:
            self.pid, self.pipe = _spawn(folder, env, timing)

    def link(self) -> socket.socket | None:
        """Return a connection, waiting for the keeper's start; None: it has ended since. Raises KeeperError.

        A keeper without a lease ends after some seconds, and on a busy host the claims may take longer than that. One
        that found another running has left the work to it, and that one may end too.
        """
        if self.connection is None and self.pid is not None:
            self._await()
            self.connection = connect(self.folder)
        return self.connection

    def close(self) -> None:
        """Let go of it; without a lease it ends by itself."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def _await(self) -> None:
        said = b""
        deadline = time.monotonic() + self.timing.start_s
        while not said.endswith(b"ready\n"):
            ready = readable(self.pipe, max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.pipe, 4096) if ready else b""
            if not chunk:
                words = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise KeeperError(
                    f"the keeper did not start: {words or f'it did not report within {self.timing.start_s:.0f} s'}"
                )
            said += chunk
        if self.pid is not None:
            os.waitpid(self.pid, 0)  # the process that forked the keeper has ended long ago
            self.pid = None


def record(
    lease: str,
    nodes: Sequence[KeptNode],
    settings: dict[str, Any],
    holder: Holder | None,
    for_s: float,
    *,
    job: KeptJob | None = None,
) -> LeaseRecord:
    """Return the record of a lease just taken for ``for_s`` seconds. ``settings``: plain values of config.Settings."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return LeaseRecord(lease, list(nodes), settings, holder, 0, 0, now, now + for_s, job)


def start_early(env: Mapping[str, str], timing: KeeperTiming = TIMING) -> Started:
    """Start the keeper if none runs, without waiting for it. Raises KeeperError."""
    return Started(_folder(env), env, timing)


class Handover:
    """A lease that the keeper has. Until :meth:`known`, it is released when this process ends, by whatever."""

    def __init__(self, started: Started, lease: LeaseRecord) -> None:
        self._started = started
        self._lease = lease.lease
        self._is_job = lease.job is not None

    def known(self) -> None:
        """Tell the keeper that the lease's owner knows of it: from now on it lives with its holder alone.

        The record of a lease that is a job has to say so, too, for a keeper that takes over: then this returns when it
        does. Raises KeeperError when the keeper has ended instead, or does not answer.
        """
        message = {"op": "known", "lease": self._lease}
        try:
            if self._is_job:
                if _ask(self._started, message, self._started.timing.adopt_s) is None:
                    raise KeeperError(f"the keeper has ended; its log is {self._started.folder}/log")
                return
            link = self._started.link()
            if link is not None:
                send(link, message)
        except OSError:
            return  # the keeper was killed since: the one that takes over finds a record, and knows no better
        finally:
            self._started.close()

    def started(self, number: int, for_s: float) -> None:
        """Tell the keeper the number of the lease's job, which ends ``for_s`` from now. Raises KeeperError."""
        message = {"op": "job", "lease": self._lease, "number": number, "for_s": for_s}
        answer = _ask(self._started, message, self._started.timing.adopt_s)
        if answer is None or "error" in answer:
            raise KeeperError(f"the keeper has lost the lease: {answer['error'] if answer else 'it has ended'}")

    @property
    def lost(self) -> bool:
        """Whether the keeper that has the lease has ended, so that another one must be handed it."""
        try:
            link = self._started.link()
            return link is None or (readable(link.fileno(), 0) and not link.recv(1, socket.MSG_PEEK))
        except (OSError, KeeperError):
            return True

    def abandon(self) -> None:
        """Let the keeper release the lease now, as it does when this process ends."""
        self._started.close()


def hand_over(
    lease: LeaseRecord, env: Mapping[str, str], started: Started | None = None, timing: KeeperTiming = TIMING
) -> Handover:
    """Hand ``lease`` to the keeper; return when it has shown life on its claims.

    Raises KeeperError when the keeper does not start, does not answer or refuses; the caller then drops the claims.
    """
    timeout_s = timing.adopt_remote_s if any(node.host is not None for node in lease.nodes) else timing.adopt_s
    message = {"op": "adopt", "record": lease.plain(), "login": login_of(env)}
    at = started or start_early(env, timing)
    try:
        answer = _ask(at, message, timeout_s)
        for _ in range(RESTARTS):
            if answer is not None:
                break
            at.close()  # it was about to end when we came, or it had ended
            at = start_early(env, timing)
            answer = _ask(at, message, timeout_s)
        if answer is None:
            raise KeeperError(f"each keeper ended while it was handed a lease; their log is {at.folder}/log")
        if "error" in answer:
            raise KeeperError(f"the keeper does not take the lease: {answer['error']}")
    except BaseException:
        at.close()
        raise
    return Handover(at, lease)


def adopt(
    lease: LeaseRecord, env: Mapping[str, str], started: Started | None = None, timing: KeeperTiming = TIMING
) -> None:
    """Hand ``lease`` to the keeper for an owner who knows of it; as :func:`hand_over`."""
    hand_over(lease, env, started, timing).known()


def forget(lease: str, env: Mapping[str, str]) -> None:
    """Tell the keeper that ``lease`` is released: it shows no more life. Without a keeper the record is removed."""
    message = {"op": "forget", "lease": lease}
    if not _tell(message, env, TIMING.forget_s):
        path = f"{_folder(env)}/{lease}.json"
        if os.path.exists(path):
            os.unlink(path)
            _tell(message, env, TIMING.forget_s)  # one that has started since may have read it before


def ending(lease: str, env: Mapping[str, str]) -> None:
    """Tell the keeper that its owner is about to end ``lease``: should the keeper see it first, it is no loss."""
    try:
        _tell({"op": "ending", "lease": lease}, env, TIMING.forget_s)
    except KeeperError:
        return  # it is stopped, and sees nothing


def renew(lease: str, for_s: float, env: Mapping[str, str]) -> None:
    """Tell the keeper that ``lease`` now ends ``for_s`` seconds from now."""
    _tell({"op": "renew", "lease": lease, "for_s": for_s}, env, TIMING.adopt_s)


def restart_if_needed(env: Mapping[str, str]) -> list[str]:
    """Start a keeper when leases of this host lie without one; return words for the user about leases that were lost.

    One listing of a folder when there are none. Raises KeeperError.
    """
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    try:
        names = os.listdir(folder)
        check_owner(folder)
    except OSError:
        return []  # no lease was ever taken here
    if any(name.endswith(".json") for name in names):
        Started(folder, env).close()
    if "lost" not in names:
        return []
    taken = f"{folder}/lost.{os.getpid()}"
    try:
        os.rename(f"{folder}/lost", taken)  # of several commands at once, one tells
    except FileNotFoundError:
        return []
    with open(taken, encoding="utf-8") as file:
        words = file.read().splitlines()
    os.unlink(taken)
    return words


def mind(env: Mapping[str, str]) -> list[str]:
    """Start the keeper again when one was killed and left leases behind; return words for the user on what was lost."""
    try:
        return restart_if_needed(env)
    except KeeperError as error:
        return [f"your leases are not kept alive: {error}"]


def has(lease: str, env: Mapping[str, str]) -> bool:
    """Tell whether a keeper of this host has the lease, or is to have it: what it releases it forgets."""
    return os.path.exists(f"{paths.state_dir(env)}/keeper/{folder_name(env)}/{lease}.json")


def holders(env: Mapping[str, str]) -> dict[str, Holder | None]:
    """Return the process that each lease kept on this host lives with; None: it is detached."""
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    found: dict[str, Holder | None] = {}
    try:
        names = os.listdir(folder)
        check_owner(folder)
    except (OSError, KeeperError):
        return found  # no lease was ever taken here, or it is not our folder
    for name in names:
        if name.endswith(".json"):
            try:
                with open(f"{folder}/{name}", encoding="utf-8") as file:
                    record = decode(json.load(file))
            except (OSError, ValueError):
                continue  # it has just ended
            found[record.lease] = record.holder
    return found


def warn(env: Mapping[str, str]) -> list[str]:
    """Return what on this host would kill the keeper before its leases end, in words for the user."""
    from gpuboard.keeper.logind import reapers  # late: read after the lease stands

    return reapers(env, os.geteuid())


def _folder(env: Mapping[str, str]) -> str:
    folder = f"{paths.state_dir(env)}/keeper/{folder_name(env)}"
    new = not os.path.isdir(folder)
    make_private(folder)
    if new:
        prune(folder)
    return folder


def _tell(message: dict[str, Any], env: Mapping[str, str], timeout_s: float) -> bool:
    """Tell a keeper that runs; return whether one does."""
    connection = connect(f"{paths.state_dir(env)}/keeper/{folder_name(env)}")
    if connection is None:
        return False
    with connection:
        try:
            send(connection, message)
            return receive(connection, timeout_s) is not None
        except (BrokenPipeError, ConnectionResetError):
            return False  # it has ended before it heard us
        except TimeoutError:
            raise KeeperError(unresponsive(peer_pid(connection))) from None
        except OSError as error:
            raise KeeperError(f"cannot connect to the keeper: {error}") from error


def _ask(started: Started, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Return the keeper's answer; None when it ended instead."""
    connection = started.link()
    if connection is None:
        return None
    try:
        send(connection, message)
        return receive(connection, timeout_s)
    except TimeoutError:
        raise KeeperError(
            f"the keeper has not taken the lease within {timeout_s:.0f} s, its log is {started.folder}/log; "
            f"{unresponsive(peer_pid(connection))}"
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        return None
    except OSError as error:
        raise KeeperError(f"cannot connect to the keeper: {error}") from error


def _spawn(folder: str, env: Mapping[str, str], timing: KeeperTiming) -> tuple[int, int]:
    """Start a keeper; return the pid of the process that forks it, and the pipe on which it reports ``ready``."""
    import fcntl

    pipe, write_end = os.pipe()
    end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 3)  # never 0 to 2, which the child's actions write over
    os.close(write_end)
    library = os.path.dirname(os.__file__)
    path = [
        entry
        for entry in dict.fromkeys(sys.path)
        if entry.startswith("/") and entry not in (library, library + "/lib-dynload")
    ]
    boot = _BOOT.format(path=path, package=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-I", "-S", "-c", boot, folder]
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
        raise KeeperError(f"the keeper cannot be started with {sys.executable!r}: {error.strerror}") from error
    finally:
        os.close(end)
    return pid, pipe
