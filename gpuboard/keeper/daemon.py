"""The keeper: one small process per user and host that keeps that user's leases alive while their holders live.

It touches the claims every 30 s, watches the holders (a pidfd each), and when one has gone looks for processes that
carry its lease or run on its GPUs; when there are none (any more), it releases. It kills nothing. It ends a few
seconds after its last lease. Killed, it leaves its records, and the next gpuboard command starts another.
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

from gpuboard.keeper import processes
from gpuboard.keeper.calls import NodeAnswer
from gpuboard.keeper.heartbeats import Nodes, key_of
from gpuboard.keeper.holder import Holder, alive, read_process
from gpuboard.keeper.loop import KeeperLoop, boottime, log
from gpuboard.keeper.record import HolderLook, LeaseRecord, decode, files_of, judge, login_of
from gpuboard.keeper.runtime_dir import (
    KeeperError,
    RuntimeDir,
    connect,
    occupy,
    peer_pid,
    peer_uid,
    receive,
    send,
    write_file,
)
from gpuboard.keeper.timing import TIMING, KeeperTiming

_WATCHED = 32  # carriers watched for their end; of more, looking every few seconds is enough
_LOG_LIMIT = 1 << 20  # bytes


class Kept:
    """A lease in the keeper's hands."""

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record
        self.lease = record.lease
        self.watched: list[int] = []  # pidfds: of the holder, later of carriers
        self.client: Client | None = None  # who took it and has not told its owner yet
        self.unconfirmed: set[str] = set()  # nodes where no life has been shown yet
        self.phase = "held"  # "held" | "orphaned" | "releasing"
        self.since: float | None = None
        self.due: float | None = None  # the next look, or the next try to release
        self.asked: set[str] = set()  # nodes that have still to say who carries it, or to release
        self.found: bool | None = False
        self.tries = 0
        self.released_at = 0.0
        self.no_loss_until = 0.0


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


