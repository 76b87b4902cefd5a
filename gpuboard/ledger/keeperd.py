"""The keeper: one small process per user and host that keeps that user's leases alive while their holders live.

It touches the claims every 30 s, watches the holders (a pidfd each), and when one has gone looks for processes that
carry its lease or run on its GPUs; when there are none (any more), it releases. It kills nothing. It ends a few
seconds after its last lease. Killed, it leaves its records, and the next gpuboard command starts another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

from gpuboard.ledger import keeper_processes as processes
from gpuboard.ledger.holder import alive, read_process
from gpuboard.ledger.keeper_nodes import Answer, Connectors, NodeCalls, node_key
from gpuboard.ledger.keeper_place import KeeperError, occupy, peer_uid, send, withdraw, write_file
from gpuboard.ledger.keeper_record import Record, Seen, decode, judge

TOUCH_S = 30.0
RETRY_S = (5.0, 10.0, 20.0, 30.0)  # after a touch or a release that did not reach its node
RELEASE_S = 100.0  # after this a claim without life has lapsed (90 s): no use in trying on
LINGER_S = 5.0
POLL_S = 1.0  # where the kernel has no pidfd (before 5.3)
_WATCHED = 32  # carriers watched for their end; of more, looking every few seconds is enough
_LOG_LIMIT = 1 << 20  # bytes


class Kept:
    """A lease in the keeper's hands."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.lease = record.lease
        self.watched: list[int] = []  # pidfds: of the holder, later of carriers
        self.client: Client | None = None  # waits for the first touch of each node
        self.unconfirmed: set[str] = set()
        self.phase = "held"  # "held" | "orphaned" | "releasing"
        self.since: float | None = None
        self.due: float | None = None  # the next look, or the next try to release
        self.asked: set[str] = set()  # nodes that have still to say who carries it, or to release
        self.found: bool | None = False
        self.tries = 0
        self.released_at = 0.0


