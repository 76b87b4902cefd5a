"""Runs one command for `gpuboard run` and lets nothing of it outlive gpuboard. Travels alone, as one argument.

It keeps the caller's process group, so that ctrl-C and ctrl-Z at the terminal reach the command by themselves, adopts
what the command leaves behind, and ends all of it when its parent or its connection is gone.

    python3 -c '<this file>' <base64 of {"argv", "environ", "cwd", "remote", "deaf", "parent"}>
    python3 -c '<this file>' <base64 of {"signal", "lease"}>      sends the command that runs in a lease a signal

``deaf``: the command is an ssh or srun to another machine, which ends by SIGHUP alone: whoever started it hands all
other signals on to what runs there, also those that a terminal, or timeout(1), sends to the whole process group.
``parent``: pid of the gpuboard that starts us, which may have been killed before we look; null on another machine.
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
    from typing import Any, Dict, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SI_KERNEL = 128  # asm-generic/siginfo.h: sent by the terminal, so the command has had it too
GRACE_S = 2.0
# Helpers may end with what they help: srun's second process, multiprocessing's resource tracker. Looks count, and not
# time, and only those at which all sleep: on a busy machine one may have to wait for a processor.
_LOOKS, _BETWEEN_S = 50, 0.01
_HELPERS_S = 3.0  # but no longer
_LOOK_S = 0.5
_AWAKE = frozenset((b"R", b"D"))  # states of proc(5)
_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells have it


def main() -> None:
    """Run the command that argv describes and exit with its code, 128 + n when signal n ended it."""
    config = json.loads(base64.b64decode(sys.argv[1]).decode("utf-8"))
    if "signal" in config:
        os._exit(0 if tell(config["lease"], config["signal"]) else 1)
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
        fail("%s: no folder %s here: %s" % (os.uname()[1], config["cwd"], error.strerror), 1)
    handed = {signal.SIGHUP} if config["deaf"] else set(_FORWARDED)
    early = [number for number in signal.sigpending() & handed if signal.getsignal(number) != signal.SIG_IGN]
    if early:  # the command would never hear of what a terminal sent before it was there
        os._exit(128 + min(early))
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)
        become(config)
    code = wait(pid, parent, watched, handed, bool(config["remote"]))
    left = end_all(GRACE_S if code is not None else 0.0)
    if left and code is not None and not config["deaf"]:  # helpers of ssh and srun; what runs there is told from there
        several = left > 1
        say("%d process%s that the command left behind %s ended" % (left, "es" * several, "were" if several else "was"))
    os._exit(128 + signal.SIGHUP if code is None else code)


def become(config: "Dict[str, Any]") -> None:
    """Turn this process into the command."""
    for number in _FORWARDED + (signal.SIGCHLD, signal.SIGPIPE):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN) or number == signal.SIGPIPE:
            signal.signal(number, signal.SIG_DFL)  # Python's own handlers for SIGINT and SIGPIPE
    # Blocked, not ignored: an ssh that shares a connection has a handler whatever it inherits. srun waits for them all
    # the same; in a group of its own it hears none, but a terminal lets only its foreground group read.
    if config["deaf"] and not os.isatty(0):
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(_FORWARDED) - {signal.SIGHUP} if config["deaf"] else ())
    os.environ.update(config["environ"])
    try:
        os.execvp(config["argv"][0], config["argv"])
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        fail("%s: %s" % (config["argv"][0], error.strerror), _NOT_FOUND if missing else _NOT_EXECUTABLE)


def wait(pid: int, parent: int, watched: "Set[signal.Signals]", handed: "Set[signal.Signals]", remote: bool) -> "Any":
    """Return the command's exit code; None when we are alone: parent dead or connection gone. ``handed``: on to it."""
    poller = select.poll()
    if remote:
        poller.register(2, 0)  # end-of-file of the connection shows on the stderr that sshd gave us, unless redirected
    # A timer, not sigtimedwait: after ctrl-Z and fg longer than its timeout that returns what was on the stack.
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    while True:
        info = signal.sigwaitinfo(watched)
        if os.getppid() != parent or (remote and poller.poll(0)):
            return None
        if info.si_signo in handed and info.si_code != SI_KERNEL:
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
    """End everything below us, SIGTERM first; return how many there were. ``grace_s`` after which SIGKILL is sent.

    With a grace, what ends by itself in a moment is let alone and does not count.
    """
    found = descendants()
    looks = _LOOKS if grace_s > 0 else 0
    until = time.monotonic() + _HELPERS_S
    while found and looks and time.monotonic() < until:
        time.sleep(_BETWEEN_S)
        reap()
        found = descendants()
        looks -= not _AWAKE.intersection(found.values())
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
        time.sleep(_BETWEEN_S)
        found = descendants()
        if time.monotonic() > until + 3.0:
            break  # in the kernel's hands (D state): they die when it lets go
    return count


def reap() -> None:
    """Take leave of every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def descendants() -> "Dict[int, bytes]":
    """Return pid and state of what is below us, zombies left out; orphans come to us, so one walk down finds all."""
    parents, states = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
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


def tell(lease: str, number: int) -> bool:
    """Send the command of a lease a signal; return whether there is one: the first process that carries the lease."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open("/proc/%s/environ" % name, "rb") as file:
                if ("GPUBOARD_LEASE=%s" % lease).encode() not in file.read().split(b"\0"):
                    continue
            with open("/proc/%s/stat" % name, "rb") as file:
                found.append((int(file.read().rpartition(b")")[2].split()[19]), int(name)))  # when it started
        except OSError:
            continue  # no process, somebody else's, or ended
    if not found:
        return False
    send(min(found)[1], number)
    return True


def send(pid: int, number: int) -> None:
    """Send a signal; one that has ended meanwhile is what we want."""
    try:
        os.kill(pid, number)
    except OSError:
        return


def say(words: str) -> None:
    """Tell the person."""
    try:
        os.write(2, ("gpuboard: %s\n" % words).encode("utf-8", "replace"))
    except OSError:
        return


def fail(words: str, code: int) -> None:
    """Say why nothing could be started, and end."""
    say(words)
    os._exit(code)


if __name__ == "__main__":
    main()
