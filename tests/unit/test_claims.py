"""Claims as real files: their life, what one user can do to another's, the agent's reader."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.agent.claims import files, protocol
from gpuboard.agent.claims import store as claims
from gpuboard.agent.proc import boot_id
from gpuboard.model.reading import Claim
from tests.unit.claims_help import ALICE, BOB, age, ask, become, claims_folder, read, refused, root, take
from tests.waiting import Clock

__all__ = ["claims_folder"]


def test_a_life(folder: str) -> None:
    holder = {"host": "login1", "boot_id": "b", "pid": 42, "start": 7}
    began = time.monotonic()
    taken = take(folder, "k3f9", "GPU-a", "GPU-b", holder=holder, purpose="training")
    assert taken["until"] - taken["now"] == 600
    claim = read(folder)["k3f9 GPU-a"]
    passed_s = time.monotonic() - began + 0.1  # files are stamped by a coarser clock
    assert (claim.state, claim.uid, claim.gpus, claim.nodes) == ("live", os.geteuid(), 2, ["gpu01"])
    assert (claim.purpose, claim.host, msgspec.to_builtins(claim.holder)) == ("training", "login1", holder)
    assert 600 - passed_s < claim.remaining_s <= 600
    assert claim.age_s < passed_s
    assert ask("touch", folder, leases=["k3f9", "none"]) == {
        "alive": ["k3f9"], "lapsed": [], "missing": ["none"], "claims": {"k3f9": ["GPU-a", "GPU-b"]},
    }  # fmt: skip
    ask("renew", folder, lease="k3f9", for_s=6000.0)
    assert {round(c.remaining_s, -2) for c in read(folder).values()} == {6000}
    assert refused(lambda: take(folder, "zzzz", "GPU-b", "GPU-c"))[0] == "conflict"
    assert sorted(os.listdir(folder)) == ["gpuboard.GPU-a.k3f9", "gpuboard.GPU-b.k3f9"]
    assert sorted(ask("release", folder, lease="k3f9")["released"]) == ["GPU-a", "GPU-b"]
    assert os.listdir(folder) == []
    assert refused(lambda: ask("release", folder, lease="k3f9"))[0] == "not-found"
    assert refused(lambda: ask("renew", folder, lease="k3f9", for_s=1.0))[0] == "not-found"


def test_a_refusal_names_the_conflicting_owner(folder: str) -> None:
    take(folder, "k3f9", "GPU-a")
    with pytest.raises(claims.Refuse) as caught:
        take(folder, "zzzz", "GPU-b", "GPU-a")
    [claim] = msgspec.convert(caught.value.detail["claims"], list[Claim])
    assert (claim.lease, claim.uuid, claim.state, claim.owner) == ("k3f9", "GPU-a", "live", "root")


def in_job(folder: str, job: str | None) -> claims.Folder:
    found = claims.Folder(folder)
    found.job = job
    return found


def take_in(folder: claims.Folder, lease: str, *uuids: str) -> object:
    args = {"lease": lease, "uuids": list(uuids), "for_s": 600.0, "nodes": ["gpu01"], "gpus": len(uuids)}
    return claims.handle("take", args, folder)


def test_claims_of_another_job_do_not_conflict(folder: str) -> None:
    first, second, third = in_job(folder, "7"), in_job(folder, "8"), in_job(folder, None)
    take_in(first, "k3f9", "GPU-a")
    take_in(second, "zzzz", "GPU-a")
    assert refused(lambda: take_in(second, "yyyy", "GPU-a"))[0] == "conflict"
    assert refused(lambda: take_in(third, "xxxx", "GPU-a"))[0] == "conflict"
    assert [claim["lease"] for claim in first.read()[0]] == ["k3f9"]
    assert [(claim["lease"], claim["job"]) for claim in second.read()[0]] == [("zzzz", "8")]
    everything = third.read()[0]
    assert {claim["lease"]: claim["disputed_with"] for claim in everything} == {"k3f9": [], "zzzz": []}


def test_a_claim_outside_jobs_conflicts_with_all(folder: str) -> None:
    take_in(in_job(folder, None), "k3f9", "GPU-a")
    assert refused(lambda: take_in(in_job(folder, "7"), "zzzz", "GPU-a"))[0] == "conflict"
    assert [claim["lease"] for claim in in_job(folder, "7").read()[0]] == ["k3f9"]


def test_an_expired_claim_is_not_revived(folder: str) -> None:
    take(folder, "k3f9", "GPU-a", "GPU-b")
    age(folder, "gpuboard.GPU-a.k3f9", 95)
    claim = read(folder)["k3f9 GPU-a"]
    assert (claim.state, claim.reason) == ("lapsed", f"no heartbeat for {int(claim.age_s)} s")
    assert claim.age_s >= 95
    assert ask("touch", folder, leases=["k3f9"]) == {"alive": [], "lapsed": ["k3f9"], "missing": [], "claims": {}}
    assert os.listdir(folder) == []  # the other half too: never a part


def test_an_expired_claim_is_not_renewed(folder: str) -> None:
    take(folder, "k3f9", "GPU-a")
    age(folder, "gpuboard.GPU-a.k3f9", 95)
    assert refused(lambda: ask("renew", folder, lease="k3f9", for_s=600.0))[0] == "lapsed"
    assert os.listdir(folder) == []


def test_claims_end_with_their_time_and_with_their_boot(folder: str) -> None:
    take(folder, "aaaa", "GPU-a", for_s=100.0)
    take(folder, "bbbb", "GPU-b", for_s=1000.0)
    age(folder, "gpuboard.GPU-a.aaaa", 80)
    assert read(folder)["aaaa GPU-a"].state == "live"
    age(folder, "gpuboard.GPU-a.aaaa", 30)
    claim = read(folder)["aaaa GPU-a"]
    assert (claim.state, claim.reason) == (
        "lapsed",
        "its end time has passed",
    )
    file = Path(folder, "gpuboard.GPU-b.bbbb")
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another"}))
    assert read(folder)["bbbb GPU-b"].reason == "from another boot of this node"
    take(folder, "cccc", "GPU-a", "GPU-b")  # both can be had again, and what of them was ours is swept
    assert sorted(os.listdir(folder)) == ["gpuboard.GPU-a.cccc", "gpuboard.GPU-b.cccc"]


def test_invalid_claims_are_refused(folder: str) -> None:
    """Readers would reject them as garbage."""
    for changes, words in (
        ({"purpose": "x" * 513}, "purpose is not a text of at most 512 characters"),
        ({"for_s": 0.0}, "it would last 0 s"),
        ({"for_s": 400 * 86400.0}, "it would last 34560000 s"),
        ({"holder": {"pid": 1}}, "holder is not a process"),
    ):
        assert refused(lambda changes=changes: take(folder, "k3f9", "GPU-a", **changes)) == (  # type: ignore[misc]
            "invalid",
            f"invalid claim: {words}",
        )
    assert refused(lambda: take(folder, "k3f9", "GPU-a", "../GPU-b"))[0] == "invalid"
    assert refused(lambda: take(folder, "../k3f9", "GPU-a"))[0] == "invalid"
    take(folder, "k3f9", "GPU-a")
    assert refused(lambda: ask("renew", folder, lease="k3f9", for_s=400 * 86400.0))[0] == "invalid"
    assert ask("touch", folder, leases=["k3f9"])["alive"] == ["k3f9"]


@root
def test_what_alice_holds_bob_can_neither_remove_nor_forge(folder: str) -> None:
    """By gpuboard and by hand; afterwards her claim is what it was."""
    assert "until" in become(ALICE, lambda: take(folder, "k3f9", "GPU-a"))
    path = f"{folder}/gpuboard.GPU-a.k3f9"
    before = (Path(path).read_bytes(), os.stat(path).st_mtime_ns, os.stat(path).st_ino)
    own = f"{folder}/bobs"
    become(BOB, lambda: Path(own).write_text("x") and None)

    def overwrite() -> None:
        os.close(os.open(path, os.O_WRONLY))

    tricks: dict[str, Callable[[], Any]] = {
        "release": lambda: ask("release", folder, lease="k3f9"),
        "renew": lambda: ask("renew", folder, lease="k3f9", for_s=1.0),
        "take": lambda: take(folder, "zzzz", "GPU-a"),
        "take under her name": lambda: take(folder, "k3f9", "GPU-a"),
        "unlink": lambda: os.unlink(path),
        "overwrite": overwrite,
        "truncate": lambda: os.truncate(path, 0),
        "rename over": lambda: os.rename(own, path),
        "rename away": lambda: os.rename(path, own),
        "link over": lambda: os.link(own, path),
        "pre-date": lambda: os.utime(path, (0, 0)),
        "extend": lambda: os.utime(path),
        "chmod": lambda: os.chmod(path, 0o666),
        "chown": lambda: os.chown(own, ALICE, ALICE),
        "remove the folder": lambda: os.rename(folder, folder + "x"),
    }
    got = {name: become(BOB, trick) for name, trick in tricks.items()}
    assert {name: value[0] if value else value for name, value in got.items()} == {
        "release": "not-yours", "renew": "not-yours", "take": "conflict", "take under her name": "conflict",
        "unlink": "EPERM", "overwrite": "EACCES", "truncate": "EACCES", "rename over": "EPERM", "rename away": "EPERM",
        "link over": "EEXIST", "pre-date": "EPERM", "extend": "EACCES", "chmod": "EPERM", "chown": "EPERM",
        "remove the folder": "EPERM",
    }  # fmt: skip
    touched = become(BOB, lambda: ask("touch", folder, leases=["k3f9"]))
    assert touched == {"alive": [], "lapsed": [], "missing": ["k3f9"], "claims": {}}
    assert (Path(path).read_bytes(), os.stat(path).st_mtime_ns, os.stat(path).st_ino) == before
    assert read(folder)["k3f9 GPU-a"].uid == ALICE
    assert ask("release", folder, lease="k3f9") == {"released": ["GPU-a"]}  # root may


@root
def test_a_claim_under_her_lease_id_is_not_hers(folder: str) -> None:
    become(ALICE, lambda: take(folder, "k3f9", "GPU-a"))
    become(BOB, lambda: take(folder, "k3f9", "GPU-b"))
    assert {key: claim.uid for key, claim in read(folder).items()} == {"k3f9 GPU-a": ALICE, "k3f9 GPU-b": BOB}
    assert become(BOB, lambda: ask("release", folder, lease="k3f9")) == {"released": ["GPU-b"]}
    assert list(read(folder)) == ["k3f9 GPU-a"]


@root
def test_a_dispute_is_shown_with_both_names(folder: str) -> None:
    """Bob calls alice's live claim lapsed by publishing his own by hand: a third finds the GPU blocked."""
    become(ALICE, lambda: take(folder, "k3f9", "GPU-a"))
    hers = Path(folder, "gpuboard.GPU-a.k3f9")
    forged = {**json.loads(hers.read_text()), "lease": "zzzz", "took": [{"name": hers.name}]}
    become(BOB, lambda: Path(folder, "gpuboard.GPU-a.zzzz").write_text(json.dumps(forged)) and None)
    found = read(folder)
    assert found["k3f9 GPU-a"].disputed_with == ["zzzz"]
    assert found["k3f9 GPU-a"].reason == "zzzz of 20002 took this over as expired"
    assert found["zzzz GPU-a"].disputed_with == ["k3f9"]
    assert found["zzzz GPU-a"].reason == "took over k3f9 of 20001 as expired, but it is live"
    assert become(BOB + 1, lambda: take(folder, "cccc", "GPU-a"))[0] == "conflict"
    assert become(ALICE, lambda: ask("touch", folder, leases=["k3f9"]))["alive"] == ["k3f9"]  # hers does not give way


