"""Claims on the GPUs of this node: the folder they lie in and the calls of role ``node`` that work on it.

A claim is the file ``gpuboard.<GPU uuid>.<lease id>`` in a root-owned sticky folder; its owner is the file's. The
rules are in claims_rules.py, the protocol in claims_protocol.py, the system calls in claims_files.py.
"""

import os
import random
import time

from gpuboard.agent import claims_protocol as protocol
from gpuboard.agent import claims_rules as rules
from gpuboard.agent.claims_files import Files, boot_id
from gpuboard.agent.claims_protocol import Refuse

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Tuple

__all__ = ["OPS", "Folder", "Refuse", "handle"]

OPS = ("take", "release", "renew", "touch", "claims")
_GRAIN_S = 0.05  # a folder's mtime moves in steps of up to 10 ms: a list read so soon after one is read again


class Folder:
    """A folder of claims, read each tick at the price of a few stats.

    ``sim_prefix``: look at claims on simulated GPUs whose UUIDs start so (``SIM-…``), and only at those.
    ``job``: set inside a Slurm job: claims are made as this job's, and those of other jobs are not looked at.
    """

    def __init__(self, path: str, sim_prefix: "Optional[str]" = None) -> None:
        self.path = path
        self.sim_prefix = sim_prefix
        self.job: "Optional[str]" = None
        self.boot_id = boot_id()
        self._good: "Any" = None
        self._names: "List[str]" = []
        self._names_key: "Any" = None
        self._entries: "Dict[str, Tuple[Any, rules.Entry]]" = {}
        self._owners: "Dict[int, str]" = {}

    def open(self) -> "Files":
        """Return the folder opened for one operation; raises Refuse ``folder``."""
        files = Files(self.path, self.sim_prefix, self._good)
        self._good = files.identity
        return files

    def read(self) -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        """Return (the claims as they travel, None), or ([], why this node cannot hold claims)."""
        try:
            files = self.open()
        except Refuse as refused:
            return [], refused.message
        try:
            clock = files.clock()
            names = self._list(files)
            judged = [rules.judge(entry, clock, self.boot_id) for entry in self._read_all(files, names)]
            found = [one for one in judged if self._concerns(one)]
            return rules.picture(found, clock, self.owner), None
        except OSError as error:
            return [], "%s cannot be read: %s" % (self.path, error.strerror or error)
        finally:
            files.close()

    def veto(self, op: str, args: "Dict[str, Any]") -> None:
        """Refuse a call for what no file says: nothing here, other people's claims where they are simulated."""

    def owner(self, uid: int) -> str:
        """Return this node's name for a uid, its digits when it has none."""
        if uid not in self._owners:
            import pwd  # asks the directory service, which may be slow: only for somebody new

            try:
                self._owners[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._owners[uid] = str(uid)
        return self._owners[uid]

    def _concerns(self, one: "rules.Judged") -> bool:
        return self.job is None or one.content is None or one.content.get("job") in (None, self.job)

    def _list(self, files: "Files") -> "List[str]":
        """Return the claims' names; the folder, in which thousands of other files may lie, is read when it changed."""
        found = os.fstat(files.fd)
        key = (found.st_dev, found.st_ino, found.st_mtime_ns)
        if key != self._names_key:
            fresh = abs(time.time() - found.st_mtime) < _GRAIN_S
            self._names = files.names()
            self._names_key = None if fresh else key
        return self._names

    def _read_all(self, files: "Files", names: "List[str]") -> "List[rules.Entry]":
        """Return the files under ``names``, each read again only when it changed; no user may fill our memory."""
        known, self._entries = self._entries, {}
        counts: "Dict[int, List[int]]" = {}  # uid: files, bytes, whether it was said that there are too many
        entries = []
        for name in names:
            found = files.stat(name)
            if found is None:
                continue
            count = counts.setdefault(found.st_uid, [0, 0, 0])
            count[0] += 1
            key = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
            if name in known and known[name][0] == key:
                entry = known[name][1]
            elif count[0] > rules.OWNER_FILES or count[1] > rules.OWNER_BYTES:
                if not count[2]:
                    trouble = "uid %d has more claims here than are looked at" % found.st_uid
                    entries.append(rules.Entry(name, found.st_uid, found.st_ino, 0.0, 0.0, None, trouble))
                count[2] = 1
                continue
            else:
                read = files.read(name)
                if read is None:
                    continue
                entry = read
            count[1] += len(entry.data or b"")
            self._entries[name] = (key, entry)
            entries.append(entry)
        return entries


def handle(op: str, args: "Dict[str, Any]", folder: "Folder") -> "Any":
    """Answer one call of role ``node`` (docs/architecture.md). Raises Refuse."""
    if op == "claims":
        claims, error = folder.read()
        return {"claims": claims, "error": error}
    folder.veto(op, args)
    files = folder.open()
    try:
        return _answer(op, args, folder, files)
    except OSError as error:
        raise Refuse("disk", "%s: %s" % (folder.path, error.strerror or error))
    finally:
        files.close()


def _answer(op: str, args: "Dict[str, Any]", folder: "Folder", files: "Files") -> "Any":
    uid = os.geteuid()
    if op == "take":
        return _take(args, folder, files)
    if op == "touch":
        return protocol.drive(protocol.touch(list(args["leases"]), uid, folder.boot_id), files)
    if op == "renew":
        clock = protocol.drive(protocol.renew(args["lease"], args["for_s"], uid, folder.boot_id), files)
        return {"until": clock.wall + args["for_s"], "now": clock.wall}
    return {"released": protocol.drive(protocol.release(args["lease"], uid, folder.boot_id), files)}


def _take(args: "Dict[str, Any]", folder: "Folder", files: "Files") -> "Dict[str, float]":
    """Claim GPUs; what we leave behind from earlier is cleared away first."""
    content = {key: args.get(key) for key in ("lease", "share", "holder", "nodes", "gpus")}
    content.update(purpose=args.get("purpose") or "", host=args.get("host") or "", job=folder.job)
    files.sweep_temporaries()
    uid = os.geteuid()
    protocol.drive(protocol.sweep(uid, folder.boot_id, lambda name: files.owner(name) == uid), files)
    steps = protocol.take(content, list(args["uuids"]), args["for_s"], folder.boot_id, _jitter)
    try:
        taken = protocol.drive(steps, files)
    except Refuse as refused:
        if refused.kind == "conflict":
            claims = rules.picture(refused.detail, files.clock(), folder.owner)
            words = ", ".join(sorted({"%s by %s (%s)" % (c["uuid"], c["owner"], c["lease"]) for c in claims}))
            raise Refuse(
                "conflict", "claimed already: %s" % (words or "others take at the same time"), {"claims": claims}
            )
        raise
    return {"until": taken.wall + args["for_s"], "now": taken.wall}


def _jitter(attempt: int) -> float:
    """Return the seconds to wait before attempt ``attempt``: longer than a take (3 ms), longer each time."""
    return random.uniform(0.005, 0.02) * float(2**attempt)
