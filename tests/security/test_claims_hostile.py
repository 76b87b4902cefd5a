"""What a hostile user puts into a node's folder of claims is his alone: real users, real files, each attack by hand."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.claims import files as claims_files
from gpuboard.agent.claims import rules
from gpuboard.agent.claims import store as claims
from tests.security.hostile import Counted, acl, by_hand, fuse, names, states, write_lease
from tests.unit.claims_help import ALICE, BOB, ask, become, claims_folder, read, refused, root, take

__all__ = ["claims_folder"]

pytestmark = root
CAROL = 20003
READING = 4 * 2**20  # bytes of a line of the protocol


@pytest.fixture(name="shared")
def shared_folder() -> Iterator[str]:
    """A folder of alice on the same file system, writable by all and not sticky."""
    with tempfile.TemporaryDirectory(prefix="alices-", dir="/var/tmp") as path:
        os.chmod(path, 0o777)
        os.chown(path, ALICE, ALICE)
        yield path


def alice_holds(folder: str, *uuids: str) -> None:
    assert "until" in become(ALICE, lambda: take(folder, "k3f9", *(uuids or ("GPU-a",))))


def alice_keeps(folder: str) -> None:
    """Heartbeat, renewal and release work."""
    touched = become(ALICE, lambda: ask("touch", folder, leases=["k3f9"]))
    assert touched == {"alive": ["k3f9"], "lapsed": [], "missing": [], "claims": {"k3f9": ["GPU-a"]}}
    assert "until" in become(ALICE, lambda: ask("renew", folder, lease="k3f9", for_s=6000.0))
    assert become(ALICE, lambda: ask("release", folder, lease="k3f9")) == {"released": ["GPU-a"]}


def make(path: str, uid: int, data: bytes = b"x", mode: int = 0o644) -> None:
    Path(path).write_bytes(data)
    os.chmod(path, mode)
    os.chown(path, uid, uid)


# 1. Errors of foreign entries.


def test_a_write_lease_on_a_foreign_file_ends_no_survey(folder: str) -> None:
    alice_holds(folder)
    make(f"{folder}/gpuboard.GPU-b.zzzz", BOB)
    with write_lease(f"{folder}/gpuboard.GPU-b.zzzz"):
        assert states(folder, CAROL) == {"k3f9 GPU-a": "live", "zzzz GPU-b": "garbage"}
        assert become(CAROL, lambda: read(folder)["zzzz GPU-b"].reason) == (
            "gpuboard.GPU-b.zzzz: not readable: Resource temporarily unavailable"
        )
        assert become(CAROL, lambda: take(folder, "cccc", "GPU-a"))[0] == "conflict"
        assert "until" in become(CAROL, lambda: take(folder, "cccc", "GPU-b"))


def test_a_write_lease_under_her_lease_id_hinders_alice_in_nothing(folder: str) -> None:
    alice_holds(folder)
    make(f"{folder}/gpuboard.GPU-b.k3f9", BOB)
    with write_lease(f"{folder}/gpuboard.GPU-b.k3f9"):
        alice_keeps(folder)


@pytest.mark.parametrize("kind", ["denies", "never answers", "is gone"])
def test_a_file_system_mounted_on_a_claims_name_is_its_owners_garbage(kind: str, folder: str) -> None:
    alice_holds(folder)
    for name in ("gpuboard.GPU-b.zzzz", "gpuboard.GPU-b.k3f9", ".gpuboard-claim.1.zzzz"):
        make(f"{folder}/{name}", BOB)
    with contextlib.ExitStack() as mounts:
        for name in ("gpuboard.GPU-b.zzzz", "gpuboard.GPU-b.k3f9", ".gpuboard-claim.1.zzzz"):
            mounts.enter_context(fuse(f"{folder}/{name}", kind))
        began = time.monotonic()
        for reader in (CAROL, 0):
            expected = {"k3f9 GPU-a": "live", "zzzz GPU-b": "garbage", "k3f9 GPU-b": "garbage"}
            assert states(folder, reader) == expected
        found = read(folder)["zzzz GPU-b"]
        assert (found.uid, found.reason) == (BOB, "gpuboard.GPU-b.zzzz: a file system is mounted on it")
        assert "until" in become(CAROL, lambda: take(folder, "cccc", "GPU-b"))
        assert ask("release", folder, lease="zzzz") == {"released": []}  # root's, on what cannot be unlinked
        alice_keeps(folder)
        assert time.monotonic() - began < 60.0  # nothing has waited until the mount was taken away


def fails_to_read(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``step`` of claims_files.Files fail for one file, as on a bad sector."""
    real = getattr(claims_files.Files, step)

    def failing(files: Any, what: Any) -> Any:
        path = what if isinstance(what, str) else os.readlink(f"/proc/self/fd/{what}")
        if path.endswith(name):
            raise OSError(errno.EIO, "Input/output error")
        return real(files, what)

    monkeypatch.setattr(claims_files.Files, step, failing)


