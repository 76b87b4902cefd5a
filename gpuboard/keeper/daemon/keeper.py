"""All leases of a keeper: commands hand them over, and a keeper that was killed leaves their records."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from gpuboard.keeper.daemon.calls import NodeAnswer
from gpuboard.keeper.daemon.commands import Commands, ConnectedCommand
from gpuboard.keeper.daemon.heartbeats import Nodes, key_of
from gpuboard.keeper.daemon.lease import KeeperContext, KeptLease, of_holder, record_loss
from gpuboard.keeper.daemon.loop import Action, KeeperLoop, boottime, log, write_log_to
from gpuboard.keeper.holder import alive
from gpuboard.keeper.record import LeaseRecord, decode, login_of
from gpuboard.keeper.runtime_dir import KeeperError, RuntimeDir, connect, peer_pid, receive, send
from gpuboard.keeper.timing import TIMING, KeeperTiming


class Keeper:
    """All leases of this keeper, and the events that change them."""

    def __init__(self, folder: str, place: RuntimeDir, timing: KeeperTiming = TIMING) -> None:
        self.folder = folder
        self.timing = timing
        self.place = place
        self.place_error = ""
        self.place_watched = False  # by a thread
        self.loop = KeeperLoop()
        self.kept: dict[str, KeptLease] = {}
        self.unread: dict[str, str] = {}  # records that are read again: the error of each
        self.nodes = Nodes(self.loop, self._touched, timing)
        self.commands = Commands(self.loop, self._handle, self._left)
        self.commands.listen(place.listener)
        self.context = KeeperContext(folder, self.loop, self.nodes, timing, self._ended)

    def run(self) -> None:
        """Run until there has been no lease for ``linger_s``."""
        self._readopt()
        idle_since = boottime()
        while True:
            now = boottime()
            if self.kept or self.unread or self.commands:
                idle_since = now
            elif now - idle_since >= self.timing.linger_s or not self.place.reachable:
                return
            if not self.place_watched:
                self._watch_place()
            self.nodes.touch(now)
            for kept in list(self.kept.values()):
                if kept.due is not None and kept.due <= now:
                    kept.check()
            dues = [kept.due for kept in self.kept.values() if kept.due is not None]
            dues += [self.nodes.next_due(), idle_since + self.timing.linger_s, now + self.timing.place_s]
            self.loop.wait(min(dues) - boottime())

    # --- lock and socket

    def _watch_place(self) -> None:
        """Have a thread check folder, lock and socket: their file system may hang, and heartbeats must continue."""
        done = threading.Event()

        def act(action: Action) -> None:
            action()
            done.set()

        ask = self.loop.report(act)

        def watch() -> None:
            while True:
                time.sleep(self.timing.place_s)
                done.clear()
                if not self.place.reachable:
                    ask(self._ensure_reachable)
                elif self.unread:
                    ask(self._read_again)
                else:
                    continue
                done.wait()  # where it takes seconds, heartbeats are due before the next one

        try:
            threading.Thread(target=watch, name="place", daemon=True).start()
            self.place_watched = True
        except RuntimeError:  # the user's limit of processes: the loop tries again
            self._ensure_reachable()

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
                    write_log_to(f"{self.folder}/log")
                log("folder, lock or socket was missing: restored")
                self._rewrite_all()
            else:
                self._hand_over()
            self.place_error = ""
        except (KeeperError, OSError, ValueError) as error:
            if str(error) != self.place_error:
                log(f"cannot restore folder, lock and socket: {error}")
            self.place_error = str(error)
        self.commands.listen(self.place.listener)

    def _rewrite_all(self) -> None:
        for kept in self.kept.values():
            try:
                kept.rewrite(kept.record)
            except OSError as error:
                log(f"{kept.id}.json: {error.strerror}")

    def _hand_over(self) -> None:
        """Hand all leases but those being reserved or released to the keeper that has the lock now."""
        leases = [kept for kept in self.kept.values() if kept.command is None and kept.phase != "releasing"]
        connection = connect(self.folder) if leases else None
        if connection is None:
            return
        with connection:
            if peer_pid(connection) == os.getpid():
                return  # the other keeper has the lock but not the socket yet
            for kept in leases:
                kept.rewrite(kept.record)
            send(connection, {"op": "readopt"})
            if receive(connection, 1.0) != {"ok": True}:
                return
            for kept in leases:
                log(f"{kept.id}: handed to the keeper with pid {peer_pid(connection)}")
                kept.detach()

    # --- requests of commands

    def _left(self, command: ConnectedCommand) -> None:
        for kept in list(self.kept.values()):
            if kept.command is command:
                kept.command = None
                kept.release_unconfirmed()

    def _handle(self, command: ConnectedCommand, line: bytes) -> None:
        try:
            message = json.loads(line)
            op = message["op"]
            self._ensure_reachable()
            if op == "readopt":
                self._readopt()
                command.reply()
                return
            if op == "adopt":
                self.nodes.logins.add(login_of(message.get("login", {})))
                self._adopt(command, decode(message["record"]))
                return
            kept = self.kept.get(str(message["lease"]))
            if op == "renew" and kept is not None:
                kept.renew(float(message["for_s"]))
            elif op == "known" and kept is not None:
                kept.confirm(command)
            elif op == "job":
                if kept is None:
                    raise ValueError(f"this keeper has no lease {message['lease']}")
                kept.set_job(int(message["number"]), float(message["for_s"]))
                self._close_unused()
            elif op == "ending" and kept is not None:
                kept.no_loss_until = boottime() + self.timing.own_end_s
            elif op == "forget" and kept is not None:
                kept.end("released by its owner")
            command.reply()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            command.reply(f"invalid request: {error!r}")
        except OSError as error:
            command.reply(f"{self.folder}: {error.strerror}")

    def _adopt(self, command: ConnectedCommand, record: LeaseRecord) -> None:
        if record.holder is not None and not alive(record.holder):
            command.reply(f"the holder of lease {record.lease}, pid {record.holder.pid}, has ended")
            return
        known = self.kept.get(record.lease)
        if known is not None and record.shared:
            if known.record.shared:
                known.share(record)
            command.reply()  # else this keeper has the lease itself, for as long as processes carry it
            return
        kept = KeptLease(of_holder(record), self.context, command)
        kept.rewrite(kept.record)  # on a full disk the keeper still has what was handed over before
        if known is not None:
            log(f"{known.id}: handed over again")
            known.detach()
        self._keep(kept)

    # --- the set of leases

    def _readopt(self) -> None:
        """Take over the leases whose records another keeper left or handed to this one. Raises OSError."""
        self._take_over(os.listdir(self.folder))

    def _read_again(self) -> None:
        self._take_over(list(self.unread))

    def _take_over(self, names: Iterable[str]) -> None:
        failed, self.unread = self.unread, {}
        for name in sorted(names):
            if not name.endswith(".json") or name[:-5] in self.kept:
                continue
            try:
                with open(f"{self.folder}/{name}", encoding="utf-8") as file:
                    kept = KeptLease(decode(json.load(file)), self.context)
            except FileNotFoundError:
                continue  # a command has just released that lease
            except OSError as error:  # of the disk or of this process, perhaps a passing one
                self.unread[name] = str(error)
                if failed.get(name) != str(error):
                    log(f"{name}: {error.strerror}; no heartbeats until it can be read")
            except ValueError as error:
                self._set_aside(name, error)
            else:
                self._keep(kept)
                log(f"{kept.id}: taken over")

    def _set_aside(self, name: str, why: ValueError) -> None:
        path = f"{self.folder}/{name}"
        try:
            os.replace(path, path + ".bad")
        except FileNotFoundError:
            return  # a command has just released that lease
        except OSError as error:
            log(f"{name}: unreadable: {why}; cannot be renamed: {error.strerror}")
            return
        log(f"{name}: unreadable, renamed to {name}.bad: {why}")
        record_loss(self.folder, f"lease {name[:-5]} gets no heartbeats: its record was damaged")

    def _keep(self, kept: KeptLease) -> None:
        self.kept[kept.id] = kept
        kept.start()

    def _touched(self, name: str, leases: list[str], answer: NodeAnswer) -> None:
        for kept in [self.kept[lease] for lease in leases if lease in self.kept]:
            kept.touched(name, answer)

    def _ended(self, kept: KeptLease) -> None:
        if self.kept.get(kept.id) is kept:
            del self.kept[kept.id]
        self._close_unused()

    def _close_unused(self) -> None:
        self.nodes.close({key_of(kept.record, node) for kept in self.kept.values() for node in kept.record.nodes})
