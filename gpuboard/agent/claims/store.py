"""Claims on the GPUs of this node: their folder, and the calls of role ``node`` on it.

A claim is the file ``gpuboard.<GPU uuid>.<lease id>`` in a root-owned sticky folder; the file's owner is the claim's.
Rules: claims/rules.py. Protocol: claims/protocol.py. System calls: claims/files.py.
"""

import os
import time

from gpuboard.agent.claims import Refuse, rules, wire
from gpuboard.agent.claims.files import SITE_CONFIG, Files, UnreadableClaim
from gpuboard.agent.proc import boot_id, user_name

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional, Set, Tuple

    Seen = Tuple[Any, rules.Entry, rules.Decoded]  # key of Files.look, its entry, the result of rules.decode

__all__ = ["OPS", "Folder", "Refuse", "handle"]

OPS = ("take", "release", "renew", "touch", "claims")
_GRAIN_S = 0.05  # mtime has steps of up to 10 ms: a list read this soon after a change is read again
_REST = 30.0  # searches for new names in the background take at most 1/30 of the time, for each kind of search
_CHEAP_S = 0.01  # CPU time below which a search is not limited
_MARKS_MOST = 250000  # garbage names kept in memory, 60 bytes each
_NAMED_MOST = 8  # claims named in a refusal's message; its detail has more


class Folder:
    """A folder of claims; reading it costs a few system calls per claim.

    ``sim_prefix``: read only claims on simulated GPUs whose UUIDs start with this (``SIM-…``).
    ``job``: set inside a Slurm job: claims are made as this job's, and claims of other jobs are ignored.

    Every reading checks the known claims. When the folder has changed, it also searches for new ones, among all names
    or among those not known as garbage. In a folder full of garbage that changes constantly, both searches pause in
    between to limit their cost; ``refresh`` ends a pause, as does each call.
    """

    def __init__(self, path: str, sim_prefix: "Optional[str]" = None, site_config: str = SITE_CONFIG) -> None:
        self.path = path
        self.site_config = site_config
        self.sim_prefix = sim_prefix
        self.job: "Optional[str]" = None
        self.boot_id = boot_id()
        self._good: "Any" = None
        self._known: "Dict[str, Seen]" = {}  # bounded by wire.CLAIMS_BYTES and GARBAGE_BYTES
        self._garbage: "Set[int]" = set()  # hashes of (name, inode)
        self._left_out: "Tuple[Dict[int, int], Dict[int, int]]" = ({}, {})  # uid → number; of claims, of garbage
        self._listed_key: "Any" = None
        self._rest_until = {"all": 0.0, "new": 0.0}
        self._owners: "Dict[int, str]" = {}

    def open(self) -> "Files":
        """Open the folder for one operation. Raises Refuse ``folder``."""
        files = Files(self.path, self.sim_prefix, self._good, self.site_config)
        self._good = files.identity
        return files

    def read(self) -> "Tuple[List[Dict[str, Any]], Optional[str]]":
        """Return (the claims for the wire, None), or ([], why this node cannot hold claims)."""
        try:
            files = self.open()
        except Refuse as refused:
            return [], refused.message
        try:
            clock = files.clock()
            self._look_again(files)
            self._look_for_more(files, clock)
            seen = [self._judge(self._known[name], clock) for name in sorted(self._known)]
            if any(rules.skipped(one, clock) for one in seen):
                stamps = files.stamps() + [one.entry.ctime for one in seen]
                seen = [rules.without_step(one, clock, stamps) for one in seen]
            claims = wire.picture([one for one in seen if self._concerns(one)], clock, self.owner)
            claims += wire.left_out(self._left_out[0], "%d more claims are not shown", self.owner)
            claims += wire.left_out(self._left_out[1], "%d more files are not claims", self.owner)
            return claims, None
        except OSError as error:
            return [], "%s cannot be read: %s" % (self.path, error.strerror or error)
        finally:
            files.close()

    def refresh(self) -> None:
        """Have the next reading search for new claims at any cost."""
        self._rest_until = {"all": 0.0, "new": 0.0}

    def veto(self, op: str, args: "Dict[str, Any]") -> None:
        """Hook for refusals that no file causes: simulated claims of other users."""

    def owner(self, uid: int) -> str:
        """Return this node's name for a uid, else its digits."""
        if uid not in self._owners:
            self._owners[uid] = user_name(uid)  # cached: user_name may be slow
        return self._owners[uid]

    def _concerns(self, one: "rules.Judged") -> bool:
        return self.job is None or one.content is None or one.content.get("job") in (None, self.job)

    def _judge(self, seen: "Seen", clock: "rules.Clock") -> "rules.Judged":
        key, entry, decoded = seen
        if key is None:
            return rules.unreadable(entry, clock, self.boot_id)
        return rules.judge(entry, clock, self.boot_id, decoded=decoded)

    def _look(self, files: "Files", name: str) -> "Optional[Seen]":
        """Return the file ``name``, read again only if changed; None when it is gone."""
        known = self._known.get(name)
        try:
            key, entry = files.look(name, known and known[0])
        except UnreadableClaim as error:
            return None, error.entry, (None, "")
        if entry is None:
            return None if key is None else known
        return key, entry, rules.decode(entry)

    def _look_again(self, files: "Files") -> None:
        seen = ((name, self._look(files, name)) for name in list(self._known))
        self._known = {name: one for name, one in seen if one is not None}

    def _look_for_more(self, files: "Files", clock: "rules.Clock") -> None:
        """Search for unknown claims if the folder has changed."""
        found = os.fstat(files.fd)
        key = (found.st_dev, found.st_ino, found.st_mtime_ns)
        now = time.monotonic()
        way = next((way for way in ("all", "new") if now >= self._rest_until[way]), None)
        if key == self._listed_key or way is None:
            return
        began = time.process_time()
        self._list(files, clock, way == "all")
        spent_s = time.process_time() - began
        self._rest_until[way] = time.monotonic() + _REST * spent_s if spent_s > _CHEAP_S else 0.0
        fresh = abs(time.time() - found.st_mtime) < _GRAIN_S
        self._listed_key = None if fresh or way != "all" else key

    def _list(self, files: "Files", clock: "rules.Clock", everything: bool) -> None:
        """Go through the folder, one name at a time; keep what fits into a reading.

        Unless ``everything``, skip names and inodes known as garbage. A claim that replaces such a file and reuses its
        inode is found by the next search of everything.
        """
        shelves = wire.Shelf(wire.CLAIMS_BYTES), wire.Shelf(wire.GARBAGE_BYTES)
        garbage: "Set[int]" = set() if everything else self._garbage
        for name, inode in files.names():
            mark = hash((name, inode))
            if not everything and mark in garbage and name not in self._known:
                continue
            seen = self._known[name] if name in self._known else self._look(files, name)
            if seen is None:
                continue
            one = self._judge(seen, clock)
            if one.content is None and len(garbage) < _MARKS_MOST:
                garbage.add(mark)
            size = len(one.entry.data or b"")
            shelves[one.content is None].add(one.entry.uid, wire.rank(one), size, (name, seen))
        self._known = dict(shelves[0].kept() + shelves[1].kept())
        self._garbage = garbage
        if everything:
            self._left_out = shelves[0].left_out, shelves[1].left_out