@pytest.mark.parametrize("step", ["_pin", "_bytes"])
def test_a_claim_that_the_disk_cannot_read_blocks_its_gpu(
    step: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector below alice's claim frees nothing; another GPU is had as before."""
    alice_holds(folder)
    fails_to_read("gpuboard.GPU-a.k3f9", step, monkeypatch)
    [claim] = read(folder).values()
    assert (claim.state, claim.uuid, claim.reason) == ("live", "GPU-a", "not readable: Input/output error")
    assert become(BOB, lambda: take(folder, "zzzz", "GPU-a"))[0] == "disk"
    assert "until" in become(BOB, lambda: take(folder, "zzzz", "GPU-b"))
    monkeypatch.undo()
    assert read(folder)["k3f9 GPU-a"].uid == ALICE


@pytest.mark.parametrize("step", ["_pin", "_bytes"])
def test_a_claim_that_the_disk_cannot_read_costs_no_other_claim_its_heartbeats(
    step: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice_holds(folder, "GPU-a", "GPU-b")
    assert "until" in become(ALICE, lambda: take(folder, "m2x7", "GPU-c"))
    fails_to_read("gpuboard.GPU-a.k3f9", step, monkeypatch)

    def mtimes() -> dict[str, int]:
        return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)}

    before = mtimes()
    assert become(ALICE, lambda: ask("touch", folder, leases=["k3f9", "m2x7", "none"])) == {
        "alive": ["m2x7"], "lapsed": [], "missing": ["none"], "claims": {"m2x7": ["GPU-c"]},
        "unread": {"k3f9": "gpuboard.GPU-a.k3f9 cannot be read: Input/output error"},
    }  # fmt: skip
    changed = {name for name, mtime in mtimes().items() if before[name] != mtime}
    assert changed == {"gpuboard.GPU-b.k3f9", "gpuboard.GPU-c.m2x7"}


def test_a_reader_without_descriptors_calls_nothing_free(folder: str) -> None:
    alice_holds(folder)

    def starved() -> list[str]:
        answers = []
        reader = claims.Folder(folder)
        used = len(os.listdir("/proc/self/fd"))
        for spare in [*range(8), *range(7, -1, -1)]:  # the second time it knows the folder and the claim
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 256))
            found, error = reader.read()
            states = [claim["state"] for claim in found] or ["not read" if error else "nothing claimed"]
            answers.append(" ".join(states))
        return answers

    answers = become(BOB, starved)
    assert answers[0] == "not read"
    assert answers[7] == "live"
    assert set(answers) == {"not read", "live"}


# 2 and 3. Files of hers that bob may write, link or move.


@pytest.mark.parametrize("how", ["hard links", "moved files"])
def test_files_of_others_in_the_folder_hide_no_claim(how: str, folder: str, shared: str) -> None:
    uuids = [f"GPU-{number:02}" for number in range(16)]
    alice_holds(folder, *uuids)
    if how == "hard links":
        make(f"{shared}/notes", ALICE, mode=0o666)
    else:
        for number in range(600):
            make(f"{shared}/notes{number}", ALICE, b"{}")

    def crowd() -> None:
        for number, lease in enumerate(names("a", 600)):
            name = f"{folder}/gpuboard.GPU-00.{lease}"
            os.link(f"{shared}/notes", name) if how == "hard links" else os.rename(f"{shared}/notes{number}", name)

    assert become(BOB, crowd) is None
    found = states(folder, CAROL)
    assert [found.get(f"k3f9 {uuid}") for uuid in uuids] == ["live"] * 16
    for uuid in uuids:
        assert become(CAROL, functools.partial(take, folder, "cccc", uuid))[0] == "conflict"
    assert become(ALICE, lambda: ask("touch", folder, leases=["k3f9"]))["alive"] == ["k3f9"]