class Keeper:
    """What is kept, and what happens to it."""

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
        """Keep leases until there has been none for a while."""
        self._readopt()
        idle_since = boottime()
        while True:
            now = boottime()
            if self.kept or self.clients:
                idle_since = now
            elif now - idle_since >= self.timing.linger_s or not self.place.reachable:
                return
            self._hold_place()
            self.nodes.touch(now)
            self._timers(now)
            dues = [kept.due for kept in self.kept.values() if kept.due is not None]
            dues += [self.nodes.next_due(), idle_since + self.timing.linger_s, now + self.timing.place_s]
            self.loop.wait(min(dues) - boottime())

    # --- where commands find us

    def _listen(self) -> None:
        self.place.listener.setblocking(False)
        self.loop.watch(self.place.listener.fileno(), self._accept)

    def _hold_place(self) -> None:
        """Stay where commands look for us, for folder, lock or socket may have been removed or replaced.

        What we keep is in our memory: it is written again, or handed to the keeper that has our place by now.
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
                log("the folder, lock or socket was gone: restored")
                self._rewrite_all()
            else:
                self._hand_over()
            self.place_error = ""
        except (KeeperError, OSError, ValueError) as error:
            if str(error) != self.place_error:
                log(f"commands cannot find this keeper: {error}")
            self.place_error = str(error)
        self._listen()

    def _rewrite_all(self) -> None:
        for kept in self.kept.values():
            try:
                self._rewrite(kept, kept.record)
            except OSError as error:
                log(f"{kept.lease}.json: {error.strerror}")

    def _hand_over(self) -> None:
        """Let the keeper that has our place take all leases but those that are being taken or released right now."""
        leases = [kept for kept in self.kept.values() if kept.client is None and kept.phase != "releasing"]
        connection = connect(self.folder) if leases else None
        if connection is None:
            return
        with connection:
            if peer_pid(connection) == os.getpid():
                return  # the other one has the lock and not yet the socket
            for kept in leases:
                self._rewrite(kept, kept.record)
            send(connection, {"op": "readopt"})
            if receive(connection, 1.0) != {"ok": True}:
                return
            for kept in leases:
                log(f"{kept.lease}: handed to the keeper with pid {peer_pid(connection)}")
                self._let_go(kept)

    # --- talking to commands

    def _accept(self) -> None:
        try:
            connection, _ = self.place.listener.accept()
        except OSError:
            return  # whoever knocked has gone again
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.settimeout(1.0)
        client = Client(connection)
        self.clients.add(client)
        self.loop.watch(connection.fileno(), partial(self._hear, client))

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
        self.loop.unwatch(client.connection.fileno())
        client.connection.close()
        self.clients.discard(client)
        for kept in list(self.kept.values()):
            if kept.client is client:
                kept.client = None
                self._unknown(kept)

    def _obey(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line)
            op = message["op"]
            self._hold_place()
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
                self._prolong(kept, float(message["for_s"]))
            elif op == "known" and kept is not None:
                self._known(kept)
            elif op == "job":
                if kept is None:
                    raise ValueError(f"no lease {message['lease']} is kept here")
                self._started(kept, int(message["number"]), float(message["for_s"]))
            elif op == "ending" and kept is not None:
                kept.no_loss_until = boottime() + self.timing.own_end_s
            elif op == "forget" and kept is not None:
                self._end(kept, "given back")
            client.reply()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            client.reply(f"not understood: {error!r}")
        except OSError as error:
            client.reply(f"{self.folder}: {error.strerror}")

    def _known(self, kept: Kept) -> None:
        """From now on the lease lives with its holder alone."""
        kept.client = None
        job = kept.record.job
        if job is not None:
            self._rewrite(kept, kept.record._replace(job=job._replace(taker=None)))

    def _started(self, kept: Kept, number: int, for_s: float) -> None:
        """The lease's job has a number, and ends ``for_s`` from now."""
        record = kept.record
        if record.job is None or kept.phase == "releasing":
            raise ValueError(f"lease {record.lease} is no job, or is being given back")
        for node in record.nodes:
            self.nodes.detach(record, node)
        self._rewrite(kept, record._replace(until=boottime() + for_s, job=record.job._replace(number=number)))
        for node in record.nodes:
            self.nodes.attach(kept.record, node)
        self._close_unused()

    def _prolong(self, kept: Kept, for_s: float) -> None:
        self._rewrite(kept, kept.record._replace(until=boottime() + for_s))
        for node in kept.record.nodes:
            self.nodes.attach(kept.record, node)

    def _adopt(self, client: Client, record: LeaseRecord) -> None:
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
        """Take the leases of a keeper that was killed, or that hands them to us."""
        for name in sorted(os.listdir(self.folder)):
            if not name.endswith(".json") or name[:-5] in self.kept:
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
            self.nodes.attach(record, node)
        taker = record.job and record.job.taker
        if taker is not None and kept.client is None:  # the keeper that had its connection was killed
            self._watch_process(kept, taker.pid)
            if not alive(taker):
                self._unknown(kept)
                return
        if record.holder is not None:
            self._watch_process(kept, record.holder.pid)
            if not alive(record.holder):  # looked at after the pidfd was opened: it is the holder's or a stranger's
                self._process_ended(kept)

    def _touched(self, name: str, leases: list[str], answer: NodeAnswer) -> None:
        for kept in [self.kept[lease] for lease in leases if lease in self.kept]:
            if kept.phase == "releasing":
                continue
            if answer.kind:
                if name in kept.unconfirmed:
                    self._disown(kept, f"{name}: {answer.words}")
            elif kept.lease not in answer.value["alive"]:
                lapsed = kept.lease in answer.value["lapsed"]
                self._gone(kept, name, lapsed=lapsed, why=str(answer.value.get("words", "")))
            elif name in kept.unconfirmed:
                kept.unconfirmed.discard(name)
                if not kept.unconfirmed and kept.client is not None:
                    kept.client.reply()

    def _gone(self, kept: Kept, name: str, *, lapsed: bool, why: str) -> None:
        """A node has no living claim of the lease any more; it is kept on the others. ``why``: a scheduler's words."""
        record = kept.record
        if kept.unconfirmed:
            self._disown(kept, f"{name}: the claims of lease {kept.lease} have {'lapsed' if lapsed else 'gone'}")
            return
        words = ""
        if why and not lapsed:
            words = f"has ended: of {name} job {record.job and record.job.number}: {why}"
        elif lapsed and not why and boottime() + self.timing.ending_s < record.until:
            words = f"has lapsed on {name}: its keeper could show no life there for 90 s"
        elif not lapsed:
            words = f"is gone from {name}: released elsewhere, or its claim was removed"
        if words and boottime() >= kept.no_loss_until:
            tell_of_loss(self.folder, f"lease {kept.lease} {words}")
        rest = [node for node in record.nodes if node.name != name]
        if not rest:
            self._end(kept, why or ("its time is up" if lapsed else "released"))
            return
        for node in record.nodes:
            if node.name == name:
                self.nodes.detach(record, node)
        kept.record = record._replace(nodes=rest)
        with suppress(OSError):  # a disk that is full: a keeper after us finds the claim missing there
            self._rewrite(kept, kept.record)

    # --- the end of a lease

    def _unknown(self, kept: Kept) -> None:
        log(f"{kept.lease}: the command that took it has ended before anybody knew of it")
        self._release(kept)

    def _process_ended(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        if kept.phase == "held" and kept.record.job is not None and _lives(kept.record.holder):
            self._taker_ended(kept)
            return
        if kept.phase == "held":
            log(f"{kept.lease}: its holder has ended")
            kept.phase = "orphaned"
        if kept.phase == "orphaned" and not kept.asked:
            self._look(kept)

    def _taker_ended(self, kept: Kept) -> None:
        """It was the command that took the lease that has ended, not the holder."""
        job = kept.record.job
        if job is not None and job.taker is not None and not alive(job.taker):
            self._unknown(kept)
        elif kept.record.holder is not None:
            self._watch_process(kept, kept.record.holder.pid)

    def _look(self, kept: Kept) -> None:
        """Look whether anything carries the lease: on this host first, which is quick, then on its nodes."""
        kept.due = None
        pids = processes.carriers(kept.lease)
        if pids:
            for pid in pids[:_WATCHED]:
                self._watch_process(kept, pid)
            self._judge(kept, carried=True)
            return
        kept.found = False
        kept.asked = {node.name for node in kept.record.nodes}
        for node in kept.record.nodes:
            args = {"lease": kept.lease, "uuids": node.uuids}
            self.nodes.call(kept.record, node, "read", {}, partial(self._read, kept, node.name))
            self.nodes.call(kept.record, node, "carriers", args, partial(self._looked, kept, node.name))

    def _read(self, kept: Kept, name: str, answer: NodeAnswer) -> None:
        """A reading of the GPUs goes before the question who runs on them; without one nobody knows."""
        if answer.kind and name in kept.asked:
            log(f"{kept.lease}: {name}: {answer.words}")
            kept.found = kept.found or None

    def _looked(self, kept: Kept, name: str, answer: NodeAnswer) -> None:
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
        verdict = judge(HolderLook(carried, left), kept.since, now, self.timing)
        kept.since = verdict.since
        kept.due = now + verdict.again_s
        if verdict.release:
            self._release(kept)

    def _release(self, kept: Kept) -> None:
        self._unwatch_processes(kept)
        for node in kept.record.nodes:
            self.nodes.detach(kept.record, node)
        kept.phase = "releasing"
        kept.released_at = boottime()
        kept.asked = {node.name for node in kept.record.nodes}
        self._try_release(kept)

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
            log(f"{kept.lease}: not released on {name}: {answer.words}")
        # Claims lapse; a job would hold its GPUs until its time limit.
        tried_s = boottime() - kept.released_at
        late = tried_s > self.timing.release_s and (kept.record.job is None or boottime() > kept.record.until)
        if kept.lease in self.kept and (late or not kept.asked):
            self._end(kept, "released" if not kept.asked else "left to lapse")

    def _disown(self, kept: Kept, words: str) -> None:
        """Refuse a lease that was handed to us; whoever took the claims drops them."""
        self._drop(kept, f"refused: {words}")
        if kept.client is not None:
            kept.client.reply(words)

    def _end(self, kept: Kept, words: str) -> None:
        """Let go of a lease that has ended, and of the rank map that `allocate` wrote for it."""
        self._drop(kept, words, files_of(kept.record, os.path.dirname(os.path.dirname(self.folder))))

    def _drop(self, kept: Kept, words: str, files: Sequence[str] = ()) -> None:
        log(f"{kept.lease}: {words}")
        self._let_go(kept)
        for path in files:
            with suppress(OSError):  # only a lease that was allocated whole has all of them
                os.unlink(path)
        try:
            os.unlink(f"{self.folder}/{kept.lease}.json")
        except OSError as error:
            log(f"{kept.lease}.json: {error.strerror}")

    def _let_go(self, kept: Kept) -> None:
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
        write_file(f"{self.folder}/{record.lease}.json", json.dumps(record.plain()))


def tell_of_loss(folder: str, words: str) -> None:
    """Leave words that the next gpuboard command shows: whole at once, for it takes away what it finds."""
    log(words)
    path, told = f"{folder}/lost", ""
    try:
        with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            told = file.read()
        write_file(path, f"{told}{words}\n")
    except OSError as error:
        log(f"lost: {error.strerror}")


def _lives(holder: Holder | None) -> bool:
    return holder is None or bool(alive(holder))


def main() -> None:
    """Run the keeper of the folder named by the first argument, as keeper/client.py starts it.

    A second argument is a KeeperTiming as a JSON object of the values that differ.

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
        place = occupy(folder, patience_s=5.0)
        _write_log_to(f"{folder}/log")
    except (KeeperError, OSError) as error:
        _tell(starter, str(error))
        sys.exit(1)
    _tell(starter, "ready")
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


def _tell(starter: int, words: str) -> None:
    with suppress(OSError):  # who started us need not wait
        os.write(starter, f"{words}\n".encode())
    os.close(starter)


def _write_log_to(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    if os.fstat(fd).st_size > _LOG_LIMIT:
        os.ftruncate(fd, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
