"""What a claim file says and whether it counts: names, contents, life, disputes. Pure: no I/O, no clock.

A claim is judged by two clocks of its node. ``wall`` is the epoch clock that also stamps files; ``up`` is
CLOCK_BOOTTIME, which nobody can set. Each claim carries both readings of its birth, so a wall clock that was set
forward or back since then shows, and neither frees a claim that is kept nor prolongs one that is not.
"""

import json
import re
import stat
from collections import namedtuple
from itertools import islice

MYPY = False
if MYPY:  # typing costs 8 ms of start-up on old interpreters and is only needed by the checker
    from typing import Any, Dict, Iterable, List, Optional, Tuple

    Decoded = Tuple[Optional[Dict[str, Any]], str]
    Bucket = Dict[int, List["Judged"]]

LIFE_S = 90.0  # a claim without a sign of life for this long has lapsed for good
MARGIN_S = 2.0  # owners call their claim lapsed this much earlier than anybody else: clocks of files are coarse
FUTURE_S = 2.0  # what a stamp may lie ahead before it counts as set by hand
LONGEST_S = 366 * 86400.0
MAX_BYTES = 65536  # of a claim file; a larger one is not read
CLAIMS_BYTES = 3 * 2**20  # of all claims of a node that travel: a reading, at most 4 MiB, always has room for them
GARBAGE_BYTES = 65536  # of all garbage of a node that travels
CONFLICT_BYTES = 65536  # of the claims that a refusal names
OVERHEAD_BYTES = 900  # what a claim's JSON on the wire may have more than its file: owner, ages, conflicts
USERS_NAMED = 16  # of those that have more files than are looked at
RIVALS_NAMED = 16  # of the leases that a claim is in conflict with
RIVAL_USERS_NAMED = 4
TOOK_MOST = 16  # a claim names the latest; so many may lie there that all of them would make it unreadable
NUMBER_MOST = 1e18  # of a time in a claim: JSON has larger ones, whose sums are infinite or no float at all
PREFIX = "gpuboard."
SIMULATED = "SIM-"

_NAME = re.compile(r"gpuboard\.([A-Za-z0-9_-]{1,96})\.([a-z0-9]{2,16})\Z")
_UUID = re.compile(r"[A-Za-z0-9/-]{1,96}\Z")
_LEASE = re.compile(r"[a-z0-9]{2,16}\Z")
_MAX_LEASE = re.compile(r"""^[ \t]*max_lease[ \t]*=[ \t]*["']((?:[0-9]+(?:[.][0-9]+)?[smhdw])+)["']""", re.MULTILINE)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Clock(namedtuple("Clock", "wall up longest_s")):
    """A node's time. wall: epoch seconds; up: seconds since boot, suspended time included.

    ``longest_s``: how long a claim may last on this node after it was taken or renewed.
    """

    __slots__ = ()

    def __new__(cls, wall: float, up: float, longest_s: float = LONGEST_S) -> "Clock":
        return super(Clock, cls).__new__(cls, wall, up, longest_s)


# One file as it was found. data: its bytes, or None with the trouble in words. mtime and ctime: epoch seconds.
Entry = namedtuple("Entry", "name uid ino mtime ctime data trouble")

# One file as it is judged. state: live, lapsed or garbage; content: the checked JSON object, None for garbage;
# age_s: since the last sign of life; left_s: until it ends.
Judged = namedtuple("Judged", "entry state reason content age_s left_s")


def file_name(uuid: str, lease: str) -> str:
    """Return the name of a claim's file. Old MIG UUIDs contain slashes; in names these are underscores."""
    return "%s%s.%s" % (PREFIX, uuid.replace("/", "_"), lease)


def split_name(name: str) -> "Optional[Tuple[str, str]]":
    """Return (uuid as in the name, lease) of a claim's file name, None for any other name."""
    match = _NAME.match(name)
    return (match.group(1), match.group(2)) if match else None


