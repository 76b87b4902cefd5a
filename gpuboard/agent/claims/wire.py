"""Which claims of a node are sent, within budgets of bytes that are shared fairly by user, and in what form. Pure."""

from itertools import islice

from gpuboard.agent.claims import rules

MYPY = False
if MYPY:
    from typing import Any, Dict, Iterable, List, Tuple

    from gpuboard.agent.claims.rules import Clock, Judged

    Bucket = Dict[int, List[Judged]]

CLAIMS_BYTES = 3 * 2**20  # budget of all claims of a node in a reading, which has at most 4 MiB
GARBAGE_BYTES = 65536  # budget of all garbage of a node in a reading
CONFLICT_BYTES = 65536  # budget of the claims in a refusal
OVERHEAD_BYTES = 900  # what a claim's JSON on the wire has beyond its file: owner, ages, conflicts
USERS_NAMED = 16  # users named whose files exceed a budget
RIVALS_NAMED = 16  # conflicting leases named per claim
RIVAL_USERS_NAMED = 4


def fair(found: "Iterable[Tuple[int, Any, int, Any]]", most_bytes: int) -> "Tuple[List[Any], Dict[int, int]]":
    """Return the part of ``found`` that fits into ``most_bytes``, and the number dropped per user.

    The users with the most bytes lose entries first. ``found``: (uid, rank, size, anything); lowest ranks are kept.
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
    """Keeps the fair part (see ``fair``) of any number of files; uses at most twice ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._found: "List[Any]" = []
        self.left_out: "Dict[int, int]" = {}  # uid → number

    def add(self, uid: int, rank: "Any", size: int, what: "Any") -> None:
        """Add a file."""
        self._found.append((uid, rank, size, what))
        self._size += size + OVERHEAD_BYTES
        if self._size > 2 * self._most:
            self._cut()

    def kept(self) -> "List[Any]":
        """Return the files that fit."""
        self._cut()
        return [what for _, _, _, what in self._found]

    def _cut(self) -> None:
        self._found, left_out = fair(self._found, self._most)
        self._size = sum(size + OVERHEAD_BYTES for _, _, size, _ in self._found)
        for uid, count in left_out.items():
            self.left_out[uid] = self.left_out.get(uid, 0) + count


def rank(one: "Judged") -> "Tuple[bool, str]":
    """Return the rank of a user's file: lower ones are kept when there are too many."""
    return (one.state != "live", one.entry.name)


def left_out(counts: "Dict[int, int]", words: str, owners: "Any") -> "List[Dict[str, Any]]":
    """Return one entry per user for the files dropped from a reading; ``words`` has a %d for their number."""
    named = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:USERS_NAMED]
    return [_garbage("", "", uid, owners(uid), words % count) for uid, count in named]


def picture(judged: "Iterable[Judged]", clock: "Clock", owners: "Any") -> "List[Dict[str, Any]]":
    """Return the claims for the wire (gpuboard.model.reading.Claim), with their conflicts.

    ``owners`` maps a uid to its name on the node.
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
    """Return the live claims, by user, that conflict with ``one``; includes ``one`` if it is for a whole GPU."""
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
        uuid, lease = rules.split_name(one.entry.name) or ("", "")
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
    """Return the message about the conflict of ``one`` with one user's claims, in time independent of their number."""
    first = [x for xs in rivals for x in xs[:2] if x is not one]
    if not first:
        return ""
    lease, owner = first[0].content["lease"], owners(first[0].entry.uid)
    count = sum(len(xs) for xs in rivals) - (first[0].entry.uid == one.entry.uid and one.content["share"] is None)
    if count > 1:
        return "in conflict with %d claims of %s, first %s" % (count, owner, lease)
    if any(t["name"] == first[0].entry.name for t in one.content["took"]):
        return "took over %s of %s as expired, but it is live" % (lease, owner)
    if any(t["name"] == one.entry.name for t in first[0].content["took"]):
        return "%s of %s took this over as expired" % (lease, owner)
    return "in conflict with %s of %s" % (lease, owner)