@pytest.mark.parametrize("way", ["mode 0666", "mode 0664", "an ACL"])
def test_a_claim_in_anothers_name_does_not_count(way: str, folder: str, shared: str) -> None:
    """Bob writes a claim's content into a file of alice that he may write, and links it as a claim."""
    make(f"{shared}/notes", ALICE, mode=0o664 if way == "mode 0664" else 0o644 if way == "an ACL" else 0o666)
    if way == "mode 0664":
        os.chown(f"{shared}/notes", ALICE, BOB)
    elif way == "an ACL":
        acl(f"{shared}/notes", "access", user=6, bob=6, group=4, mask=6, other=4)
    os.chown(shared, 0, 0)
    os.chmod(shared, 0o1777)
    by_hand(shared, BOB, ("GPU-a", "zzzz"))

    def forge() -> None:
        Path(shared, "notes").write_bytes(Path(shared, "gpuboard.GPU-a.zzzz").read_bytes())
        os.link(f"{shared}/notes", f"{folder}/gpuboard.GPU-a.zzzz")

    assert become(BOB, forge) is None
    claim = read(folder)["zzzz GPU-a"]
    assert (claim.state, claim.uid, claim.reason) == ("garbage", ALICE, "gpuboard.GPU-a.zzzz: others may write it")
    assert "until" in become(CAROL, lambda: take(folder, "cccc", "GPU-a"))


def test_links_that_others_add_to_her_claim_hide_nothing(folder: str) -> None:
    """Where fs.protected_hardlinks is off bob can link any file; root makes the links here, in his place."""
    alice_holds(folder)
    for lease in names("a", 40):
        os.link(f"{folder}/gpuboard.GPU-a.k3f9", f"{folder}/gpuboard.GPU-a.{lease}")
    assert {key: state for key, state in states(folder, BOB).items() if state == "live"} == {"k3f9 GPU-a": "live"}
    assert become(BOB, lambda: take(folder, "zzzz", "GPU-a"))[0] == "conflict"
    alice_keeps(folder)


def test_a_claim_is_valid_under_any_umask_and_default_acl(folder: str) -> None:
    acl(folder, "default", user=7, bob=7, group=7, mask=7, other=7)

    def careless() -> Any:
        os.umask(0)
        return take(folder, "k3f9", "GPU-a")

    assert "until" in become(ALICE, careless)
    assert states(folder, BOB) == {"k3f9 GPU-a": "live"}
    assert become(BOB, lambda: os.close(os.open(f"{folder}/gpuboard.GPU-a.k3f9", os.O_WRONLY)))[0] == "EACCES"
    alice_keeps(folder)


# 4. What one user's claims cost.


def test_many_claims_on_one_gpu_are_a_short_conflict(folder: str) -> None:
    alice_holds(folder)
    by_hand(folder, BOB, *(("GPU-a", lease) for lease in names("z", 511)))
    found = claims.Folder(folder).read()[0]
    assert len(json.dumps(found)) < 1024 * len(found)
    [hers] = [claim for claim in found if claim["uid"] == ALICE]
    assert hers["state"] == "live"
    assert hers["reason"] == f"in conflict with 511 claims of {BOB}, first z00000"
    assert hers["disputed_with"] == names("z", 16)
    his = next(claim for claim in found if claim["lease"] == "z00000")
    assert his["reason"] == f"in conflict with k3f9 of {ALICE}; in conflict with 510 claims of {BOB}, first z00001"
    kind, message = become(CAROL, lambda: take(folder, "cccc", "GPU-a"))
    assert kind == "conflict"
    assert len(message) < 1000
    alice_keeps(folder)