def relevant(name: str, sim_prefix: "Optional[str]") -> bool:
    """Return whether a folder's reader looks at ``name``: simulated GPUs and real ones never see each other."""
    if not name.startswith(PREFIX):
        return False
    if sim_prefix is None:
        return not name.startswith(PREFIX + SIMULATED)
    return name.startswith(PREFIX + sim_prefix)


def encode(content: "Dict[str, Any]") -> bytes:
    """Return the bytes of a claim file (ASCII JSON, one line)."""
    return (json.dumps(content, sort_keys=True) + "\n").encode("ascii")


def max_lease(toml: str) -> float:
    """Return the seconds of ``max_lease`` in a site's configuration, LONGEST_S where it sets none.

    A pattern, for Python has a TOML parser since 3.11 only: the key before the first table, its value one string.
    """
    found = _MAX_LEASE.search(re.split(r"(?m)^[ \t]*\[", toml)[0])
    parts = re.findall(r"([0-9.]+)([smhdw])", found.group(1)) if found else []
    return min(LONGEST_S, sum(float(amount) * _UNITS[unit] for amount, unit in parts) or LONGEST_S)


def no_claim(mode: int, size: int) -> str:
    """Return why a file of this mode and size is no claim whatever it contains, "" when it may be one.

    A file that others may write has anybody's words under its owner's name (an ACL's mask shows in the group's bits).
    The number of links decides nothing: a claim's content fits one name only, and where fs.protected_hardlinks is off
    others can add links to an honest claim.
    """
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if not stat.S_ISREG(mode):
        return "not a regular file"
    if size > MAX_BYTES:
        return "larger than %d bytes" % MAX_BYTES
    return "others may write it" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def judge(
    entry: "Entry", clock: "Clock", boot_id: str, margin_s: float = 0.0, decoded: "Optional[Decoded]" = None
) -> "Judged":
    """Return what one file counts for at ``clock``. An owner judges his own claims with ``margin_s``.

    ``decoded``: what ``decode`` has returned for this entry, where a reader keeps it.
    """
    content, trouble = decoded or decode(entry)
    if content is None:
        return Judged(entry, "garbage", trouble, None, 0.0, 0.0)
    if content["boot"] != boot_id:
        return Judged(entry, "lapsed", "from another boot of this node", content, 0.0, 0.0)
    renewed = content.get("renewed", content["up"])
    if max(content["up"], renewed) > clock.up + FUTURE_S:
        return Judged(entry, "garbage", "from the future", None, 0.0, 0.0)
    age_s = max(0.0, clock.up - _shown(entry, content, clock))
    left_s = content["until"] - content["from"] - (clock.up - content["up"])
    left_s = min(left_s, clock.longest_s - (clock.up - renewed))
    if left_s <= margin_s:
        return Judged(entry, "lapsed", "its time is over", content, age_s, max(0.0, left_s))
    if age_s >= LIFE_S - margin_s:
        return Judged(entry, "lapsed", "no sign of life for %d s" % age_s, content, age_s, left_s)
    return Judged(entry, "live", "", content, age_s, left_s)


def unreadable(entry: "Entry", clock: "Clock", boot_id: str) -> "Judged":
    """Return a file that the system cannot read and that may be a claim: it holds the GPU of its name until it can."""
    uuid, lease = split_name(entry.name) or ("", "")
    if uuid.startswith("MIG-GPU-"):
        uuid = uuid.replace("_", "/")
    content = {
        "lease": lease, "uuid": uuid, "from": clock.wall, "until": clock.wall + LIFE_S, "up": clock.up, "boot": boot_id,
        "share": None, "holder": None, "purpose": "", "host": "", "nodes": [], "gpus": 1, "took": [],
    }  # fmt: skip
    return Judged(entry, "live", entry.trouble, content, 0.0, LIFE_S)


def skipped(one: "Judged", clock: "Clock") -> "Optional[Tuple[float, float]]":
    """Return between which wall times the clock must have been set forward if ``one`` is live; None: it need not.

    Its last heartbeat is at most LIFE_S before the step, and the step at most LIFE_S ago.
    """
    after, before = one.entry.ctime + LIFE_S + MARGIN_S, clock.wall - LIFE_S - MARGIN_S
    return (after, before) if one.state == "live" and one.entry.data is not None and after < before else None