def handle(op: str, args: "Dict[str, Any]", folder: "Folder") -> "Any":
    """Answer one call of role ``node`` (docs/agent-protocol.md). Raises Refuse."""
    folder.refresh()
    if op == "claims":
        claims, error = folder.read()
        return {"claims": claims, "error": error}
    folder.veto(op, args)
    files = folder.open()
    try:
        return _answer(op, args, folder, files)
    except Refuse as refused:
        if refused.kind != "disk":
            raise
        raise Refuse("disk", "%s: %s" % (folder.path, refused.message))
    except OSError as error:
        raise Refuse("disk", "%s: %s" % (folder.path, error.strerror or error))
    finally:
        files.close()


def _answer(op: str, args: "Dict[str, Any]", folder: "Folder", files: "Files") -> "Any":
    from gpuboard.agent.claims import protocol  # late: readings do without

    uid = os.geteuid()
    longest_s = files.clock().longest_s
    if longest_s < args.get("for_s", 0.0) <= rules.LONGEST_S:
        hours = longest_s / 3600.0
        words = "this node allows leases of at most %.4g h (max_lease in %s)" % (hours, folder.site_config)
        raise Refuse("invalid", words)
    if op == "take":
        return _take(args, folder, files)
    if op == "touch":
        return protocol.drive(protocol.touch(list(args["leases"]), uid, folder.boot_id), files)
    if op == "renew":
        clock = protocol.drive(protocol.renew(args["lease"], args["for_s"], uid, folder.boot_id), files)
        return {"until": clock.wall + args["for_s"], "now": clock.wall}
    return {"released": protocol.drive(protocol.release(args["lease"], uid, folder.boot_id), files)}


def _take(args: "Dict[str, Any]", folder: "Folder", files: "Files") -> "Dict[str, float]":
    """Claim GPUs, after removing leftovers of this user's earlier claims."""
    from gpuboard.agent.claims import protocol  # late: readings do without

    content = {key: args.get(key) for key in ("lease", "share", "holder", "nodes", "gpus")}
    content.update(purpose=args.get("purpose") or "", host=args.get("host") or "", job=folder.job)
    files.sweep_temporaries()
    uid = os.geteuid()
    protocol.drive(protocol.sweep(uid, folder.boot_id), files)
    steps = protocol.take(content, list(args["uuids"]), args["for_s"], folder.boot_id, _jitter)
    try:
        taken = protocol.drive(steps, files)
    except Refuse as refused:
        if refused.kind == "conflict":
            found = ((x.entry.uid, wire.rank(x), len(x.entry.data or b""), x) for x in refused.detail)
            kept, _ = wire.fair(found, wire.CONFLICT_BYTES)
            claims = wire.picture([x for _, _, _, x in kept], files.clock(), folder.owner)
            words = sorted({"%s by %s (%s)" % (c["uuid"], c["owner"], c["lease"]) for c in claims})
            more = ["%d more" % (len(refused.detail) - _NAMED_MOST)] if len(refused.detail) > _NAMED_MOST else []
            message = ", ".join(words[:_NAMED_MOST] + more) or "other users are reserving at the same time"
            raise Refuse("conflict", "already claimed: %s" % message, {"claims": claims})
        raise
    return {"until": taken.wall + args["for_s"], "now": taken.wall}


def _jitter(attempt: int) -> float:
    """Return the wait before attempt ``attempt`` in seconds: more than a take needs (3 ms), growing."""
    import random  # late: only where others take at the same time

    return random.uniform(0.005, 0.02) * float(2**attempt)