def test_a_reading_always_fits(folder: str) -> None:
    """6,000 claims of one user, 200 of each of 10 others, each of the largest size; alice has 16."""
    alice_holds(folder, *(f"GPU-{number:02}" for number in range(16)))
    by_hand(folder, BOB, *(("GPU-00", lease) for lease in names("b", 6000)))
    for number in range(10):
        claimed = ((f"GPU-{number:02}", lease) for lease in names(f"c{number}", 200))
        by_hand(folder, 30000 + number, *claimed, purpose="\x01" * 512, nodes=["n" * 255] * 4)
    found, error = claims.Folder(folder).read()
    assert error is None
    assert len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()) < 0.85 * READING
    by_user: dict[int, int] = {}
    for claim in found:
        by_user[claim["uid"]] = by_user.get(claim["uid"], 0) + (claim["state"] == "live")
    assert by_user[ALICE] == 16
    assert min(by_user.values()) > 15
    [cut] = [claim["reason"] for claim in found if claim["uid"] == BOB and claim["state"] == "garbage"]
    assert cut == f"{6000 - by_user[BOB]} more claims are not shown"


def test_garbage_costs_a_check_each_and_its_owner_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is looked at once, none of them is read; afterwards a reading looks at what it shows alone."""
    alice_holds(folder)
    for number, lease in enumerate(names("z", 3000)):
        if number % 2:
            os.mkfifo(f"{folder}/gpuboard.GPU-a.{lease}")
            os.chown(f"{folder}/gpuboard.GPU-a.{lease}", BOB, BOB)
        else:
            make(f"{folder}/gpuboard.GPU-a.{lease}", BOB, mode=0o666)
    reader = claims.Folder(folder)
    counted = Counted(monkeypatch)
    found, _ = reader.read()
    first, counted.calls = counted.calls, {}
    assert len(found) < 100
    assert found[-1]["reason"] == f"{3000 - len(found) + 2} more files are not claims"
    assert found[-1]["uid"] == BOB
    assert first["open"] < 2 * 3001 + 20  # its pin, and the mount that is on
    Path(folder, "gpuboard.GPU-b.zzzz").touch()
    reader.read()
    assert counted.calls["open"] < 400, counted.calls


def test_new_claims_are_seen_among_garbage_that_changes_all_the_time(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search among all files, of which each is opened, takes a small part of the time."""
    for lease in names("z", 2000):
        make(f"{folder}/gpuboard.GPU-b.{lease}", BOB, mode=0o666)
    reader = claims.Folder(folder)
    counted = Counted(monkeypatch)
    searches: list[tuple[float, float, float]] = []  # begin, end, CPU time
    until = time.monotonic() + 60

    def reading() -> set[str]:
        assert time.monotonic() < until
        Path(folder, "gpuboard.GPU-b.z00000").unlink()
        make(f"{folder}/gpuboard.GPU-b.z00000", BOB, mode=0o666)
        counted.calls = {}
        begin, used = time.monotonic(), time.process_time()
        found, _ = reader.read()
        if counted.calls["open"] >= 2000:
            searches.append((begin, time.monotonic(), time.process_time() - used))
        return {claim["lease"] for claim in found if claim["state"] == "live"}

    for number in range(1, 6):
        become(ALICE, lambda number=number: take(folder, f"k{number}", f"GPU-{number}"))  # type: ignore[misc]
        while len(reading()) < number:
            time.sleep(0.02)  # the pace of the readings
    while len(searches) < 2:
        time.sleep(0.02)
        reading()
    for (_, end, used), (begin, _, _) in pairwise(searches):
        assert begin - end > 15 * used, searches


# 11. Claims without a process.

UP, WALL = 10_000.0, 1_700_000_000.0


def staggered(offset: float) -> rules.Entry:
    """Return a claim made at UP that records a wall clock ``offset`` seconds back."""
    content: dict[str, Any] = {
        "lease": "zzzz", "uuid": "GPU-a", "share": None, "holder": None, "nodes": [], "gpus": 1, "purpose": "",
        "host": "", "boot": "b", "took": [], "from": WALL - offset, "up": UP, "until": WALL - offset + 86400.0,
    }  # fmt: skip
    return rules.Entry("gpuboard.GPU-a.zzzz", BOB, 1, WALL, WALL, rules.encode(content), "")


def lives(entry: rules.Entry, later_s: float, stamps: list[float]) -> bool:
    clock = rules.Clock(WALL + later_s, UP + later_s)
    return bool(rules.without_step(rules.judge(entry, clock, "b"), clock, stamps).state == "live")


