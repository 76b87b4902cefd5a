"""The protocol that takes, touches, renews and releases claims, one primitive step at a time.

Every function here is a generator. It yields a step, ``(name, *arguments)``, receives the step's result (or its
OSError), and returns its own result. The steps are the methods of files.Files. :func:`drive` runs a protocol on real
files; the model checker in tests/unit runs the same code on a folder in memory, with other processes between any two
steps.

Two takers never both succeed: each publishes all its claims before it reads the folder again. So of two that want one
GPU, the one whose claim appears later reads the earlier one's, unless that was withdrawn. A taker that finds a conflict
withdraws all its claims. The lock only makes such meetings rare; correctness does not depend on it.

Expiry is safe: a reader reads the clock before a file, so it never overestimates a claim's age. An owner reads the
clock after touching its claim, and withdraws it if others may have seen it as expired by then.
"""

from gpuboard.agent.claims import Refuse, rules, wire
from gpuboard.agent.claims.files import UnreadableClaim

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, Generator, List, Optional, Tuple

    from gpuboard.agent.claims.rules import Clock, Judged

    Steps = Generator[Tuple[Any, ...], Any, Any]

LOCK_WAIT_S = 2.0  # a lock held longer is ignored
HURRY_S = 30.0  # a taker delayed for longer starts over, so that a minute is left for the first heartbeat
ATTEMPTS = 8
OWNERS_ASKED = 16  # names checked for the owner of another user's lease


def drive(protocol: "Steps", files: "Any") -> "Any":
    """Run a protocol on ``files`` to its end and return its result."""
    answer: "Any" = None
    failed: "Any" = None
    while True:
        try:
            step = protocol.throw(failed) if failed is not None else protocol.send(answer)
        except StopIteration as end:
            return end.value
        answer = failed = None
        try:
            answer = getattr(files, step[0])(*step[1:])
        except OSError as error:
            failed = error


def survey(
    wanted: "Callable[[str], bool]",
    boot_id: str,
    margin_s: float = 0.0,
    uid: "Optional[int]" = None,
    unread: "Optional[Dict[str, str]]" = None,
) -> "Steps":
    """Read the claims whose names are ``wanted``, only ``uid``'s if given; return (clock from before, judged claims).

    Omits garbage, which blocks no GPU, and claims that do not fit into a reading (wire.fair). Names that the system
    cannot read are added to ``unread``, if given, with the reason; otherwise this raises UnreadableClaim.
    """
    clock = yield ("clock",)
    names = yield ("list", wanted)
    shelf = wire.Shelf(wire.CLAIMS_BYTES)
    for name in names:
        try:
            entry = yield ("read", name, uid)
        except UnreadableClaim as error:
            if unread is None:
                raise
            unread[name] = error.strerror or str(error)
            continue
        if entry is not None:
            one = rules.judge(entry, clock, boot_id, margin_s)
            if one.state != "garbage":
                shelf.add(entry.uid, wire.rank(one), len(entry.data or b""), one)
    found = sorted(shelf.kept(), key=lambda one: one.entry.name)
    if any(rules.skipped(one, clock) for one in found):
        stamps = yield ("stamps",)
        found = [rules.without_step(one, clock, stamps) for one in found]
    return clock, found


def take(
    content: "Dict[str, Any]",
    uuids: "List[str]",
    for_s: float,
    boot_id: str,
    jitter: "Callable[[int], float]",
    *,
    attempts: int = ATTEMPTS,
) -> "Steps":
    """Claim all of ``uuids`` or nothing; return the clock at which they were taken.

    ``content``: the claims' common keys, all but uuid, from, until, up, boot and took; ``jitter``: the seconds to wait
    before attempt k. Raises Refuse: ``conflict`` (detail: the judged claims in the way), ``disk``, ``invalid``.
    """
    for uuid in uuids:
        _sound(dict(content, uuid=uuid, up=0.0, until=for_s, boot=boot_id, took=[], **{"from": 0.0}))
    patience = LOCK_WAIT_S
    for attempt in range(attempts):
        if attempt:
            yield ("sleep", jitter(attempt))
        locked = yield ("lock", patience)
        if not locked:
            patience = 0.0  # wait once: a lock that stays held delays an operation by 2 s, not each attempt
        published: "List[str]" = []
        try:
            taken, in_the_way, over = yield from _attempt(content, uuids, published, for_s, boot_id)
            if taken is None:
                yield from withdraw(published)
        except OSError as error:
            yield from withdraw(published)
            yield ("unlock",)
            raise Refuse("disk", "cannot read or write the claims: %s" % (error.strerror or error))
        yield ("unlock",)
        if taken is not None:
            return taken
        if over:
            break
    raise Refuse("conflict", "GPUs are claimed", in_the_way)