class Client:
    """A gpuboard command that talks to us."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""

    def reply(self, error: str = "") -> None:
        """Say yes, or why not."""
        try:
            send(self.connection, {"error": error} if error else {"ok": True})
        except OSError:
            log("a command ended before it had its answer")


class KeptNodes:
    """The nodes of all leases: when each is touched next, and how often it failed."""

    def __init__(self) -> None:
        self.calls: dict[str, NodeCalls] = {}
        self.leases: dict[str, set[str]] = {}
        self.due: dict[str, float] = {}
        self.failures: dict[str, int] = {}


class Keeper:
    """The loop and what it knows. ``now`` is CLOCK_BOOTTIME: a machine that slept has aged its claims."""

    def __init__(self, folder: str, listener: socket.socket) -> None:
        self.folder = folder
        self.listener = listener
        self.kept: dict[str, Kept] = {}
        self.nodes = KeptNodes()
        self.connectors = Connectors()
        self.clients: set[Client] = set()
        self.idle_since = boottime()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.answers: deque[Callable[[], None]] = deque()
        self.poller = select.poll()
        self.actions: dict[int, Callable[[], None]] = {}
        listener.setblocking(False)
        self._watch(listener.fileno(), self._accept)
        self._watch(self.wake, self._woken)

    def run(self) -> None:
        """Keep leases until there has been none for a while."""
        self._readopt()
        while True:
            now = boottime()
            if self.kept or self.clients:
                self.idle_since = now
            elif now - self.idle_since >= LINGER_S:
                return
            self._timers(now)
            while self.answers:
                self.answers.popleft()()
            for fd, _ in self.poller.poll(self._pause_ms()):
                if fd in self.actions:
                    self.actions[fd]()

    # --- talking to commands

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # whoever knocked has gone again
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.settimeout(1.0)
        client = Client(connection)
        self.clients.add(client)
        self._watch(connection.fileno(), partial(self._hear, client))

    def _hear(self, client: Client) -> None:
        try:
            data = client.connection.recv(65536)
        except OSError:
            data = b""
        client.data += data
        if not data or len(client.data) > 1 << 20:
            self._hang_up(client)
            return
        *lines, client.data = client.data.split(b"\n")
        for line in lines:
            self._obey(client, line)

    def _hang_up(self, client: Client) -> None:
        self._unwatch(client.connection.fileno())
        client.connection.close()
        self.clients.discard(client)
        for kept in list(self.kept.values()):
            if kept.client is client:  # it died before it could tell anybody of its lease: nobody's
                log(f"{kept.lease}: the command that took it has gone before it was confirmed")
                kept.client = None
                self._release(kept)

    def _obey(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line)
            op = message["op"]
            if op == "adopt":
                self._adopt(client, decode(message["record"]))
                return
            kept = self.kept.get(str(message["lease"]))
            if op == "renew" and kept is not None:
                self._rewrite(kept, kept.record._replace(until=boottime() + float(message["for_s"])))
            elif op == "forget" and kept is not None:
                self._drop(kept, "given back")
            client.reply()
        except (ValueError, KeyError, TypeError) as error:
            client.reply(f"not understood: {error!r}")
        except OSError as error:
            client.reply(f"{self.folder}: {error.strerror}")

    def _adopt(self, client: Client, record: Record) -> None:
        if record.holder is not None and not alive(record.holder):
            client.reply(f"the process that lease {record.lease} was to live with, pid {record.holder.pid}, has gone")
            return
        if record.lease in self.kept:
            self._drop(self.kept[record.lease], "taken over anew")
        process = read_process(record.holder.pid) if record.holder else None
        if process is not None:
            record = record._replace(session=process.session, group=process.group)
        kept = Kept(record)
        self._rewrite(kept, record)
        kept.client = client
        kept.unconfirmed = {node.name for node in record.nodes}
        self._keep(kept)

    # --- keeping

    def _readopt(self) -> None:
        """Take the leases of a keeper that was killed."""
        for name in sorted(os.listdir(self.folder)):
            if not name.endswith(".json"):
                continue
            path = f"{self.folder}/{name}"
            try:
                with open(path, encoding="utf-8") as file:
                    self._keep(Kept(decode(json.load(file))))
                log(f"{name[:-5]}: taken over")
            except (ValueError, OSError) as error:
                log(f"{name}: put aside: {error}")
                os.replace(path, path + ".bad")

    def _keep(self, kept: Kept) -> None:
        record = kept.record
        self.kept[record.lease] = kept
        for node in record.nodes:
            key = node_key(node, record.settings)
            if key not in self.nodes.calls:
                self.nodes.calls[key] = NodeCalls(node, record.settings, self.connectors)
                self.nodes.leases[key] = set()
                self.nodes.failures[key] = 0
            self.nodes.leases[key].add(record.lease)
            self.nodes.due[key] = 0.0
        if record.holder is not None:
            self._watch_process(kept, record.holder.pid, partial(self._holder_ended, kept))
            if not alive(record.holder):  # looked at after the pidfd was opened: it is the holder's or a stranger's
                self._holder_ended(kept)

    def _touch(self, key: str, now: float) -> None:
        self.nodes.due[key] = now + TOUCH_S
        leases = sorted(self.nodes.leases[key])
        report = partial(self._later, partial(self._touched, key, leases))
        self.nodes.calls[key].call("touch", {"leases": leases}, report)

    def _touched(self, key: str, leases: list[str], answer: Answer) -> None:
        if key not in self.nodes.calls:
            return
        name = self.nodes.calls[key].name
        concerned = [self.kept[lease] for lease in leases if lease in self.kept]
        if answer.kind:
            self.nodes.failures[key] += 1
            again = RETRY_S[min(self.nodes.failures[key], len(RETRY_S)) - 1]
            self.nodes.due[key] = boottime() + again
            log(f"{name}: no life shown: {answer.words}; again in {again:.0f} s")
            for kept in concerned:
                if kept.client is not None and name in kept.unconfirmed:
                    self._disown(kept, f"{name}: {answer.words}")
            return
        self.nodes.failures[key] = 0
        for kept in concerned:
            if kept.phase == "releasing":
                continue
            if kept.lease not in answer.value["alive"]:
                self._gone(kept, name, lapsed=kept.lease in answer.value["lapsed"])
                continue
            kept.unconfirmed.discard(name)
            if kept.client is not None and not kept.unconfirmed:
                kept.client.reply()
                kept.client = None

    def _gone(self, kept: Kept, name: str, *, lapsed: bool) -> None:
        """A node has no living claim of the lease any more; it is kept on the others."""
        record = kept.record
        if kept.client is not None:
            self._disown(kept, f"{name}: the claims of lease {kept.lease} have {'lapsed' if lapsed else 'gone'}")
            return
        if lapsed and boottime() < record.until:
            words = f"lease {kept.lease} has lapsed on {name}: its keeper could show no life there for 90 s"
            log(words)
            with open(f"{self.folder}/lost", "a", encoding="utf-8") as file:
                file.write(words + "\n")
        rest = [node for node in record.nodes if node.name != name]
        if not rest:
            self._drop(kept, "its time is up" if lapsed else "released")
            return
        self._forget_nodes(kept)
        self._rewrite(kept, record._replace(nodes=rest))
        for node in rest:
            self.nodes.leases[node_key(node, record.settings)].add(kept.lease)

    # --- the end of a lease

    def _holder_ended(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        if kept.phase == "held":
            log(f"{kept.lease}: its holder has ended")
            kept.phase = "orphaned"
        if kept.phase == "orphaned" and not kept.asked:
            self._look(kept)

    def _look(self, kept: Kept) -> None:
        """Look whether anything carries the lease: on this host first, which is quick, then on its nodes."""
        kept.due = None
        pids = processes.carriers(kept.lease)
        if pids:
            for pid in pids[:_WATCHED]:
                self._watch_process(kept, pid, partial(self._holder_ended, kept))
            self._judge(kept, carried=True)
            return
        kept.found = False
        kept.asked = {node.name for node in kept.record.nodes}
        for node in kept.record.nodes:
            calls = self.nodes.calls[node_key(node, kept.record.settings)]
            calls.call("read", {}, partial(self._later, partial(self._read, kept, node.name)))
            report = partial(self._later, partial(self._looked, kept, node.name))
            calls.call("carriers", {"lease": kept.lease, "uuids": node.uuids}, report)

    def _read(self, kept: Kept, name: str, answer: Answer) -> None:
        """A reading of the GPUs goes before the question who runs on them; without one nobody knows."""
        if answer.kind and name in kept.asked:
            log(f"{kept.lease}: {name}: {answer.words}")
            kept.found = kept.found or None

    def _looked(self, kept: Kept, name: str, answer: Answer) -> None:
        if kept.lease not in self.kept or name not in kept.asked or kept.phase != "orphaned":
            return
        kept.asked.discard(name)
        if answer.kind:
            log(f"{kept.lease}: {name}: who carries it cannot be seen: {answer.words}")
            kept.found = kept.found or None
        elif answer.value["processes"]:
            kept.found = True
        if not kept.asked:
            self._judge(kept, carried=kept.found)

    def _judge(self, kept: Kept, carried: bool | None) -> None:
        record = kept.record
        left = not carried and bool(processes.heirs(record.session, record.group, record.created))
        now = boottime()
        verdict = judge(Seen(carried, left), kept.since, now)
        kept.since = verdict.since
        kept.due = now + verdict.again_s
        if verdict.release:
            self._release(kept)

    def _release(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        self._forget_nodes(kept, close=False)
        kept.phase = "releasing"
        kept.released_at = boottime()
        kept.asked = {node.name for node in kept.record.nodes}
        self._try_release(kept)

    def _try_release(self, kept: Kept) -> None:
        kept.due = boottime() + RETRY_S[min(kept.tries, len(RETRY_S) - 1)]
        kept.tries += 1
        for node in kept.record.nodes:
            if node.name in kept.asked:
                report = partial(self._later, partial(self._released, kept, node.name))
                key = node_key(node, kept.record.settings)
                self.nodes.calls[key].call("release", {"lease": kept.lease}, report)

    def _released(self, kept: Kept, name: str, answer: Answer) -> None:
        if answer.kind in {"", "not-found", "not-yours"}:
            kept.asked.discard(name)
        else:
            log(f"{kept.lease}: not released on {name}: {answer.words}")
        late = boottime() - kept.released_at > RELEASE_S
        if kept.lease in self.kept and (late or not kept.asked):
            self._drop(kept, "released" if not kept.asked else "left to lapse")

    def _disown(self, kept: Kept, words: str) -> None:
        """Refuse a lease that was handed to us; whoever took the claims drops them."""
        if kept.client is not None:
            kept.client.reply(words)
        self._drop(kept, f"refused: {words}")

    def _drop(self, kept: Kept, words: str) -> None:
        log(f"{kept.lease}: {words}")
        self._unwatch_processes(kept)
        self._forget_nodes(kept)
        self.kept.pop(kept.lease, None)
        try:
            os.unlink(f"{self.folder}/{kept.lease}.json")
        except OSError as error:
            log(f"{kept.lease}.json: {error.strerror}")

    # --- the loop's own business

    def _timers(self, now: float) -> None:
        for key in [key for key, due in self.nodes.due.items() if due <= now]:
            self._touch(key, now)
        for kept in list(self.kept.values()):
            if kept.due is not None and kept.due <= now:
                if kept.phase == "releasing":
                    self._try_release(kept)
                elif kept.phase == "orphaned":
                    self._unwatch_processes(kept)
                    self._look(kept)
                elif kept.record.holder is not None and not alive(kept.record.holder):
                    self._holder_ended(kept)
                else:
                    kept.due = now + POLL_S

    def _pause_ms(self) -> float:
        dues = [*self.nodes.due.values(), *(kept.due for kept in self.kept.values() if kept.due is not None)]
        now = boottime()
        dues += [k.record.until + 0.5 for k in self.kept.values() if k.record.until + 0.5 > now]
        if not self.kept:
            dues.append(self.idle_since + LINGER_S)
        pause = 0.0 if self.answers else min(dues, default=now + TOUCH_S) - now
        return max(0.0, min(pause, TOUCH_S)) * 1000 + 1

    def _later(self, action: Callable[[Answer], None], answer: Answer) -> None:
        """Take an answer, perhaps in another thread; it is handled by the loop."""
        self.answers.append(partial(action, answer))
        os.eventfd_write(self.wake, 1)

    def _woken(self) -> None:
        os.eventfd_read(self.wake)

    def _watch(self, fd: int, action: Callable[[], None]) -> None:
        self.actions[fd] = action
        self.poller.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self.actions.pop(fd, None) is not None:
            self.poller.unregister(fd)

    def _watch_process(self, kept: Kept, pid: int, ended: Callable[[], None]) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:  # a kernel without it
            kept.due = boottime() + POLL_S
            return
        kept.watched.append(fd)
        self._watch(fd, ended)

    def _unwatch_processes(self, kept: Kept) -> None:
        for fd in kept.watched:
            self._unwatch(fd)
            os.close(fd)
        kept.watched = []

    def _forget_nodes(self, kept: Kept, *, close: bool = True) -> None:
        """Show no more life for a lease; ``close`` ends the connections that no lease needs."""
        for node in kept.record.nodes:
            key = node_key(node, kept.record.settings)
            if key in self.nodes.calls:
                self.nodes.leases[key].discard(kept.lease)
                if not self.nodes.leases[key]:
                    self.nodes.due.pop(key, None)
                    if close:
                        self.nodes.calls.pop(key).close()

    def _rewrite(self, kept: Kept, record: Record) -> None:
        kept.record = record
        write_file(f"{self.folder}/{record.lease}.json", json.dumps(record.plain()))


def boottime() -> float:
    """Return seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def log(words: str) -> None:
    """Write a line to the log."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
    sys.stderr.flush()


def main() -> None:
    """Run the keeper of the folder named by the first argument, as keeper.py starts it.

    fd 1 is a pipe to who started us: it gets ``ready``, also when another keeper runs already, or the reason why not.
    """
    folder = sys.argv[1]
    os.umask(0o077)
    os.chdir("/")
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write("gpuboard-keeper")  # what ps and top show
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    starter = os.dup(1)
    try:
        occupied = occupy(folder, patience_s=5.0)
        _write_log_to(f"{folder}/log")
    except (KeeperError, OSError) as error:
        os.write(starter, f"{error}\n".encode())
        sys.exit(1)
    os.write(starter, b"ready\n")
    os.close(starter)
    if occupied is None:
        return
    lock, listener = occupied
    try:
        Keeper(folder, listener).run()
    except Exception:
        log(traceback.format_exc())
    withdraw(folder)
    os.close(lock)


def _write_log_to(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if os.fstat(fd).st_size > _LOG_LIMIT:
        os.ftruncate(fd, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
