"""The keeper: one small process per user and host that renews that user's leases while their holders are alive.

It sends heartbeats to the claims every 30 s and watches the holders (a pidfd each). When a holder has ended, it looks
for carriers, which are processes that carry the lease or run on its GPUs, and releases the lease when there are none.
It kills nothing. It ends a few seconds after its last lease. If it is killed, its records remain, and the next gpuboard
command starts another keeper.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from gpuboard.agent.proc import read_process
from gpuboard.files import write_private
from gpuboard.keeper import processes
from gpuboard.keeper.daemon.calls import NodeAnswer
from gpuboard.keeper.daemon.heartbeats import Nodes, key_of
from gpuboard.keeper.daemon.loop import KeeperLoop, boottime, log
from gpuboard.keeper.holder import alive
from gpuboard.keeper.record import HolderLook, LeaseRecord, decide, decode, files_of, login_of
from gpuboard.keeper.runtime_dir import (
    KeeperError,
    RuntimeDir,
    acquire,
    connect,
    peer_pid,
    peer_uid,
    receive,
    send,
)
from gpuboard.keeper.timing import TIMING, KeeperTiming

_WATCHED = 32  # carriers watched by pidfd at most; polling every few seconds covers the others
_LOG_LIMIT = 1 << 20  # bytes


class Kept:
    """A lease that this keeper has, and its state."""

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record
        self.lease = record.lease
        self.watched: list[int] = []  # pidfds: of the holder, later of carriers
        self.client: Client | None = None  # the command that reserved it, until the owner has it
        self.unconfirmed: set[str] = set()  # nodes without a first heartbeat
        self.phase: Literal["held", "orphaned", "releasing"] = "held"  # orphaned: the holder has ended
        self.since: float | None = None  # since when nothing carries it
        self.due: float | None = None  # when to look for carriers, or to retry the release
        self.asked: set[str] = set()  # nodes that have not answered about carriers, or released, yet
        self.found: bool | None = False  # carriers on a node; None: a node gave no answer
        self.tries = 0
        self.released_at = 0.0
        self.no_loss_until = 0.0


class Client:
    """A gpuboard command that is connected."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = b""

    def reply(self, error: str = "") -> None:
        """Confirm a request, or send why it failed."""
        try:
            send(self.connection, {"error": error} if error else {"ok": True})
        except OSError:
            log("a command disconnected before it was answered")


