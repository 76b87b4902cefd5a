"""Runs one command for `gpuboard run` and ends all of its processes with gpuboard. Travels alone, as one argument.

It stays in the caller's process group, so that ctrl-C and ctrl-Z at the terminal reach the command directly. It adopts
orphaned processes of the command, and ends all of them when its parent or its connection is gone.

    python3 -c '<this file>' <base64 of {"argv", "environ", "cwd", "remote", "hangup_only", "parent"}>
    python3 -c '<this file>' <base64 of {"signal", "lease"}>      sends a signal to the command that runs in a lease

``hangup_only``: the command is an ssh or srun to another machine and only SIGHUP ends it. Its starter forwards all
other signals to the remote command, including those that a terminal or timeout(1) sends to the process group.
``parent``: pid of the gpuboard that starts this process and may have been killed since; null on another machine.
"""

import base64
import ctypes
import json
import os
import select
import signal
import sys
import time

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SI_KERNEL = 128  # asm-generic/siginfo.h: sent by the terminal, which has sent it to the command too
GRACE_S = 2.0
# Helpers may end shortly after the command: srun's second process, multiprocessing's resource tracker. The grace is a
# number of polls at which all of them sleep, not a time: on a busy machine a process may wait for a CPU.
_POLLS, _POLL_S = 50, 0.01
_HELPERS_S = 3.0  # upper limit of that grace
_PARENT_CHECK_S = 0.5
_AWAKE = frozenset((b"R", b"D"))  # states of proc(5)
_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # exit codes of shells


def main() -> None:
    """Run the command that argv describes and exit with its code, 128 + n when signal n ended it."""
    config = json.loads(base64.b64decode(sys.argv[1]).decode("utf-8"))
    if "signal" in config:
        os._exit(0 if signal_lease(config["lease"], config["signal"]) else 1)
    parent = config["parent"] or os.getppid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = set(_FORWARDED) | {signal.SIGCHLD, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGHUP)
    try:
        os.chdir(config["cwd"])
    except OSError as error:
        fail("%s: cannot change to folder %s: %s" % (os.uname()[1], config["cwd"], error.strerror), 1)
    forwarded = {signal.SIGHUP} if config["hangup_only"] else set(_FORWARDED)
    early = [number for number in signal.sigpending() & forwarded if signal.getsignal(number) != signal.SIG_IGN]
    if early:  # sent before the command exists, which would never receive it
        os._exit(128 + min(early))
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)
        become(config)
    code = wait(pid, parent, watched, forwarded, bool(config["remote"]))
    left = end_all(GRACE_S if code is not None else 0.0)
    if left and code is not None and not config["hangup_only"]:  # else helpers of ssh or srun; the remote end reports
        write_error("ended %d process%s that the command left running" % (left, "es" if left > 1 else ""))
    os._exit(128 + signal.SIGHUP if code is None else code)


def become(config: "Dict[str, Any]") -> None:
    """Turn this process into the command."""
    for number in _FORWARDED + (signal.SIGCHLD, signal.SIGPIPE):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN) or number == signal.SIGPIPE:
            signal.signal(number, signal.SIG_DFL)  # Python's own handlers for SIGINT and SIGPIPE
    # Blocked, not ignored: an ssh that shares a connection installs a handler even for ignored signals. srun receives
    # blocked signals too, so it gets its own process group; not on a terminal, where only the foreground group reads.
    if config["hangup_only"] and not os.isatty(0):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(_FORWARDED) - {signal.SIGHUP} if config["hangup_only"] else ())
    os.environ.update(config["environ"])
    try:
        os.execvp(config["argv"][0], config["argv"])
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        fail("%s: %s" % (config["argv"][0], error.strerror), _NOT_FOUND if missing else _NOT_EXECUTABLE)


def wait(
    pid: int, parent: int, watched: "Set[signal.Signals]", forwarded: "Set[signal.Signals]", remote: bool
) -> "Any":
    """Return the command's exit code, None when the parent or connection is gone; forward the signals ``forwarded``."""
    poller = select.poll()
    if remote:
        poller.register(2, 0)  # sshd's stderr reports the end of the connection, unless redirected
    # A timer, not sigtimedwait: if suspended for longer than its timeout, that returns uninitialized data.
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_S, _PARENT_CHECK_S)
    while True:
        info = signal.sigwaitinfo(watched)
        if os.getppid() != parent or (remote and poller.poll(0)):
            return None
        if info.si_signo in forwarded and info.si_code != SI_KERNEL:
            os.kill(pid, info.si_signo)
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if ended == pid:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            if ended == 0:
                break


def end_all(grace_s: float) -> int:
    """End all descendants, by SIGTERM and ``grace_s`` later by SIGKILL; return how many there were.

    With a grace, processes that end on their own at once are not signalled and not counted.
    """
    found = descendants()
    polls = _POLLS if grace_s > 0 else 0
    until = time.monotonic() + _HELPERS_S
    while found and polls and time.monotonic() < until:
        time.sleep(_POLL_S)
        reap()
        found = descendants()
        polls -= not _AWAKE.intersection(found.values())
    count = len(found)
    for pid in found:
        send(pid, signal.SIGTERM)
        send(pid, signal.SIGCONT)
    until = time.monotonic() + max(grace_s, 0.2)
    while found:
        if time.monotonic() >= until:
            for pid in found:
                send(pid, signal.SIGKILL)
        reap()
        time.sleep(_POLL_S)
        found = descendants()
        if time.monotonic() > until + 3.0:
            break  # in uninterruptible sleep (D): they die when their system call returns
    return count


def reap() -> None:
    """Reap all children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def stat(pid: str) -> "List[bytes]":
    """Return /proc/PID/stat from field 3, the state, on (proc(5)); this file cannot import gpuboard.agent.proc."""
    with open("/proc/%s/stat" % pid, "rb") as file:
        return file.read().rpartition(b")")[2].split()


def descendants() -> "Dict[int, bytes]":
    """Return pid → state of all descendants but zombies. Orphans are adopted by this process, so none is missed."""
    parents, states = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = stat(name)
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                parents[int(name)], states[int(name)] = int(fields[1]), fields[0]
    found = {}  # type: Dict[int, bytes]
    level = {os.getpid()}
    while level:
        level = {pid for pid, above in parents.items() if above in level}
        found.update((pid, states[pid]) for pid in sorted(level))
    return found


def signal_lease(lease: str, number: int) -> bool:
    """Send a signal to the oldest process that carries the lease, its command; return whether there is one."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open("/proc/%s/environ" % name, "rb") as file:
                if ("GPUBOARD_LEASE=%s" % lease).encode() not in file.read().split(b"\0"):
                    continue
            found.append((int(stat(name)[19]), int(name)))  # start time
        except OSError:
            continue  # not a process, another user's, or ended
    if not found:
        return False
    send(min(found)[1], number)
    return True


def send(pid: int, number: int) -> None:
    """Send a signal, also to a process that has ended."""
    try:
        os.kill(pid, number)
    except OSError:
        return


def write_error(message: str) -> None:
    """Write a message to stderr, with ``?`` for control characters."""
    message = "".join(char if char.isprintable() else "?" for char in message)
    try:
        os.write(2, ("gpuboard: %s\n" % message).encode("utf-8", "replace"))
    except OSError:
        return


def fail(message: str, code: int) -> None:
    """Write why the command could not be started, and exit."""
    write_error(message)
    os._exit(code)


if __name__ == "__main__":
    main()