def test_a_share_contradicts_the_whole_but_not_another_share(folder: str) -> None:
    take(folder, "aaaa", "GPU-a", share=2**30)
    assert refused(lambda: take(folder, "bbbb", "GPU-a"))[0] == "conflict"
    take(folder, "cccc", "GPU-a", share=2**30)
    assert [claim.disputed_with for claim in read(folder).values()] == [[], []]


def test_a_reader_sees_every_change_at_once(folder: str) -> None:
    reader = claims.Folder(folder)
    rng = random.Random(1)
    held: dict[str, str] = {}
    for number in range(200):
        if held and rng.random() < 0.4:
            uuid = rng.choice(sorted(held))
            ask("release", folder, lease=held.pop(uuid))
        elif len(held) < 6:
            uuid = rng.choice([f"GPU-{i}" for i in range(8) if f"GPU-{i}" not in held])
            take(folder, f"a{number}", uuid)
            held[uuid] = f"a{number}"
        found, error = reader.read()
        assert error is None
        assert {claim["uuid"]: claim["lease"] for claim in found} == held


def test_a_quiet_folder_full_of_other_files_is_not_read_again(folder: str) -> None:
    for number in range(300):
        Path(folder, f"other-{number}").touch()
    take(folder, "k3f9", "GPU-a")
    reader = claims.Folder(folder)
    clock = Clock()
    lists = 0

    class Counting(files.Files):
        def names(self) -> Iterator[tuple[str, int]]:
            nonlocal lists
            lists += 1
            return super().names()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "Files", Counting)
        before = -1
        while lists != before:  # while the folder's mtime is too recent to distinguish changes
            assert clock.spent_s() < 10.0
            before = lists
            reader.read()
    assert lists >= 1


