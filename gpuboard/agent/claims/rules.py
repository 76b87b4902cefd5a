"""Claim files: names, contents, expiry (state ``lapsed``), conflicts. Pure: no I/O, no clock.

Two clocks of the node decide. ``wall`` is the epoch clock, which also stamps files; ``up`` is CLOCK_BOOTTIME, which
cannot be set. Each claim stores both clocks at its creation, so later steps of the wall clock are detected: they
neither free a claim that gets heartbeats nor prolong one that gets none.
"""

import stat
from collections import namedtuple

from gpuboard.agent import json_text

MYPY = False
if MYPY:  # typing costs 8 ms of start-up on old interpreters; only the type checker needs it
    from typing import Any, Dict, FrozenSet, List, Literal, NamedTuple, Optional, Tuple  # novm

    Decoded = Tuple[Optional[Dict[str, Any]], str]
    State = Literal["live", "lapsed", "garbage"]  # on the wire; lapsed: expired

LIFE_S = 90.0  # a claim without a heartbeat for this long has expired for good
MARGIN_S = 2.0  # owners treat their claims as expired this much earlier: clocks of files are coarse
FUTURE_S = 2.0  # tolerance for stamps in the future; beyond it they were set by hand
LONGEST_S = 366 * 86400.0
MAX_BYTES = 65536  # largest claim file that is read
TOOK_MOST = 16  # expired claims named by the claim that replaces them, the latest; more might exceed MAX_BYTES
NUMBER_MOST = 1e18  # largest time in a claim: sums of larger JSON numbers overflow
PREFIX = "gpuboard."
SIMULATED = "SIM-"

# (characters, least length, largest); without re, whose import takes a tenth of an agent's start
_LEASE = frozenset("abcdefghijklmnopqrstuvwxyz0123456789"), 2, 16
_UUID = frozenset("/-ABCDEFGHIJKLMNOPQRSTUVWXYZ") | _LEASE[0], 1, 96
_UUID_IN_NAME = _UUID[0] - {"/"} | {"_"}, 1, 96
_MAX_LEASE = r"""(?m)^[ \t]*max_lease[ \t]*=[ \t]*["']((?:[0-9]+(?:[.][0-9]+)?[smhdw])+)["']"""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Clock(namedtuple("Clock", "wall up longest_s")):
    """A node's time. wall: epoch seconds; up: seconds since boot, suspended time included.

    ``longest_s``: how long a claim may last on this node after it was taken or renewed.
    """

    __slots__ = ()

    def __new__(cls, wall: float, up: float, longest_s: float = LONGEST_S) -> "Clock":
        return super(Clock, cls).__new__(cls, wall, up, longest_s)


if MYPY:

    class Entry(NamedTuple):
        """One file as found."""

        name: str
        uid: int
        ino: int
        mtime: float  # epoch seconds, as ctime
        ctime: float
        data: Optional[bytes]  # None: ``trouble`` is the reason
        trouble: str

    class Judged(NamedTuple):
        """One file after judge()."""

        entry: Entry
        state: State
        reason: str
        content: Any  # the validated JSON object, None for garbage
        age_s: float  # since the last heartbeat
        left_s: float  # until its end

else:
    Entry = namedtuple("Entry", "name uid ino mtime ctime data trouble")
    Judged = namedtuple("Judged", "entry state reason content age_s left_s")


def file_name(uuid: str, lease: str) -> str:
    """Return the name of a claim's file. Old MIG UUIDs contain slashes; in names these are underscores."""
    return "%s%s.%s" % (PREFIX, uuid.replace("/", "_"), lease)


def split_name(name: str) -> "Optional[Tuple[str, str]]":
    """Return (uuid as in the name, lease) of a claim's file name, None for any other name."""
    uuid, _, lease = name[len(PREFIX) :].partition(".")
    return (uuid, lease) if name.startswith(PREFIX) and _is(uuid, _UUID_IN_NAME) and _is(lease, _LEASE) else None


