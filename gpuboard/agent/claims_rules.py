"""What a claim file says and whether it counts: names, contents, life, disputes. Pure: no I/O, no clock.

A claim is judged by two clocks of its node. ``wall`` is the epoch clock that also stamps files; ``up`` is
CLOCK_BOOTTIME, which nobody can set. Each claim carries both readings of its birth, so a wall clock that was set
forward or back since then shows, and neither frees a claim that is kept nor prolongs one that is not.
"""

import json
import re
from collections import namedtuple

MYPY = False
if MYPY:  # typing costs 8 ms of start-up on old interpreters and is only needed by the checker
    from typing import Any, Dict, Iterable, List, Optional, Tuple

LIFE_S = 90.0  # a claim without a sign of life for this long has lapsed for good
MARGIN_S = 2.0  # owners call their claim lapsed this much earlier than anybody else: clocks of files are coarse
FUTURE_S = 2.0  # what a stamp may lie ahead before it counts as set by hand
LONGEST_S = 366 * 86400.0
MAX_BYTES = 65536  # of a claim file; a larger one is not read
OWNER_BYTES = 262144  # of all claims of one user on a node: beyond it they are garbage, or one user could flood readers
OWNER_FILES = 512
NUMBER_MOST = 1e18  # of a time in a claim: JSON has larger ones, whose sums are infinite or no float at all
PREFIX = "gpuboard."
SIMULATED = "SIM-"

_NAME = re.compile(r"gpuboard\.([A-Za-z0-9_-]{1,96})\.([a-z0-9]{2,16})\Z")
_UUID = re.compile(r"[A-Za-z0-9/-]{1,96}\Z")
_LEASE = re.compile(r"[a-z0-9]{2,16}\Z")

# wall: epoch seconds; up: seconds since boot, suspended time included
Clock = namedtuple("Clock", "wall up")

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


def judge(entry: "Entry", clock: "Clock", boot_id: str, margin_s: float = 0.0) -> "Judged":
    """Return what one file counts for at ``clock``. An owner judges his own claims with ``margin_s``."""
    content, trouble = _decode(entry)
    if content is None:
        return Judged(entry, "garbage", trouble, None, 0.0, 0.0)
    if content["boot"] != boot_id:
        return Judged(entry, "lapsed", "from another boot of this node", content, 0.0, 0.0)
    if content["up"] > clock.up + FUTURE_S:
        return Judged(entry, "garbage", "from the future", None, 0.0, 0.0)
    age_s = max(0.0, clock.up - _shown(entry, content, clock))
    left_s = content["until"] - content["from"] - (clock.up - content["up"])
    if left_s <= margin_s:
        return Judged(entry, "lapsed", "its time is over", content, age_s, max(0.0, left_s))
    if age_s >= LIFE_S - margin_s:
        return Judged(entry, "lapsed", "no sign of life for %d s" % age_s, content, age_s, left_s)
    return Judged(entry, "live", "", content, age_s, left_s)


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


def _decode(entry: "Entry") -> "Tuple[Optional[Dict[str, Any]], str]":
    """Return (content, "") of a well-formed claim file, else (None, what is wrong with it)."""
    parts = split_name(entry.name)
    if parts is None:
        return None, "not a claim's name"
    if entry.data is None:
        return None, entry.trouble
    try:
        content = json.loads(entry.data.decode("utf-8"))
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


def wrong(content: "Dict[str, Any]") -> "Optional[str]":
    """Return what is wrong with a claim's content, None when every key has its type and range."""
    for key, pattern in (("uuid", _UUID), ("lease", _LEASE)):
        if not isinstance(content.get(key), str) or not pattern.match(content[key]):
            return "%s is missing or malformed" % key
    for key in ("from", "until", "up"):
        if not _number(content.get(key)):
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


def picture(judged: "Iterable[Judged]", clock: "Clock", owners: "Any") -> "List[Dict[str, Any]]":
    """Return the claims as they travel (gpuboard.model.reading.Claim), disputes worked out.

    ``owners`` maps a uid to the node's name for it.
    """
    found = list(judged)
    by_gpu: "Dict[str, List[Judged]]" = {}
    for one in found:
        if one.state == "live":
            by_gpu.setdefault(one.content["uuid"], []).append(one)
    return [_wire(one, by_gpu, clock, owners) for one in found]


def _wire(one: "Judged", by_gpu: "Dict[str, List[Judged]]", clock: "Clock", owners: "Any") -> "Dict[str, Any]":
    owner = owners(one.entry.uid)
    if one.content is None:
        uuid, lease = split_name(one.entry.name) or ("", "")
        reason = "%s: %s" % (ascii(one.entry.name[:160])[1:-1], one.reason)
        return {
            "lease": lease, "uuid": uuid, "uid": one.entry.uid, "owner": owner, "state": one.state,
            "from": 0.0, "until": 0.0, "reason": reason,
        }  # fmt: skip
    content = one.content
    others = [x for x in by_gpu.get(content["uuid"], ()) if contradicts(one, x)] if one.state == "live" else []
    reason = one.reason
    if others:
        reason = "; ".join(_dispute(one, other, owners(other.entry.uid)) for other in others)
    holder = content["holder"]
    return {
        "lease": content["lease"], "uuid": content["uuid"], "uid": one.entry.uid, "owner": owner, "state": one.state,
        "from": clock.wall - (clock.up - content["up"]) if one.state == "live" else content["from"],
        "until": clock.wall + one.left_s if one.state == "live" else content["until"],
        "remaining_s": one.left_s if one.state == "live" else 0.0, "age_s": one.age_s, "share": content["share"],
        "holder": holder and {key: holder[key] for key in ("host", "boot_id", "pid", "start")},
        "purpose": content["purpose"], "host": content["host"], "nodes": content["nodes"], "gpus": content["gpus"],
        "job": content.get("job"),
        "disputed_with": [x.content["lease"] for x in others], "reason": reason,
    }  # fmt: skip


def _dispute(one: "Judged", other: "Judged", owner: str) -> str:
    lease = other.content["lease"]
    if any(t["name"] == other.entry.name for t in one.content["took"]):
        return "took %s of %s for lapsed, which shows life" % (lease, owner)
    if any(t["name"] == one.entry.name for t in other.content["took"]):
        return "%s of %s took this for lapsed" % (lease, owner)
    return "contradicts %s of %s" % (lease, owner)