class Keeper:
    """All leases of this keeper, and the events that change them."""

    def __init__(self, folder: str, place: RuntimeDir, timing: KeeperTiming = TIMING) -> None:
        self.folder = folder
        self.timing = timing
        self.place = place
        self.place_error = ""
        self.loop = KeeperLoop()
        self.kept: dict[str, Kept] = {}
        self.nodes = Nodes(self.loop, self._touched, timing)
        self.clients: set[Client] = set()
        self._listen()

    def run(self) -> None:
        """Run until there has been no lease for ``linger_s``."""
        self._readopt()
        idle_since = boottime()
        while True:
            now = boottime()
            if self.kept or self.clients:
                idle_since = now
            elif now - idle_since >= self.timing.linger_s or not self.place.reachable:
                return
            self._ensure_reachable()
            self.nodes.touch(now)
            self._timers(now)
            dues = [kept.due for kept in self.kept.values() if kept.due is not None]
            dues += [self.nodes.next_due(), idle_since + self.timing.linger_s, now + self.timing.place_s]
            self.loop.wait(min(dues) - boottime())

    # --- lock and socket

    def _listen(self) -> None:
        self.place.listener.setblocking(False)
        self.loop.watch(self.place.listener.fileno(), self._accept)

    def _ensure_reachable(self) -> None:
        """Restore folder, lock and socket if they were removed or replaced.

        The leases are in memory: their records are rewritten, or handed to the keeper that has the lock now.
        """
        if self.place.reachable:
            return
        self.loop.unwatch(self.place.listener.fileno())
        try:
            place = self.place.restore()
            if place is not None:
                self.place = place
                with suppress(OSError):
                    _write_log_to(f"{self.folder}/log")
                log("folder, lock or socket was missing: restored")
                self._rewrite_all()
            else:
                self._hand_over()
            self.place_error = ""
        except (KeeperError, OSError, ValueError) as error:
            if str(error) != self.place_error:
                log(f"cannot restore folder, lock and socket: {error}")
            self.place_error = str(error)
        self._listen()

    def _rewrite_all(self) -> None:
        for kept in self.kept.values():
            try:
                self._rewrite(kept, kept.record)
            except OSError as error:
                log(f"{kept.lease}.json: {error.strerror}")

    def _hand_over(self) -> None:
        """Hand all leases but those being reserved or released to the keeper that has the lock now."""
        leases = [kept for kept in self.kept.values() if kept.client is None and kept.phase != "releasing"]
        connection = connect(self.folder) if leases else None
        if connection is None:
            return
        with connection:
            if peer_pid(connection) == os.getpid():
                return  # the other keeper has the lock but not the socket yet
            for kept in leases:
                self._rewrite(kept, kept.record)
            send(connection, {"op": "readopt"})
            if receive(connection, 1.0) != {"ok": True}:
                return
            for kept in leases:
                log(f"{kept.lease}: handed to the keeper with pid {peer_pid(connection)}")
                self._detach(kept)

    # --- requests of commands

    def _accept(self) -> None:
        try:
            connection, _ = self.place.listener.accept()
        except OSError:
            return  # the client has disconnected
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.settimeout(1.0)
        client = Client(connection)
        self.clients.add(client)
        self.loop.watch(connection.fileno(), partial(self._receive, client))

    def _receive(self, client: Client) -> None:
        try:
            data = client.connection.recv(65536)
        except OSError:
            data = b""
        client.data += data
        if not data or len(client.data) > 1 << 20:
            self._disconnect(client)
            return
        *lines, client.data = client.data.split(b"\n")
        for line in lines:
            self._handle(client, line)

    def _disconnect(self, client: Client) -> None:
        self.loop.unwatch(client.connection.fileno())
        client.connection.close()
        self.clients.discard(client)
        for kept in list(self.kept.values()):
            if kept.client is client:
                kept.client = None
                self._release_unconfirmed(kept)

    def _handle(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line)
            op = message["op"]
            self._ensure_reachable()
            if op == "readopt":
                self._readopt()
                client.reply()
                return
            if op == "adopt":
                self.nodes.logins.add(login_of(message.get("login", {})))
                self._adopt(client, decode(message["record"]))
                return
            kept = self.kept.get(str(message["lease"]))
            if op == "renew" and kept is not None:
                self._renew(kept, float(message["for_s"]))
            elif op == "known" and kept is not None:
                self._confirm(kept, client)
            elif op == "job":
                if kept is None:
                    raise ValueError(f"this keeper has no lease {message['lease']}")
                self._set_job(kept, int(message["number"]), float(message["for_s"]))
            elif op == "ending" and kept is not None:
                kept.no_loss_until = boottime() + self.timing.own_end_s
            elif op == "forget" and kept is not None:
                self._end(kept, "released by its owner")
            client.reply()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            client.reply(f"invalid request: {error!r}")
        except OSError as error:
            client.reply(f"{self.folder}: {error.strerror}")

    def _confirm(self, kept: Kept, client: Client) -> None:
        """The owner has the lease: from now on only its holder determines when it ends."""
        if kept.client is client:
            kept.client = None
        job = kept.record.job
        if job is not None:
            self._rewrite(kept, kept.record._replace(job=job._replace(taker=None)))

    def _set_job(self, kept: Kept, number: int, for_s: float) -> None:
        """Note the number of the lease's job, which ends ``for_s`` from now."""
        record = kept.record
        if record.job is None or kept.phase == "releasing":
            raise ValueError(f"lease {record.lease} is not a job, or is being released")
        for node in record.nodes:
            self.nodes.detach(record, node)
        self._rewrite(kept, record._replace(until=boottime() + for_s, job=record.job._replace(number=number)))
        for node in record.nodes:
            self.nodes.attach(kept.record, node)
        self._close_unused()

    def _renew(self, kept: Kept, for_s: float) -> None:
        self._rewrite(kept, kept.record._replace(until=boottime() + for_s))
        for node in kept.record.nodes:
            self.nodes.attach(kept.record, node)

    def _adopt(self, client: Client, record: LeaseRecord) -> None:
        if record.holder is not None and not alive(record.holder):
            client.reply(f"the holder of lease {record.lease}, pid {record.holder.pid}, has ended")
            return
        known = self.kept.get(record.lease)
        if known is not None and record.shared:
            if known.record.shared:
                self._rewrite(known, known.record.with_run(record))
                for node in known.record.nodes:
                    self.nodes.attach(known.record, node)
            client.reply()  # else this keeper has the lease itself, for as long as processes carry it
            return
        if known is not None:
            self._remove(known, "handed over again")
        record = _of_holder(record)
        kept = Kept(record)
        self._rewrite(kept, record)
        kept.client = client
        kept.unconfirmed = {node.name for node in record.nodes}
        self._keep(kept)

    # --- heartbeats

    def _readopt(self) -> None:
        """Take over the leases whose records another keeper left or handed to this one."""
        for name in sorted(os.listdir(self.folder)):
            if not name.endswith(".json") or name[:-5] in self.kept:
                continue
            path = f"{self.folder}/{name}"
            try:
                with open(path, encoding="utf-8") as file:
                    self._keep(Kept(decode(json.load(file))))
                log(f"{name[:-5]}: taken over")
            except (ValueError, OSError) as error:
                log(f"{name}: unreadable, renamed to {name}.bad: {error}")
                os.replace(path, path + ".bad")

    def _keep(self, kept: Kept) -> None:
        record = kept.record
        self.kept[record.lease] = kept
        for node in record.nodes:
            self.nodes.attach(record, node)
        taker = record.job and record.job.taker
        if taker is not None and kept.client is None:  # the keeper that had the command's connection was killed
            self._watch_process(kept, taker.pid)
            if not alive(taker):
                self._release_unconfirmed(kept)
                return
        if record.holder is not None:
            self._watch_process(kept, record.holder.pid)
            if not alive(record.holder):  # checked after the pidfd was opened, which may be another process of that pid
                self._process_ended(kept)

    def _touched(self, name: str, leases: list[str], answer: NodeAnswer) -> None:
        for kept in [self.kept[lease] for lease in leases if lease in self.kept]:
            if kept.phase == "releasing":
                continue
            if answer.kind:
                if name in kept.unconfirmed:
                    self._refuse(kept, f"{name}: {answer.message}")
            elif kept.lease not in answer.value["alive"]:
                expired = kept.lease in answer.value["lapsed"]
                self._claims_ended(kept, name, expired=expired, why=str(answer.value.get("words", "")))
            elif name in kept.unconfirmed:
                kept.unconfirmed.discard(name)
                if not kept.unconfirmed and kept.client is not None:
                    kept.client.reply()

    def _claims_ended(self, kept: Kept, name: str, *, expired: bool, why: str) -> None:
        """A node has no live claim of the lease any more; it continues on the others. ``why``: a scheduler's reason."""
        record = kept.record
        if kept.unconfirmed:
            self._refuse(
                kept, f"{name}: the claims of lease {kept.lease} {'have expired' if expired else 'do not exist'}"
            )
            return
        loss = ""
        if why and not expired:
            loss = f"ended: {name} job {record.job and record.job.number}: {why}"
        elif expired and not why and boottime() + self.timing.ending_s < record.until:
            loss = f"expired on {name}: no heartbeat from its keeper for 90 s"
        elif not expired:
            loss = f"ended on {name}: released elsewhere, or its claim was removed"
        if loss and boottime() >= kept.no_loss_until and not record.shared:
            record_loss(self.folder, f"lease {kept.lease} {loss}")
        rest = [node for node in record.nodes if node.name != name]
        if not rest:
            self._end(kept, why or ("its end time has passed" if expired else "released"))
            return
        for node in record.nodes:
            if node.name == name:
                self.nodes.detach(record, node)
        kept.record = record._replace(nodes=rest)
        with suppress(OSError):  # a full disk: a successor finds the claim missing on that node
            self._rewrite(kept, kept.record)

    # --- the end of a lease

    def _release_unconfirmed(self, kept: Kept) -> None:
        log(f"{kept.lease}: the command that reserved it ended before it handed it over")
        self._release(kept)

    def _process_ended(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        holder = kept.record.holder
        if kept.phase == "held" and kept.record.job is not None and (holder is None or alive(holder)):
            self._command_ended(kept)
            return
        if kept.phase == "held":
            log(f"{kept.lease}: its holder has ended")
            kept.phase = "orphaned"
        if kept.phase == "orphaned" and not kept.asked:
            self._look(kept)

    def _command_ended(self, kept: Kept) -> None:
        """The process that ended is the command that reserved the lease, not the holder."""
        job = kept.record.job
        if job is not None and job.taker is not None and not alive(job.taker):
            self._release_unconfirmed(kept)
        elif kept.record.holder is not None:
            self._watch_process(kept, kept.record.holder.pid)

    def _look(self, kept: Kept) -> None:
        """Look for carriers of the lease: on this host first, which is fast, then on its nodes."""
        kept.due = None
        pids = processes.carriers(kept.lease)
        if pids:
            for pid in pids[:_WATCHED]:
                self._watch_process(kept, pid)
            self._decide(kept, carried=True)
            return
        kept.found = False
        kept.asked = {node.name for node in kept.record.nodes}
        for node in kept.record.nodes:
            args = {"lease": kept.lease, "uuids": node.uuids}
            self.nodes.call(kept.record, node, "read", {}, partial(self._read, kept, node.name))
            self.nodes.call(kept.record, node, "carriers", args, partial(self._carriers_read, kept, node.name))

    def _read(self, kept: Kept, name: str, answer: NodeAnswer) -> None:
        """A node reads its GPUs before it lists who runs on them; without a reading that is unknown."""
        if answer.kind and name in kept.asked:
            log(f"{kept.lease}: {name}: {answer.message}")
            kept.found = kept.found or None

    def _carriers_read(self, kept: Kept, name: str, answer: NodeAnswer) -> None:
        if kept.lease not in self.kept or name not in kept.asked or kept.phase != "orphaned":
            return
        kept.asked.discard(name)
        if answer.kind:
            log(f"{kept.lease}: {name}: cannot look for carriers: {answer.message}")
            kept.found = kept.found or None
        elif answer.value["processes"]:
            kept.found = True
        if not kept.asked:
            self._decide(kept, carried=kept.found)

    def _decide(self, kept: Kept, carried: bool | None) -> None:
        record = kept.record
        orphans = not carried and bool(processes.orphans(record.session, record.group, record.created))
        now = boottime()
        decision = decide(HolderLook(carried, orphans), kept.since, now, self.timing)
        kept.since = decision.since
        kept.due = now + decision.again_s
        if decision.release:
            self._release(kept)

    def _release(self, kept: Kept) -> None:
        if kept.record.shared:
            self._leave(kept)
            return
        self._unwatch_processes(kept)
        for node in kept.record.nodes:
            self.nodes.detach(kept.record, node)
        kept.phase = "releasing"
        kept.released_at = boottime()
        kept.asked = {node.name for node in kept.record.nodes}
        self._try_release(kept)

    def _leave(self, kept: Kept) -> None:
        """Leave a shared lease to its own keeper, once no other run of this host uses it."""
        runs = tuple(holder for holder in kept.record.others if alive(holder))
        if not runs:
            self._remove(kept, "left to its own keeper")
            return
        log(f"{kept.lease}: still used by pid {runs[0].pid}")
        self._unwatch_processes(kept)
        kept.phase, kept.since, kept.due = "held", None, None
        self._rewrite(kept, _of_holder(kept.record._replace(holder=runs[0], others=runs[1:])))
        self._watch_process(kept, runs[0].pid)
        if not alive(runs[0]):
            self._process_ended(kept)

    def _try_release(self, kept: Kept) -> None:
        kept.tries += 1
        kept.due = boottime() + self.timing.retry_after_s(kept.tries)
        for node in kept.record.nodes:
            if node.name in kept.asked:
                args = {"lease": kept.lease}
                self.nodes.call(kept.record, node, "release", args, partial(self._released, kept, node.name))

    def _released(self, kept: Kept, name: str, answer: NodeAnswer) -> None:
        if answer.kind in {"", "not-found", "not-yours"}:
            kept.asked.discard(name)
        else:
            log(f"{kept.lease}: not released on {name}: {answer.message}")
        # Claims expire; a job would hold its GPUs until its time limit.
        tried_s = boottime() - kept.released_at
        late = tried_s > self.timing.release_s and (kept.record.job is None or boottime() > kept.record.until)
        if kept.lease in self.kept and (late or not kept.asked):
            self._end(kept, "released" if not kept.asked else "left to expire")

    def _refuse(self, kept: Kept, reason: str) -> None:
        """Refuse a lease that was handed over; the command that claimed the GPUs releases them."""
        self._remove(kept, f"refused: {reason}")
        if kept.client is not None:
            kept.client.reply(reason)

    def _end(self, kept: Kept, reason: str) -> None:
        """Remove a lease that has ended, and the rank map that `allocate` wrote for it."""
        self._remove(kept, reason, files_of(kept.record, os.path.dirname(os.path.dirname(self.folder))))

    def _remove(self, kept: Kept, reason: str, files: Sequence[str] = ()) -> None:
        log(f"{kept.lease}: {reason}")
        self._detach(kept)
        for path in files:
            with suppress(OSError):  # only a completely allocated lease has all of them
                os.unlink(path)
        try:
            os.unlink(f"{self.folder}/{kept.lease}.json")
        except OSError as error:
            log(f"{kept.lease}.json: {error.strerror}")

    def _detach(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        self.kept.pop(kept.lease, None)
        for node in kept.record.nodes:
            self.nodes.detach(kept.record, node)
        self._close_unused()

    def _close_unused(self) -> None:
        self.nodes.close({key_of(kept.record, node) for kept in self.kept.values() for node in kept.record.nodes})

    def _timers(self, now: float) -> None:
        for kept in list(self.kept.values()):
            if kept.due is None or kept.due > now:
                continue
            if kept.phase == "releasing":
                self._try_release(kept)
            elif kept.phase == "orphaned":
                self._unwatch_processes(kept)
                self._look(kept)
            elif kept.record.holder is not None and not alive(kept.record.holder):
                self._process_ended(kept)
            else:
                kept.due = now + self.timing.no_pidfd_s

    def _watch_process(self, kept: Kept, pid: int) -> None:
        fd = self.loop.watch_process(pid, partial(self._process_ended, kept))
        if fd is not None:
            kept.watched.append(fd)
        elif kept.phase == "held":
            kept.due = boottime() + self.timing.no_pidfd_s

    def _unwatch_processes(self, kept: Kept) -> None:
        for fd in kept.watched:
            self.loop.unwatch(fd)
            os.close(fd)
        kept.watched = []

    def _rewrite(self, kept: Kept, record: LeaseRecord) -> None:
        kept.record = record
        write_private(f"{self.folder}/{record.lease}.json", json.dumps(record.plain()).encode())


def _of_holder(record: LeaseRecord) -> LeaseRecord:
    """Return ``record`` with the session and process group of its holder, as far as there is one."""
    process = read_process(record.holder.pid) if record.holder else None
    return record if process is None else record._replace(session=process.session, group=process.group)


def record_loss(folder: str, message: str) -> None:
    """Append a message that the next gpuboard command shows. The file is replaced, as commands remove it to read it."""
    log(message)
    path, before = f"{folder}/lost", ""
    try:
        with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            before = file.read()
        write_private(path, f"{before}{message}\n".encode())
    except OSError as error:
        log(f"lost: {error.strerror}")


def main() -> None:
    """Run the keeper of the folder named by the first argument, as keeper/client.py starts it.

    A second argument is a KeeperTiming as a JSON object of the values that differ.

    fd 1 is a pipe to the command that started it, and gets ``ready`` (also if another keeper is running) or an error.
    """
    folder = sys.argv[1]
    os.umask(0o077)
    os.chdir("/")
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write("gpuboard-keeper")  # what ps and top show
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    report = os.dup(1)
    try:
        place = acquire(folder, timeout_s=5.0)
        _write_log_to(f"{folder}/log")
    except (KeeperError, OSError) as error:
        _report(report, str(error))
        sys.exit(1)
    _report(report, "ready")
    if place is None:
        return
    timing = TIMING._replace(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else TIMING
    keeper = Keeper(folder, place, timing)
    try:
        keeper.run()
    except Exception:
        import traceback  # late: 4 ms of every start

        log(traceback.format_exc())
    keeper.place.close()


def _report(pipe: int, message: str) -> None:
    with suppress(OSError):  # the command may have ended
        os.write(pipe, f"{message}\n".encode())
    os.close(pipe)


def _write_log_to(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if os.fstat(fd).st_size > _LOG_LIMIT:
        os.ftruncate(fd, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
