"""One lease that the keeper has, from its handover to its end.

held: heartbeats go to its nodes, and its holder is watched. orphaned: the holder has ended, and processes that carry
the lease are looked for, on this host and on its nodes. releasing: there are none, and the nodes are asked to remove
their claims until they answer. At the end the lease is removed with its record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from gpuboard.agent.proc import read_process
from gpuboard.files import write_private
from gpuboard.keeper import processes
from gpuboard.keeper.daemon.calls import NodeAnswer
from gpuboard.keeper.daemon.commands import ConnectedCommand
from gpuboard.keeper.daemon.heartbeats import Nodes
from gpuboard.keeper.daemon.loop import KeeperLoop, boottime, log
from gpuboard.keeper.holder import alive
from gpuboard.keeper.record import HolderLook, KeptNode, LeaseRecord, decide, files_of
from gpuboard.keeper.timing import KeeperTiming

_WATCHED = 32  # carriers watched by pidfd at most; polling every few seconds covers the others


class KeeperContext(NamedTuple):
    """What all leases of a keeper use. ``ended`` is called with each lease that the keeper no longer has."""

    folder: str
    loop: KeeperLoop
    nodes: Nodes
    timing: KeeperTiming
    ended: Callable[[KeptLease], None]


class KeptLease:
    """A lease, and the events that change it. Methods that write its record raise OSError."""

    def __init__(self, record: LeaseRecord, context: KeeperContext, command: ConnectedCommand | None = None) -> None:
        """``command``: the one that reserved it and has not confirmed it yet."""
        self._folder, self._loop, self._nodes, self._timing, self._ended = context
        self.record = record
        self.id = record.lease
        self.command = command
        self.unconfirmed = {node.name for node in record.nodes} if command else set()  # without a first heartbeat
        self.phase: Literal["held", "orphaned", "releasing"] = "held"
        self.gone = False
        self.asked: set[str] = set()  # nodes that have not answered about carriers, or released, yet
        self.no_loss_until = 0.0
        self._watched: list[int] = []  # pidfds: of the holder, later of carriers
        self._found: bool | None = False  # carriers on a node; None: a node gave no answer
        self._since: float | None = None  # since when nothing carries it
        self.due: float | None = None  # when to call :meth:`check`
        self._tries = 0
        self._released_at = 0.0

    def start(self) -> None:
        """Start heartbeats, and watch the processes that it depends on."""
        record = self.record
        for node in record.nodes:
            self._nodes.attach(record, node)
        taker = record.job and record.job.taker
        if taker is not None and self.command is None:  # the keeper that had the command's connection was killed
            self._watch_process(taker.pid)
            if not alive(taker):
                self.release_unconfirmed()
                return
        if record.holder is not None:
            self._watch_process(record.holder.pid)
            if not alive(record.holder):  # checked after the pidfd was opened, which may be another process of that pid
                self._process_ended()

    def check(self) -> None:
        """Do what is due: release it, look for carriers, or look at the holder where there is no pidfd."""
        if self.phase == "releasing":
            self._try_release()
        elif self.phase == "orphaned":
            self._unwatch_processes()
            self._look()
        elif self.record.holder is not None and not alive(self.record.holder):
            self._process_ended()
        else:
            self.due = boottime() + self._timing.no_pidfd_s

    # --- requests of commands

    def confirm(self, command: ConnectedCommand) -> None:
        """The owner has the lease: from now on only its holder determines when it ends."""
        if self.command is command:
            self.command = None
        job = self.record.job
        if job is not None:
            self.rewrite(self.record._replace(job=job._replace(taker=None)))

    def set_job(self, number: int, for_s: float) -> None:
        """Note the number of the lease's job, which ends ``for_s`` from now."""
        record = self.record
        if record.job is None or self.phase == "releasing":
            raise ValueError(f"lease {record.lease} is not a job, or is being released")
        for node in record.nodes:
            self._nodes.detach(record, node)
        self._update(record._replace(until=boottime() + for_s, job=record.job._replace(number=number)))

    def renew(self, for_s: float) -> None:
        """Note that the lease now ends ``for_s`` from now."""
        self._update(self.record._replace(until=boottime() + for_s))

    def share(self, other: LeaseRecord) -> None:
        """Add another run of this host that uses the lease, which is another keeper's."""
        self._update(self.record.with_run(other))

    def _update(self, record: LeaseRecord) -> None:
        try:
            self.rewrite(record)
        finally:  # on a full disk heartbeats continue
            for node in record.nodes:
                self._nodes.attach(record, node)

    # --- heartbeats

    def touched(self, name: str, answer: NodeAnswer) -> None:
        """Take a node's answer to a heartbeat."""
        if self.phase == "releasing":
            return
        if answer.kind:
            if name in self.unconfirmed:
                self._refuse(name, f"{name}: {answer.message.removeprefix(f'{name}: ')}")
        elif why := answer.value.get("unread", {}).get(self.id):
            log(f"{self.id}: {name}: heartbeat failed: {why}")
            if name in self.unconfirmed:
                self._refuse(name, f"{name}: {why}")
        elif self.id not in answer.value["alive"]:
            expired = self.id in answer.value["lapsed"]
            self._claims_ended(name, expired=expired, why=str(answer.value.get("words", "")))
        elif lost := self._without_claim(name, answer.value.get("claims", {}).get(self.id)):
            self._claims_lost(name, lost)
        elif name in self.unconfirmed:
            self.unconfirmed.discard(name)
            if not self.unconfirmed and self.command is not None:
                self.command.reply()

    def _claims_ended(self, name: str, *, expired: bool, why: str) -> None:
        """A node has no live claim of the lease any more; it continues on the others. ``why``: a scheduler's reason."""
        record = self.record
        if self.unconfirmed:
            self._refuse(name, f"{name}: the claims of lease {self.id} {'have expired' if expired else 'do not exist'}")
            return
        loss = ""
        if why and not expired:
            loss = f"ended: {name} job {record.job and record.job.number}: {why}"
        elif expired and not why and boottime() + self._timing.ending_s < record.until:
            loss = f"expired on {name}: no heartbeat from its keeper for 90 s"
        elif not expired:
            loss = f"ended on {name}: released elsewhere, or its claim was removed"
        if loss:
            self._report_loss(loss)
        rest = [node for node in record.nodes if node.name != name]
        if not rest:
            self.end(why or ("its end time has passed" if expired else "released"))
            return
        for node in record.nodes:
            if node.name == name:
                self._nodes.detach(record, node)
        self._continue_on(rest)

    def _without_claim(self, name: str, claimed: Collection[str] | None) -> list[str]:
        """Return the GPUs of a node that are not among those ``claimed`` there; None: it has no claims, but a job."""
        if claimed is None or self.record.shared:
            return []
        uuids = [uuid for node in self.record.nodes if node.name == name for uuid in node.uuids]
        return [uuid for uuid in uuids if uuid not in claimed]

    def _claims_lost(self, name: str, lost: Collection[str]) -> None:
        """Some of the lease's claims on a node were removed; it continues with the others."""
        if self.unconfirmed:
            self._refuse(name, f"{name}: the claims of lease {self.id} on {', '.join(lost)} do not exist")
            return
        self._report_loss(f"lost {', '.join(lost)} on {name}: its claim was removed; it keeps its other GPUs")
        self._continue_on([node._replace(uuids=[u for u in node.uuids if u not in lost]) for node in self.record.nodes])

    def _report_loss(self, loss: str) -> None:
        if boottime() >= self.no_loss_until and not self.record.shared:
            record_loss(self._folder, f"lease {self.id} {loss}")

    def _continue_on(self, nodes: list[KeptNode]) -> None:
        self.record = self.record._replace(nodes=nodes)
        with suppress(OSError):  # a full disk: a successor detects the missing claims too
            self.rewrite(self.record)

    def _refuse(self, node: str, reason: str) -> None:
        """Refuse a lease that was handed over; the command that claimed the GPUs releases them."""
        self.remove(f"refused: {reason}")
        if self.command is not None:
            self.command.reply(reason, node)

    # --- its end

    def release_unconfirmed(self) -> None:
        """Release it: the command that reserved it has ended before it was the owner's."""
        log(f"{self.id}: the command that reserved it ended before it handed it over")
        self._release()

    def _process_ended(self) -> None:
        self._unwatch_processes()
        holder = self.record.holder
        if self.phase == "held" and self.record.job is not None and (holder is None or alive(holder)):
            self._command_ended()
            return
        if self.phase == "held":
            log(f"{self.id}: its holder has ended")
            self.phase = "orphaned"
            if self.unconfirmed and self.command is not None and holder is not None:
                self.command.reply(f"the holder of lease {self.id}, pid {holder.pid}, has ended")
                self.command = None
                self.unconfirmed.clear()
                self._release()  # no process can carry it yet
                return
        if self.phase == "orphaned" and not self.asked:
            self._look()

    def _command_ended(self) -> None:
        """The process that ended is the command that reserved the lease, not the holder."""
        job = self.record.job
        if job is not None and job.taker is not None and not alive(job.taker):
            self.release_unconfirmed()
        elif self.record.holder is not None:
            self._watch_process(self.record.holder.pid)

    def _look(self) -> None:
        """Look for carriers of the lease: on this host first, which is fast, then on its nodes."""
        self.due = None
        pids = processes.carriers(self.id)
        if pids:
            for pid in pids[:_WATCHED]:
                self._watch_process(pid)
            self._decide(carried=True)
            return
        self._found = False
        self.asked = {node.name for node in self.record.nodes}
        for node in self.record.nodes:
            args = {"lease": self.id, "uuids": node.uuids}
            self._nodes.call(self.record, node, "read", {}, partial(self._read, node.name))
            self._nodes.call(self.record, node, "carriers", args, partial(self._carriers_read, node.name))

    def _read(self, name: str, answer: NodeAnswer) -> None:
        """A node reads its GPUs before it lists who runs on them; without a reading that is unknown."""
        if answer.kind and name in self.asked:
            log(f"{self.id}: {name}: {answer.message}")
            self._found = self._found or None

    def _carriers_read(self, name: str, answer: NodeAnswer) -> None:
        if self.gone or name not in self.asked or self.phase != "orphaned":
            return
        self.asked.discard(name)
        if answer.kind:
            log(f"{self.id}: {name}: cannot look for carriers: {answer.message}")
            self._found = self._found or None
        elif answer.value["processes"]:
            self._found = True
        if not self.asked:
            self._decide(carried=self._found)

    def _decide(self, carried: bool | None) -> None:
        record = self.record
        orphans = not carried and bool(processes.orphans(record.session, record.group, record.created))
        now = boottime()
        decision = decide(HolderLook(carried, orphans), self._since, now, self._timing)
        self._since = decision.since
        self.due = now + decision.again_s
        if decision.release:
            self._release()

    def _release(self) -> None:
        if self.record.shared:
            self._leave()
            return
        self._unwatch_processes()
        for node in self.record.nodes:
            self._nodes.detach(self.record, node)
        self.phase = "releasing"
        self._released_at = boottime()
        self.asked = {node.name for node in self.record.nodes}
        self._try_release()

    def _leave(self) -> None:
        """Leave a shared lease to its own keeper, once no other run of this host uses it."""
        runs = tuple(holder for holder in self.record.others if alive(holder))
        if not runs:
            self.remove("left to its own keeper")
            return
        log(f"{self.id}: still used by pid {runs[0].pid}")
        self._unwatch_processes()
        self.phase, self._since, self.due = "held", None, None
        with suppress(OSError):  # a full disk: a successor looks for the runs again
            self.rewrite(of_holder(self.record._replace(holder=runs[0], others=runs[1:])))
        self._watch_process(runs[0].pid)
        if not alive(runs[0]):
            self._process_ended()

    def _try_release(self) -> None:
        self._tries += 1
        self.due = boottime() + self._timing.retry_after_s(self._tries)
        for node in self.record.nodes:
            if node.name in self.asked:
                args = {"lease": self.id}
                self._nodes.call(self.record, node, "release", args, partial(self._released, node.name))

    def _released(self, name: str, answer: NodeAnswer) -> None:
        if answer.kind in {"", "not-found", "not-yours"}:
            self.asked.discard(name)
        else:
            log(f"{self.id}: not released on {name}: {answer.message}")
        # Claims expire; a job would hold its GPUs until its time limit.
        tried_s = boottime() - self._released_at
        late = tried_s > self._timing.release_s and (self.record.job is None or boottime() > self.record.until)
        if not self.gone and (late or not self.asked):
            self.end("released" if not self.asked else "left to expire")

    def end(self, reason: str) -> None:
        """Remove a lease that has ended, and the rank map that `allocate` wrote for it."""
        self.remove(reason, files_of(self.record, os.path.dirname(os.path.dirname(self._folder))))

    def remove(self, reason: str, files: Sequence[str] = ()) -> None:
        """Stop keeping it, and remove its record and ``files``."""
        log(f"{self.id}: {reason}")
        self.detach()
        for path in files:
            with suppress(OSError):  # only a completely allocated lease has all of them
                os.unlink(path)
        try:
            os.unlink(f"{self._folder}/{self.id}.json")
        except OSError as error:
            log(f"{self.id}.json: {error.strerror}")

    def detach(self) -> None:
        """Stop keeping it; its record remains, for another keeper."""
        self._unwatch_processes()
        self.gone = True
        for node in self.record.nodes:
            self._nodes.detach(self.record, node)
        self._ended(self)

    def _watch_process(self, pid: int) -> None:
        fd = self._loop.watch_process(pid, self._process_ended)
        if fd is not None:
            self._watched.append(fd)
        elif self.phase == "held":
            self.due = boottime() + self._timing.no_pidfd_s

    def _unwatch_processes(self) -> None:
        for fd in self._watched:
            self._loop.unwatch(fd)
            os.close(fd)
        self._watched = []

    def rewrite(self, record: LeaseRecord) -> None:
        """Replace its record, also the one on disk."""
        self.record = record
        write_private(f"{self._folder}/{record.lease}.json", json.dumps(record.plain()).encode())


def of_holder(record: LeaseRecord) -> LeaseRecord:
    """Return ``record`` with the session and process group of its holder, as far as there is one."""
    process = read_process(record.holder.pid) if record.holder else None
    return record if process is None else record._replace(session=process.session, group=process.group)


def record_loss(folder: str, message: str) -> None:
    """Append a message that the next gpuboard command shows. The file is replaced, as commands remove it to read it."""
    log(message)
    path, before = f"{folder}/lost", b""
    try:
        with suppress(FileNotFoundError), open(path, "rb") as file:  # not as text: it may be damaged
            before = file.read()
        write_private(path, before + f"{message}\n".encode())
    except OSError as error:
        log(f"lost: {error.strerror}")