def test_claims_dated_back_do_not_come_alive_one_after_another() -> None:
    """40 claims made at once, each for the next 90 s. The kernel stamps some file of root's every 5 minutes."""
    claimed = [staggered(90.0 * number) for number in range(40)]
    alive = []
    for later_s in range(0, 3600, 15):
        stamps = [WALL + at for at in range(-86400, later_s + 1, 300)]
        if any(lives(entry, later_s, stamps) for entry in claimed):
            alive.append(later_s)
    assert alive[0] == 0
    assert alive[-1] <= 300 + 2 * rules.LIFE_S


def test_a_step_of_the_clock_that_happened_is_not_disproved() -> None:
    """The clock is set forward an hour 40 s after a heartbeat: nothing can be stamped in that hour."""
    entry = staggered(0.0)
    for after_s in range(0, 45, 5):
        wall = WALL + 40 + 3600 + after_s
        clock = rules.Clock(wall, UP + 40 + after_s)
        stamps = [WALL - 100, WALL, WALL + 39, WALL + 3640, wall]
        assert rules.without_step(rules.judge(entry, clock, "b"), clock, stamps).state == "live"


def test_the_kernels_stamps_of_this_node(folder: str) -> None:
    files = claims_files.Files(folder)
    with tempfile.NamedTemporaryFile(prefix="gpuboard-stamp-", dir="/run") as file:
        assert os.stat(file.name).st_ctime in files.stamps()
    files.close()


@pytest.fixture(name="site")
def site_config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_max_lease_of_the_node_holds_for_all_that_read_there(folder: str, site: Path) -> None:
    become(BOB, lambda: take(folder, "zzzz", "GPU-a", for_s=86400.0, site_config=str(site)))
    site.write_text('# the site\nmax_lease = "1h30m"  # at most\n[slurm]\nmax_lease = "9h"\n')
    words = f"this node allows leases of at most 1.5 h (max_lease in {site})"
    assert refused(lambda: take(folder, "cccc", "GPU-b", for_s=5401.0, site_config=str(site))) == ("invalid", words)
    renewed = refused(lambda: ask("renew", folder, lease="zzzz", for_s=5401.0, site_config=str(site)))
    assert renewed == ("invalid", words)
    assert 5390 < read(folder, str(site))["zzzz GPU-a"].remaining_s <= 5400
    file = Path(folder, "gpuboard.GPU-a.zzzz")
    content = json.loads(file.read_text())
    old = {**content, "from": content["from"] - 6000, "up": content["up"] - 6000}
    file.write_text(json.dumps(old))
    claim = read(folder, str(site))["zzzz GPU-a"]
    assert (claim.state, claim.reason) == (
        "lapsed",
        "its end time has passed",
    )
    file.write_text(json.dumps({**old, "renewed": content["up"]}))
    assert read(folder, str(site))["zzzz GPU-a"].state == "live"
    file.write_text(json.dumps({**old, "renewed": content["up"] + 1e6}))
    assert read(folder, str(site))["zzzz GPU-a"].reason.endswith("dated in the future")


def test_a_renewal_counts_from_its_own_time(folder: str, site: Path) -> None:
    take(folder, "k3f9", "GPU-a", for_s=3000.0, site_config=str(site))
    site.write_text('max_lease = "1h"\n')
    ask("renew", folder, lease="k3f9", for_s=3600.0, site_config=str(site))
    assert 3590 < read(folder, str(site))["k3f9 GPU-a"].remaining_s <= 3600
    assert json.loads(Path(folder, "gpuboard.GPU-a.k3f9").read_text())["renewed"] > 0


@pytest.mark.parametrize("way", ["another's", "others may write", "a FIFO", "no duration"])
def test_max_lease_counts_only_if_root_alone_can_write_it(way: str, folder: str, site: Path) -> None:
    if way == "a FIFO":
        os.mkfifo(site)
    else:
        site.write_text("max_lease = 5\n" if way == "no duration" else 'max_lease = "1s"\n')
    if way == "another's":
        os.chown(site, BOB, BOB)
    elif way == "others may write":
        site.chmod(0o666)
    take(folder, "k3f9", "GPU-a", for_s=7 * 86400.0, site_config=str(site))
    assert read(folder, str(site))["k3f9 GPU-a"].state == "live"