def _attempt(
    content: "Dict[str, Any]", uuids: "List[str]", published: "List[str]", for_s: float, boot_id: str
) -> "Steps":
    """Try once; return (clock or None, conflicting claims, whether retrying is useless).

    Adds to ``published`` what the caller must withdraw if the clock is None or this raises.
    """
    stems = {rules.file_name(uuid, "") for uuid in uuids}
    clock, before = yield from survey(lambda name: name[: name.rfind(".") + 1] in stems, boot_id)
    in_the_way = [x for x in before if x.state == "live" and rules.stands_against(x.content, content)]
    if in_the_way:
        return None, in_the_way, True
    for uuid in uuids:
        lapsed = [x for x in before if x.state == "lapsed" and x.content["uuid"] == uuid]
        took = [
            {"name": x.entry.name, "ino": x.entry.ino, "ctime": x.entry.ctime}
            for x in sorted(lapsed, key=lambda x: x.entry.ctime)[-rules.TOOK_MOST :]
        ]
        claim = dict(content, uuid=uuid, up=clock.up, until=clock.wall + for_s, boot=boot_id, took=took)
        claim["from"] = clock.wall
        name = rules.file_name(uuid, content["lease"])
        if not (yield from _publish(name, rules.encode(claim), published)):
            # The name exists: another user guessed the lease id, or the lease was already taken here.
            entry = yield ("read", name, None)
            return None, [rules.judge(entry, clock, boot_id)] if entry is not None else [], True
    _, after = yield from survey(lambda name: name[: name.rfind(".") + 1] in stems, boot_id)
    mine = [x for x in after if x.entry.name in published and x.state == "live"]
    in_the_way = [x for x in after if any(rules.contradicts(x, y) for y in mine)]
    now = yield ("clock",)
    if in_the_way or now.up - clock.up >= HURRY_S or len(mine) < len(uuids):
        return None, in_the_way, False
    return now, [], False


def _sound(content: "Dict[str, Any]") -> None:
    """Refuse to write a claim that readers would reject as garbage."""
    trouble = rules.wrong(content)
    if trouble:
        raise Refuse("invalid", "invalid claim: %s" % trouble)


def _publish(name: str, data: bytes, published: "List[str]") -> "Steps":
    """Create ``name`` atomically and add it to ``published``; return False if it exists."""
    temporary = yield ("create", data)
    try:
        linked = yield ("link", temporary, name)
    except OSError:
        yield ("unlink", temporary)
        raise
    if linked:
        published.append(name)
    yield ("unlink", temporary)
    return linked


def withdraw(names: "List[str]") -> "Steps":
    """Remove own claims; missing ones are no error."""
    for name in names:
        yield ("unlink", name)


def _own(found: "List[Judged]", lease: str) -> "List[Judged]":
    """Return the valid claims for ``lease`` among this user's ``found``."""
    return [x for x in found if x.content is not None and x.content["lease"] == lease]


def _names_of(lease: str) -> "Callable[[str], bool]":
    return lambda name: name.endswith("." + lease)


def touch(leases: "List[str]", uid: int, boot_id: str) -> "Steps":
    """Send a heartbeat to this user's claims of ``leases``; return their state, as in docs/agent-protocol.md.

    If one claim of a lease has expired, all its claims here are removed: it cannot be revived, only taken again. One
    that cannot be read may have expired: it gets no heartbeat, only the others of its lease do.
    """
    suffixes = {"." + lease for lease in leases}
    result: "Dict[str, Any]" = {"alive": [], "lapsed": [], "missing": [], "claims": {}}
    unread: "Dict[str, str]" = {}
    yield ("lock", LOCK_WAIT_S)
    _, found = yield from survey(lambda name: name[name.rfind(".") :] in suffixes, boot_id, rules.MARGIN_S, uid, unread)
    for lease in leases:
        own = _own(found, lease)
        failed = sorted(name for name in unread if _names_of(lease)(name))
        if not own and not failed:
            result["missing"].append(lease)
            continue
        alive = all(x.state == "live" for x in own)
        for one in own if alive else ():
            alive = alive and (yield from _heartbeat(one))
        if not alive:
            yield from withdraw([x.entry.name for x in own])
            result["lapsed"].append(lease)
        elif failed:
            result.setdefault("unread", {})[lease] = "%s cannot be read: %s" % (failed[0], unread[failed[0]])
        else:
            result["alive"].append(lease)
            result["claims"][lease] = [x.content["uuid"] for x in own]
    yield ("unlock",)
    return result