@root
def test_one_user_cannot_keep_others_from_taking(folder: str) -> None:
    """Bob leaves 700 lapsed claims on one GPU; to name them all, alice's claim would have to be larger than is read."""
    become(BOB, lambda: take(folder, "aaaa", "GPU-a"))
    age(folder, "gpuboard.GPU-a.aaaa", 100)
    content = json.loads(Path(folder, "gpuboard.GPU-a.aaaa").read_text())
    for number in range(700):
        lease = f"left{number:04}"
        path = Path(folder, f"gpuboard.GPU-a.{lease}")
        path.write_text(json.dumps({**content, "lease": lease}))
        os.chown(path, BOB, BOB)
        os.utime(path, (content["from"], content["from"]))
    assert "until" in become(ALICE, lambda: take(folder, "k3f9", "GPU-a"))
    assert read(folder)["k3f9 GPU-a"].state == "live"
    assert len(json.loads(Path(folder, "gpuboard.GPU-a.k3f9").read_text())["took"]) == 16


def test_a_release_during_a_renewal_leaves_no_claim(folder: str) -> None:
    """The renewal has read the claim that it replaces; the release then waits for its end."""
    take(folder, "k3f9", "GPU-a")
    waits = threading.Event()

    class Releasing(files.Files):
        def lock(self, wait_s: float) -> bool:
            waits.set()
            return super().lock(600.0)  # as long as the renewal takes on this machine

    def release() -> None:
        with contextlib.closing(Releasing(folder)) as opened:
            protocol.drive(protocol.release("k3f9", os.geteuid(), boot_id()), opened)
        waits.set()

    releasing = threading.Thread(target=release)

    class Renewing(files.Files):
        def rename(self, temporary: str, name: str) -> None:
            releasing.start()
            waits.wait()
            super().rename(temporary, name)

    with contextlib.closing(Renewing(folder)) as opened:
        protocol.drive(protocol.renew("k3f9", 600.0, os.geteuid(), boot_id()), opened)
    releasing.join()
    assert os.listdir(folder) == []