def relevant(name: str, sim_prefix: "Optional[str]") -> bool:
    """Return whether a reader looks at ``name``: claims on simulated and on real GPUs never mix."""
    if not name.startswith(PREFIX):
        return False
    if sim_prefix is None:
        return not name.startswith(PREFIX + SIMULATED)
    return name.startswith(PREFIX + sim_prefix)


def encode(content: "Dict[str, Any]") -> bytes:
    """Return the bytes of a claim file (ASCII JSON, one line)."""
    return (json_text.sorted_ascii(content) + "\n").encode("ascii")


def max_lease(toml: str) -> float:
    """Return the seconds of ``max_lease`` in a site's configuration, LONGEST_S where it sets none.

    By a pattern, since Python has no TOML parser before 3.11: the key before the first table, with a string value.
    """
    import re  # late: only where a site has a configuration

    found = re.search(_MAX_LEASE, re.split(r"(?m)^[ \t]*\[", toml)[0])
    parts = re.findall(r"([0-9.]+)([smhdw])", found.group(1)) if found else []
    return min(LONGEST_S, sum(float(amount) * _UNITS[unit] for amount, unit in parts) or LONGEST_S)


def no_claim(mode: int, size: int) -> str:
    """Return why a file of this mode and size cannot be a claim, "" when it may be one.

    The owner is not the author of a file that others can write (an ACL's mask shows in the group bits). The number of
    links is ignored: a claim's content matches one name only, and where fs.protected_hardlinks is off others can add
    links to a valid claim.
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
    """Return the state of one file at ``clock``. Owners judge their own claims with ``margin_s``.

    ``decoded``: the result of ``decode`` for this entry, if the reader has it.
    """
    content, trouble = decoded or decode(entry)
    if content is None:
        return Judged(entry, "garbage", trouble, None, 0.0, 0.0)
    if content["boot"] != boot_id:
        return Judged(entry, "lapsed", "from another boot of this node", content, 0.0, 0.0)
    renewed = content.get("renewed", content["up"])
    if max(content["up"], renewed) > clock.up + FUTURE_S:
        return Judged(entry, "garbage", "dated in the future", None, 0.0, 0.0)
    age_s = max(0.0, clock.up - _last_heartbeat(entry, content, clock))
    left_s = content["until"] - content["from"] - (clock.up - content["up"])
    left_s = min(left_s, clock.longest_s - (clock.up - renewed))
    if left_s <= margin_s:
        return Judged(entry, "lapsed", "its end time has passed", content, age_s, max(0.0, left_s))
    if age_s >= LIFE_S - margin_s:
        return Judged(entry, "lapsed", "no heartbeat for %d s" % age_s, content, age_s, left_s)
    return Judged(entry, "live", "", content, age_s, left_s)


def unreadable(entry: "Entry", clock: "Clock", boot_id: str) -> "Judged":
    """Return a live claim for a file that may be one but cannot be read now: it blocks the GPU of its name."""
    uuid, lease = split_name(entry.name) or ("", "")
    if uuid.startswith("MIG-GPU-"):
        uuid = uuid.replace("_", "/")
    content = {
        "lease": lease, "uuid": uuid, "from": clock.wall, "until": clock.wall + LIFE_S, "up": clock.up, "boot": boot_id,
        "share": None, "holder": None, "purpose": "", "host": "", "nodes": [], "gpus": 1, "took": [],
    }  # fmt: skip
    return Judged(entry, "live", entry.trouble, content, 0.0, LIFE_S)


def skipped(one: "Judged", clock: "Clock") -> "Optional[Tuple[float, float]]":
    """Return the wall times that the clock must have skipped for ``one`` to be live; None: no step is needed.

    Its last heartbeat is at most LIFE_S before such a step, and the step at most LIFE_S ago.
    """
    after, before = one.entry.ctime + LIFE_S + MARGIN_S, clock.wall - LIFE_S - MARGIN_S
    return (after, before) if one.state == "live" and one.entry.data is not None and after < before else None


def without_step(one: "Judged", clock: "Clock", stamps: "List[float]") -> "Judged":
    """Return ``one``, as lapsed if it is live only by a step of the clock that ``stamps`` of the kernel disprove.

    Otherwise claims with forged creation times could come alive one after another.
    """
    span = skipped(one, clock)
    if span is None or not any(span[0] < at < span[1] for at in stamps):
        return one
    age_s = clock.wall - one.entry.ctime
    return one._replace(state="lapsed", reason="no heartbeat for %d s" % age_s, age_s=age_s)


def stamp(content: "Dict[str, Any]", up: float) -> float:
    """Return the mtime of a heartbeat at ``up``: the wall clock as if it had never been set since creation."""
    return float(content["from"] - content["up"] + up)


def _last_heartbeat(entry: "Entry", content: "Dict[str, Any]", clock: "Clock") -> float:
    """Return the time of the claim's last heartbeat, in seconds since boot.

    The owner can set mtime to anything, but each change sets ctime to the kernel's time. Others can change only ctime
    (by a hard link, where fs.protected_hardlinks is off). So the earlier of the two counts. If the wall clock was set
    forward since the claim's creation, ctimes from before the step look too old; then mtime, which is written in the
    claim's own time, counts alone unless it is in the future.
    """
    born = content["from"] - content["up"]
    by_mtime = entry.mtime - born
    by_ctime = entry.ctime - (clock.wall - clock.up)
    set_forward_s = clock.wall - clock.up - born
    if set_forward_s > FUTURE_S and by_mtime <= clock.up + FUTURE_S:
        return float(by_mtime)
    return float(min(by_mtime, by_ctime))


def contradicts(one: "Judged", other: "Judged") -> bool:
    """Return whether two live claims of different leases on one GPU conflict."""
    if one.state != "live" or other.state != "live" or one.entry.name == other.entry.name:
        return False
    return one.content["uuid"] == other.content["uuid"] and stands_against(one.content, other.content)


def stands_against(one: "Dict[str, Any]", other: "Dict[str, Any]") -> bool:
    """Return whether two claims on one GPU exclude each other: unless both are for a part of it.

    Claims of different Slurm jobs do not: Slurm has allocated the GPU to another job since, and claims that the first
    job left, because Slurm killed its keeper, must not block the second.
    """
    jobs = (one.get("job"), other.get("job"))
    return (one["share"] is None or other["share"] is None) and (None in jobs or jobs[0] == jobs[1])


def decode(entry: "Entry") -> "Decoded":
    """Return (content, "") of a valid claim file, else (None, the error)."""
    parts = split_name(entry.name)
    if parts is None:
        return None, "not a claim's name"
    if entry.data is None:
        return None, entry.trouble
    try:
        content = json_text.parsed(entry.data.decode("utf-8"), parse_int=_int)
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


def _is(text: str, kind: "Tuple[FrozenSet[str], int, int]") -> bool:
    characters, least, largest = kind
    return least <= len(text) <= largest and characters.issuperset(text)


def _int(digits: str) -> "Any":
    """Parse an integer of JSON; 60,000 digits would take 0.1 s."""
    return int(digits) if len(digits) <= 20 else float("inf")


def wrong(content: "Dict[str, Any]") -> "Optional[str]":
    """Return the first error in a claim's content, None when every key has its type and range."""
    for key, kind in (("uuid", _UUID), ("lease", _LEASE)):
        if not isinstance(content.get(key), str) or not _is(content[key], kind):
            return "%s is missing or malformed" % key
    for key in ("from", "until", "up", "renewed"):
        if not _number(content.get(key)) and (key != "renewed" or key in content):
            return "%s is not a number" % key
    if not 0 < content["until"] - content["from"] <= LONGEST_S:
        return "it would last %.0f s" % (content["until"] - content["from"])
    job = content.get("job")
    if job is not None and not (isinstance(job, str) and len(job) <= 64):
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