def _heartbeat(one: "Judged") -> "Steps":
    """Touch one live claim; return False if others may have seen it as expired before."""
    clock = yield ("clock",)
    there = yield ("touch", one.entry.name, rules.stamp(one.content, clock.up))
    return there and not (yield from _may_have_expired(one))


def _may_have_expired(one: "Judged") -> "Steps":
    """Return whether others may have seen the claim, as read in ``one``, as expired by now."""
    clock = yield ("clock",)
    now = rules.judge(one.entry, clock, one.content["boot"], rules.MARGIN_S)
    return now.state != "live"


def renew(lease: str, for_s: float, uid: int, boot_id: str) -> "Steps":
    """Set the end of this user's lease to ``for_s`` from now; return the clock.

    Raises Refuse: not-found, not-yours, lapsed, disk, invalid.
    """
    yield ("lock", LOCK_WAIT_S)
    _, found = yield from survey(_names_of(lease), boot_id, rules.MARGIN_S, uid)
    own = _own(found, lease)
    if not own:
        yield ("unlock",)
        raise (yield from _not_ours(lease))
    alive = all(x.state == "live" for x in own)
    clock = yield ("clock",)
    try:
        for one in own if alive else ():
            _sound(_until(one, for_s, clock))  # all of them before any is replaced
        for one in own if alive else ():
            yield from _prolong(one, for_s, clock)
            alive = alive and not (yield from _may_have_expired(one))
    except OSError as error:
        yield ("unlock",)
        raise Refuse("disk", "cannot rewrite the claims: %s" % (error.strerror or error))
    if not alive:
        yield from withdraw([x.entry.name for x in own])
    yield ("unlock",)
    if not alive:
        raise Refuse("lapsed", "lease %s has expired; allocate again" % lease)
    return clock


def _until(one: "Judged", for_s: float, clock: "Clock") -> "Dict[str, Any]":
    return dict(one.content, until=rules.stamp(one.content, clock.up) + for_s, renewed=clock.up)


def _prolong(one: "Judged", for_s: float, clock: "Clock") -> "Steps":
    """Replace one claim atomically by one with a later end."""
    temporary = yield ("create", rules.encode(_until(one, for_s, clock)))
    try:
        yield ("touch", temporary, rules.stamp(one.content, clock.up))
        yield ("rename", temporary, one.entry.name)
    except OSError:
        yield ("unlink", temporary)
        raise


def release(lease: str, uid: int, boot_id: str) -> "Steps":
    """Remove this user's claims of ``lease`` (root: all users'); return their UUIDs.

    With the lock: a renewal at the same time would put back a claim that is removed before it is replaced.
    Raises Refuse: not-found, not-yours.
    """
    yield ("lock", LOCK_WAIT_S)
    clock = yield ("clock",)
    names = yield ("list", _names_of(lease))
    own = []
    for name in names:
        entry = yield ("read", name, uid or None)
        if entry is not None:
            own.append(rules.judge(entry, clock, boot_id))  # garbage too: own files may be removed
    yield from withdraw([x.entry.name for x in own])
    yield ("unlock",)
    if not own:
        raise (yield from _not_ours(lease))
    return [x.content["uuid"] for x in own if x.content is not None]


def _not_ours(lease: str) -> "Steps":
    names = yield ("list", _names_of(lease))
    for name in names[:OWNERS_ASKED]:
        owner = yield ("owner", name)
        if owner is not None:
            return Refuse("not-yours", "lease %s belongs to uid %d" % (lease, owner))
    return Refuse("not-found", "no lease %s on this node" % lease)


def sweep(uid: int, boot_id: str) -> "Steps":
    """Remove this user's expired claims; in a sticky folder other users cannot."""
    clock = yield ("clock",)
    names = yield ("list", lambda name: True)
    for name in names:
        try:
            entry = yield ("read", name, uid)
        except OSError:
            continue  # it can only block the GPU of its own name
        if entry is not None and rules.judge(entry, clock, boot_id).state == "lapsed":
            yield ("unlink", name)