def without_step(one: "Judged", clock: "Clock", stamps: "List[float]") -> "Judged":
    """Return ``one``, lapsed where it is live only by a step of the clock that ``stamps`` of the kernel disprove.

    Without this, a set of claims that each give another time of birth would come alive one after another.
    """
    span = skipped(one, clock)
    if span is None or not any(span[0] < at < span[1] for at in stamps):
        return one
    age_s = clock.wall - one.entry.ctime
    return one._replace(state="lapsed", reason="no sign of life for %d s" % age_s, age_s=age_s)


def stamp(content: "Dict[str, Any]", up: float) -> float:
    """Return the mtime that shows life at ``up``: the wall clock as it would stand had nobody set it since birth."""
    return float(content["from"] - content["up"] + up)


def _shown(entry: "Entry", content: "Dict[str, Any]", clock: "Clock") -> float:
    """Return when the claim last showed life, in seconds since boot.

    The owner can set mtime to anything but each such change moves ctime to the kernel's now, and others can move
    ctime alone at most (a hard link, where fs.protected_hardlinks is off): the earlier of the two counts. Where the
    wall clock was set forward since the claim's birth, ctimes from before look too old by as much, and mtime, which
    is written in the claim's own time, counts alone unless it lies ahead.
    """
    born = content["from"] - content["up"]
    by_mtime = entry.mtime - born
    by_ctime = entry.ctime - (clock.wall - clock.up)
    set_forward_s = clock.wall - clock.up - born
    if set_forward_s > FUTURE_S and by_mtime <= clock.up + FUTURE_S:
        return float(by_mtime)
    return float(min(by_mtime, by_ctime))


def contradicts(one: "Judged", other: "Judged") -> bool:
    """Return whether two live claims cannot both stand: the same GPU, another lease, and neither gives way."""
    if one.state != "live" or other.state != "live" or one.entry.name == other.entry.name:
        return False
    return one.content["uuid"] == other.content["uuid"] and stands_against(one.content, other.content)


def stands_against(one: "Dict[str, Any]", other: "Dict[str, Any]") -> bool:
    """Return whether two claims on one GPU exclude each other: not where both are for a part of it.

    Nor where they were made in different Slurm jobs: Slurm has given the GPU from one to the other, and what the first
    left behind, killed with its keeper, must not keep the second from what it was given.
    """
    jobs = (one.get("job"), other.get("job"))
    return (one["share"] is None or other["share"] is None) and (None in jobs or jobs[0] == jobs[1])


def decode(entry: "Entry") -> "Decoded":
    """Return (content, "") of a well-formed claim file, else (None, what is wrong with it)."""
    parts = split_name(entry.name)
    if parts is None:
        return None, "not a claim's name"
    if entry.data is None:
        return None, entry.trouble
    try:
        content = json.loads(entry.data.decode("utf-8"), parse_int=_int)
    except (ValueError, RecursionError):
        return None, "not JSON" if entry.data else "empty"
    if not isinstance(content, dict):
        return None, "not a JSON object"
    trouble = wrong(content)
    if trouble:
        return None, trouble
    if file_name(content["uuid"], content["lease"]) != entry.name:
        return None, "its content belongs to another name"
    return content, ""


def _int(digits: str) -> "Any":
    """Return a number of JSON; one of 60,000 digits would take a tenth of a second to read."""
    return int(digits) if len(digits) <= 20 else float("inf")


def wrong(content: "Dict[str, Any]") -> "Optional[str]":
    """Return what is wrong with a claim's content, None when every key has its type and range."""
    for key, pattern in (("uuid", _UUID), ("lease", _LEASE)):
        if not isinstance(content.get(key), str) or not pattern.match(content[key]):
            return "%s is missing or malformed" % key
    for key in ("from", "until", "up", "renewed"):
        if not _number(content.get(key)) and (key != "renewed" or key in content):
            return "%s is not a number" % key
    if not 0 < content["until"] - content["from"] <= LONGEST_S:
        return "it would last %.0f s" % (content["until"] - content["from"])
    if not isinstance(content.get("job") or "", str) or len(content.get("job") or "") > 64:
        return "job is not a text of at most 64 characters"
    for key, limit in (("purpose", 512), ("host", 255), ("boot", 64)):
        if not isinstance(content.get(key), str) or len(content[key]) > limit:
            return "%s is not a text of at most %d characters" % (key, limit)
    share = content.get("share")
    if share is not None and not (_whole(share) and share > 0):
        return "share is not a size"
    if not (_whole(content.get("gpus")) and 0 <= content["gpus"] <= 1000000):
        return "gpus is not a count"
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(n, str) and len(n) <= 255 for n in nodes):
        return "nodes is not a list of names"
    took = content.get("took")
    if not isinstance(took, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in took):
        return "took is not a list of claims"
    if len(took) > TOOK_MOST:
        return "took is longer than %d claims" % TOOK_MOST
    return _wrong_holder(content.get("holder"))


def _wrong_holder(holder: "Any") -> "Optional[str]":
    if holder is None:
        return None
    good = (
        isinstance(holder, dict)
        and all(isinstance(holder.get(key), str) and len(holder[key]) <= 255 for key in ("host", "boot_id"))
        and all(_whole(holder.get(key)) for key in ("pid", "start"))
    )
    return None if good else "holder is not a process"


def _whole(value: "Any") -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: "Any") -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= NUMBER_MOST


def fair(found: "Iterable[Tuple[int, Any, int, Any]]", most_bytes: int) -> "Tuple[List[Any], Dict[int, int]]":
    """Return what of ``found`` fits into ``most_bytes``, and how many of whom do not: cut is who has the most.

    ``found``: (uid, rank, size, anything); of one user those of the lowest rank stay.
    """
    ordered = sorted(found, key=lambda one: one[1])
    totals: "Dict[int, int]" = {}
    price = []
    for number, (uid, _, size, _) in enumerate(ordered):
        totals[uid] = totals.get(uid, 0) + size + OVERHEAD_BYTES
        price.append((totals[uid], number))
    kept, left_out, left = [], {}, most_bytes  # type: Tuple[List[Any], Dict[int, int], int]
    for _, number in sorted(price):
        uid, size = ordered[number][0], ordered[number][2]
        left -= size + OVERHEAD_BYTES
        if left >= 0:
            kept.append(ordered[number])
        else:
            left_out[uid] = left_out.get(uid, 0) + 1
    return kept, left_out


class Shelf:
    """Keeps what fits into ``most_bytes`` of any number of files, cut fairly; never more than twice that."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._found: "List[Any]" = []
        self.left_out: "Dict[int, int]" = {}  # uid: how many

    def add(self, uid: int, rank: "Any", size: int, what: "Any") -> None:
        """Put one more there. Of one user those of the lowest ``rank`` stay."""
        self._found.append((uid, rank, size, what))
        self._size += size + OVERHEAD_BYTES
        if self._size > 2 * self._most:
            self._cut()

    def kept(self) -> "List[Any]":
        """Return what stays."""
        self._cut()
        return [what for _, _, _, what in self._found]

    def _cut(self) -> None:
        self._found, left_out = fair(self._found, self._most)
        self._size = sum(size + OVERHEAD_BYTES for _, _, size, _ in self._found)
        for uid, count in left_out.items():
            self.left_out[uid] = self.left_out.get(uid, 0) + count


def rank(one: "Judged") -> "Tuple[bool, str]":
    """Return the order in which a user's own files stay where he has too many."""
    return (one.state != "live", one.entry.name)


def left_out(counts: "Dict[int, int]", words: str, owners: "Any") -> "List[Dict[str, Any]]":
    """Return what travels in place of files that do not, a user each; ``words`` has a place for their number."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:USERS_NAMED]
    return [_garbage("", "", uid, owners(uid), words % count) for uid, count in named]


def picture(judged: "Iterable[Judged]", clock: "Clock", owners: "Any") -> "List[Dict[str, Any]]":
    """Return the claims as they travel (gpuboard.model.reading.Claim), conflicts worked out.

    ``owners`` maps a uid to the node's name for it.
    """
    found = list(judged)
    live: "Dict[Any, Bucket]" = {}
    for one in found:
        if one.state == "live":
            uuid, job, whole = one.content["uuid"], one.content.get("job"), one.content["share"] is None
            for key in ((uuid, "any", whole), (uuid, ("job", job), whole)):
                live.setdefault(key, {}).setdefault(one.entry.uid, []).append(one)
    return [_wire(one, _rivals(one, live), clock, owners) for one in found]


def _rivals(one: "Judged", live: "Dict[Any, Bucket]") -> "List[Bucket]":
    """Return the live claims, by user, that ``contradicts`` holds of, and ``one`` itself if it is for a whole GPU."""
    if one.state != "live":
        return []
    job = one.content.get("job")
    jobs: "Tuple[Any, ...]" = ("any",) if job is None else (("job", None), ("job", job))
    sizes = (True, False) if one.content["share"] is None else (True,)
    return [live[key] for key in ((one.content["uuid"], j, whole) for j in jobs for whole in sizes) if key in live]


def _garbage(lease: str, uuid: str, uid: int, owner: str, reason: str) -> "Dict[str, Any]":
    return {
        "lease": lease, "uuid": uuid, "uid": uid, "owner": owner, "state": "garbage", "from": 0.0, "until": 0.0,
        "reason": reason,
    }  # fmt: skip


def _wire(one: "Judged", rivals: "List[Bucket]", clock: "Clock", owners: "Any") -> "Dict[str, Any]":
    owner = owners(one.entry.uid)
    if one.content is None:
        uuid, lease = split_name(one.entry.name) or ("", "")
        return _garbage(lease, uuid, one.entry.uid, owner, "%s: %s" % (ascii(one.entry.name[:160])[1:-1], one.reason))
    content = one.content
    named = islice((x for bucket in rivals for xs in bucket.values() for x in xs if x is not one), RIVALS_NAMED)
    reasons = [one.reason] if one.reason else []
    for uid in islice((uid for bucket in rivals for uid in bucket), 2 * RIVAL_USERS_NAMED):
        words = _conflict(one, [xs for xs in (bucket.get(uid) for bucket in rivals) if xs], owners)
        if words and words not in reasons and len(reasons) < RIVAL_USERS_NAMED:
            reasons.append(words)
    holder = content["holder"]
    return {
        "lease": content["lease"], "uuid": content["uuid"], "uid": one.entry.uid, "owner": owner, "state": one.state,
        "from": clock.wall - (clock.up - content["up"]) if one.state == "live" else content["from"],
        "until": clock.wall + one.left_s if one.state == "live" else content["until"],
        "remaining_s": one.left_s if one.state == "live" else 0.0, "age_s": one.age_s, "share": content["share"],
        "holder": holder and {key: holder[key] for key in ("host", "boot_id", "pid", "start")},
        "purpose": content["purpose"], "host": content["host"], "nodes": content["nodes"], "gpus": content["gpus"],
        "job": content.get("job"),
        "disputed_with": [x.content["lease"] for x in named], "reason": "; ".join(reasons),
    }  # fmt: skip


def _conflict(one: "Judged", rivals: "List[List[Judged]]", owners: "Any") -> str:
    """Return what ``one`` is in conflict with of one user's claims, at a price that does not grow with their number."""
    first = [x for xs in rivals for x in xs[:2] if x is not one]
    if not first:
        return ""
    lease, owner = first[0].content["lease"], owners(first[0].entry.uid)
    count = sum(len(xs) for xs in rivals) - (first[0].entry.uid == one.entry.uid and one.content["share"] is None)
    if count > 1:
        return "in conflict with %d claims of %s, first %s" % (count, owner, lease)
    if any(t["name"] == first[0].entry.name for t in one.content["took"]):
        return "took %s of %s for lapsed, which shows life" % (lease, owner)
    if any(t["name"] == one.entry.name for t in first[0].content["took"]):
        return "%s of %s took this for lapsed" % (lease, owner)
    return "in conflict with %s of %s" % (lease, owner)
