"""The keeper with real claims, real scripts, real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuboard.agent import proc
from gpuboard.agent.claims import store as claims
from gpuboard.keeper import client as keeper
from gpuboard.keeper import holder, runtime_dir
from gpuboard.keeper.timing import KeeperTiming
from tests.calls import calls_of
from tests.integration.keeper_lab import UUIDS, Lab, lab
from tests.security.hostile import fuse
from tests.waiting import read_line, until

__all__ = ["lab"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a claims folder must belong to root")


def opened(lab: Lab, pid: int) -> set[str]:
    """Return a keeper's open files except its folder, its sockets and those of the kernel."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(entry.path))
    return {name for name in found if not name.startswith(("anon_inode:", "socket:", str(lab.place)))}


def test_lease_ends_with_the_script(lab: Lab) -> None:
    script = lab.holding("ended1")
    assert lab.held() == lab.records() == {"ended1"}
    script.communicate("\n", timeout=60)
    until(lambda: not lab.held())
    until(lambda: not lab.records())
    until(lambda: not lab.keepers())
    assert not (lab.place / "socket").exists()


def test_lease_ends_with_a_script_killed(lab: Lab) -> None:
    script = lab.holding("killed1")
    script.kill()
    until(lambda: not lab.held())
    script.wait()


def test_training_outlives_the_script(lab: Lab) -> None:
    script = lab.started(lab.take("train1") + "nohup sleep 300 >/dev/null 2>&1 & echo go; echo $!")
    train = int(read_line(script))
    script.wait()
    until(lambda: train in lab.watched())
    assert lab.held() == {"train1"}
    os.kill(train, signal.SIGKILL)
    until(lambda: not lab.held())


def test_a_lease_of_another_keeper_gets_heartbeats_and_is_not_released(lab: Lab) -> None:
    folder = claims.Folder(str(lab.claims))
    args = {"lease": "else1", "uuids": [UUIDS[2]], "for_s": 3600.0, "nodes": ["n"], "gpus": 1}
    claims.handle("take", args, folder)
    lab.holding("mine1")
    with subprocess.Popen(["sleep", "300"]) as head:
        for lease, gpu in (("else1", 2), ("mine1", 0)):
            node = keeper.KeptNode("n", [UUIDS[gpu]], None, str(lab.claims), None)
            record = keeper.record(lease, [node], {}, holder.identify(head.pid), 3600.0, shared=True)
            keeper.hand_over(record, lab.env).confirm()
        claim = lab.claims / f"gpuboard.{UUIDS[2]}.else1"
        os.utime(claim, (time.time() - 20, time.time() - 20))
        keeper.renew("else1", 3600.0, lab.env)  # sends a heartbeat at once instead of after 30 s
        until(lambda: time.time() - claim.stat().st_mtime < 15)
        head.kill()
    until(lambda: lab.records() == {"mine1"})
    assert lab.held() == {"else1", "mine1"}, "neither is released: one is another keeper's, one has its own holder"


def test_a_lease_of_another_keeper_is_kept_while_any_of_several_runs_uses_it(lab: Lab) -> None:
    folder = claims.Folder(str(lab.claims))
    for uuid in UUIDS[1:3]:
        claims.handle("take", {"lease": "else1", "uuids": [uuid], "for_s": 3600.0, "nodes": ["n"], "gpus": 1}, folder)

    def run(node: str, uuid: str) -> subprocess.Popen[bytes]:
        head = subprocess.Popen(["sleep", "300"], start_new_session=True)
        kept = keeper.KeptNode(node, [uuid], None, str(lab.claims), None)
        record = keeper.record("else1", [kept], {}, holder.identify(head.pid), 3600.0, shared=True)
        keeper.hand_over(record, lab.env).confirm()
        return head

    first, second, third = run("n", UUIDS[1]), run("m", UUIDS[2]), run("n", UUIDS[2])
    with first, second, third:
        record = keeper.record_of("else1", lab.env)
        assert record is not None
        assert [(node.name, node.uuids) for node in record.nodes] == [("n", sorted(UUIDS[1:3])), ("m", [UUIDS[2]])]
        second.kill()
        second.wait()
        first.kill()
        until(lambda: f"else1: still used by pid {third.pid}" in lab.log())
        lab.signal_keeper(signal.SIGKILL)
        keeper.restart_if_needed(lab.env)
        until(lambda: "else1: taken over" in lab.log())
        assert lab.records() == {"else1"}
        third.kill()
    until(lambda: lab.records() == set())
    assert lab.held() == {"else1"}


def test_subshell_that_starts_the_training_later(lab: Lab) -> None:
    """/proc shows no variables of a fork: only its being orphaned shows that it may still use the lease."""
    os.mkfifo(lab.folder / "fifo")
    wait = f"while [ ! -e {lab.folder}/now ]; do read -t 0.1 <&5; done"  # a builtin: nothing is started
    later = f"exec 5<>{lab.folder}/fifo\n( {wait}; exec sleep 300 >/dev/null ) &\n"
    script = lab.started(lab.take("later1") + later + "echo go; echo $!")
    train = int(read_line(script))
    script.wait()
    until(lambda: "holder has ended" in lab.log())
    time.sleep(3.0)  # longer than one look for carriers takes
    assert lab.held() == {"later1"}
    (lab.folder / "now").touch()
    until(lambda: train in lab.watched())
    os.kill(train, signal.SIGKILL)
    until(lambda: not lab.held())


def test_process_on_the_gpu_keeps_the_lease(lab: Lab) -> None:
    """It has another session and no variables of the lease; NVML lists it."""
    hidden = "env -u GPUBOARD_LEASE setsid sleep 300 >/dev/null 2>&1 & echo $!\n"
    script = lab.started(lab.take("nvml1", gpu=1) + "echo go\n" + hidden + "read")
    train = int(read_line(script))
    lab.gpus({1: train})
    script.communicate("\n", timeout=60)
    until(lambda: "holder has ended" in lab.log())
    time.sleep(3.0)
    assert lab.held() == {"nvml1"}
    os.kill(train, signal.SIGKILL)
    lab.gpus()
    until(lambda: not lab.held())


def test_killed_keeper_is_started_again_by_the_next_command(lab: Lab) -> None:
    script = lab.holding("again1")
    first = lab.signal_keeper(signal.SIGKILL)
    assert keeper.restart_if_needed(lab.env) == []
    second = until(lab.keeper_pid)
    assert second != first
    until(lambda: "again1: taken over" in lab.log())
    assert keeper.restart_if_needed(lab.env) == []
    until(lambda: lab.keepers() == [second])  # the process that forked it has ended
    script.communicate("\n", timeout=60)
    until(lambda: not lab.held())


def test_holder_that_ended_while_no_keeper_ran(lab: Lab) -> None:
    script = lab.holding("gone1")
    lab.signal_keeper(signal.SIGKILL)
    script.communicate("\n", timeout=60)
    keeper.restart_if_needed(lab.env)
    until(lambda: not lab.held())


def test_two_starts_at_once_give_one_keeper(lab: Lab) -> None:
    scripts = [lab.bash(lab.take(f"twin{number}", number) + "echo go; read") for number in range(4)]
    for script in scripts:
        assert read_line(script) == "go\n"
    assert lab.records() == {f"twin{number}" for number in range(4)}
    until(lambda: lab.keepers() == [lab.keeper_pid()])
    for script in scripts:
        script.communicate("\n", timeout=60)
    until(lambda: not lab.held())


def test_keeper_resumed_late_does_not_renew_an_expired_claim(lab: Lab) -> None:
    lab.holding("late1")
    pid = lab.signal_keeper(signal.SIGSTOP)
    claim = lab.claims / f"gpuboard.{UUIDS[0]}.late1"
    os.utime(claim, (time.time() - 200, time.time() - 200))  # as after a suspension of 200 s
    args = {"lease": "other1", "uuids": [UUIDS[0]], "for_s": 60.0, "nodes": ["n"], "gpus": 1}
    claims.handle("take", args, claims.Folder(str(lab.claims)))
    os.kill(pid, signal.SIGCONT)
    keeper.renew("late1", 3600.0, lab.env)  # sends a heartbeat at once instead of after 30 s
    until(lambda: not lab.records())
    assert lab.held() == {"other1"}


@pytest.mark.parametrize("server", ["never answers", "fails"])
def test_heartbeats_continue_while_the_file_system_of_the_keepers_folder_hangs(lab: Lab, server: str) -> None:
    """As a mount that is "soft": a call fails after a while, and the next one waits again."""
    args = {"lease": "hang2", "uuids": [UUIDS[0]], "for_s": 3600.0, "nodes": ["n"], "gpus": 1}
    claims.handle("take", args, claims.Folder(str(lab.claims)))
    lab.adopt("hang2", timing=KeeperTiming(heartbeat_s=0.2, place_s=0.1, linger_s=0.1))
    keeper.renew("hang2", 3600.0, lab.env)  # answered when nothing is left to do in the folder
    claim = lab.claims / f"gpuboard.{UUIDS[0]}.hang2"
    try:
        with fuse(str(lab.place), server, uid=0):
            for _ in range(10):
                before = claim.stat().st_mtime_ns
                until(lambda at=before: claim.stat().st_mtime_ns != at, "a heartbeat", 5.0)  # type: ignore[misc]
    finally:
        keeper.forget("hang2", lab.env)
    until(lambda: lab.keeper_pid() is None)


def test_lost_lease_is_reported_once(lab: Lab) -> None:
    lab.holding("lost1")
    lab.signal_keeper(signal.SIGKILL)
    os.utime(lab.claims / f"gpuboard.{UUIDS[0]}.lost1", (time.time() - 200, time.time() - 200))
    assert keeper.restart_if_needed(lab.env) == []
    until((lab.place / "lost").exists)
    assert keeper.restart_if_needed(lab.env) == ["lease lost1 expired on n: no heartbeat from its keeper for 90 s"]
    assert keeper.restart_if_needed(lab.env) == []
    until(lambda: not lab.held() and not lab.records())


def test_claim_removed_by_hand_is_reported(lab: Lab) -> None:
    lab.holding("hand1")
    (lab.claims / f"gpuboard.{UUIDS[0]}.hand1").unlink()
    keeper.renew("hand1", 3600.0, lab.env)  # sends a heartbeat at once instead of after 30 s
    until(lambda: not lab.records())
    assert keeper.restart_if_needed(lab.env) == ["lease hand1 ended on n: released elsewhere, or its claim was removed"]


def test_one_of_two_claims_removed_by_hand_is_reported_and_the_other_kept(lab: Lab) -> None:
    node = keeper.KeptNode("n", list(UUIDS[:2]), None, str(lab.claims), None)
    args = {"lease": "hand2", "uuids": node.uuids, "for_s": 3600.0, "nodes": ["n"], "gpus": 2}
    claims.handle("take", args, claims.Folder(str(lab.claims)))
    keeper.hand_over(keeper.record("hand2", [node], {}, None, 3600.0), lab.env).confirm()
    (lab.claims / f"gpuboard.{UUIDS[1]}.hand2").unlink()
    keeper.renew("hand2", 3600.0, lab.env)  # sends a heartbeat at once instead of after 30 s
    until((lab.place / "lost").exists)
    words = f"lease hand2 lost {UUIDS[1]} on n: its claim was removed; it keeps its other GPUs"
    assert keeper.restart_if_needed(lab.env) == [words]
    claim = lab.claims / f"gpuboard.{UUIDS[0]}.hand2"
    os.utime(claim, (time.time() - 20, time.time() - 20))
    keeper.renew("hand2", 3600.0, lab.env)
    until(lambda: time.time() - claim.stat().st_mtime < 15)
    assert keeper.restart_if_needed(lab.env) == []
    assert lab.records() == {"hand2"}


def test_lease_ends_when_its_time_is_up(lab: Lab) -> None:
    lab.holding("time1")
    keeper.renew("time1", 8.0, lab.env)
    claims.handle("renew", {"lease": "time1", "for_s": 8.0}, claims.Folder(str(lab.claims)))
    until(lambda: not lab.held())
    until(lambda: "time1: its end time has passed" in lab.log())
    assert not (lab.place / "lost").exists()


def test_renewed_lease_outlives_its_first_end(lab: Lab) -> None:
    lab.holding("more1", seconds=20)
    claims.handle("renew", {"lease": "more1", "for_s": 3600.0}, claims.Folder(str(lab.claims)))
    keeper.renew("more1", 3600.0, lab.env)
    time.sleep(21.0)
    assert lab.held() == lab.records() == {"more1"}


def test_released_lease_gets_no_heartbeat(lab: Lab) -> None:
    lab.holding("free1")
    keeper.forget("free1", lab.env)
    assert lab.records() == set()
    assert lab.held() == {"free1"}


def test_lease_released_while_its_keeper_is_killed_is_no_loss(lab: Lab) -> None:
    lab.holding("free2")
    pid = lab.signal_keeper(signal.SIGSTOP)
    with calls_of(runtime_dir.send, lambda: os.kill(pid, signal.SIGKILL), at="return") as sent:
        keeper.forget("free2", lab.env)
    assert sent
    assert lab.records() == set()
    assert keeper.recover(lab.env) == []


def test_lease_released_while_its_keeper_starts_is_removed(lab: Lab) -> None:
    lab.holding("free3")
    lab.signal_keeper(signal.SIGKILL)
    until(lambda: not lab.keepers())

    def start() -> None:
        """Start a keeper, after none was found."""
        assert keeper.recover(lab.env) == []
        until(lambda: "free3: taken over" in lab.log())

    with calls_of(runtime_dir.connect, start, at="return") as connected:
        keeper.forget("free3", lab.env)
    assert connected
    until(lambda: "free3: released by its owner" in lab.log())
    until(lambda: lab.records() == set(), "a record goes after its lease is logged as released")


def test_two_commands_release_a_lease_without_a_keeper(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.holding("free4")
    lab.signal_keeper(signal.SIGKILL)
    until(lambda: not lab.keepers())
    unlink = os.unlink

    def second(path: str) -> None:
        unlink(path)  # by the other command
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", second)
        keeper.forget("free4", lab.env)
    assert lab.records() == set()


def test_keeper_inherits_nothing(lab: Lab) -> None:
    """No descriptor, variable, folder, session or parent of the command that started it."""
    script = lab.started("exec 7</dev/zero; export SLURM_PROCID=1\n" + lab.take("alone1") + "echo go; read")
    pid = lab.keeper_pid()
    assert pid is not None
    process = proc.read_process(pid)
    assert process is not None
    until(lambda: opened(lab, pid) == {"/dev/null"})  # apart from its own files, once the command has disconnected
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert process.session not in {0, os.getsid(0), script.pid}
    assert process.parent not in {script.pid, os.getpid()}
    assert b"GPUBOARD_LEASE" not in environ and b"SLURM_PROCID" not in environ
    assert (lab.place.stat().st_mode & 0o777, (lab.place / "alone1.json").stat().st_mode & 0o777) == (0o700, 0o600)


def test_holder_that_ended_before_the_handover_is_refused(lab: Lab) -> None:
    dead = subprocess.Popen(["true"])
    who = holder.Holder(os.uname().nodename, proc.boot_id(), dead.pid, 1)
    dead.wait()
    with pytest.raises(keeper.KeeperError, match=rf"pid {dead.pid}, has ended"):
        lab.adopt("never1", holder=who)
    assert lab.records() == set()


def test_holder_that_ends_during_the_handover_is_named(lab: Lab) -> None:
    sleeper = subprocess.Popen(["sleep", "300"])
    with socket.create_server(("127.0.0.1", 0)) as hung, ThreadPoolExecutor() as pool:
        config = lab.folder / "ssh_config"
        config.write_text(f"Host hung\n HostName 127.0.0.1\n Port {hung.getsockname()[1]}\n")
        node = keeper.KeptNode("hung", [UUIDS[0]], "hung", str(lab.claims), None)
        settings = {"ssh_config": str(config)}
        record = keeper.record("soon1", [node], settings, holder.identify(sleeper.pid), 60.0)
        handed = pool.submit(keeper.hand_over, record, lab.env)
        until(lambda: lab.records() == {"soon1"})
        sleeper.kill()
        sleeper.wait()
        with pytest.raises(
            keeper.KeeperError, match=f"refused the lease: the holder of lease soon1, pid {sleeper.pid}, has ended"
        ):
            handed.result()
    keeper.forget("soon1", lab.env)
    assert lab.records() == set()


def test_command_killed_before_its_owner_has_the_lease(lab: Lab) -> None:
    """The holder is alive, but never received the lease."""
    taker = lab.env | {"TAKER_SILENT": "1"}
    command = f"{lab.env['TAKE']} quiet1 {UUIDS[0]} {lab.claims} 3600 -"
    process = subprocess.Popen(command.split(), env=taker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert read_line(process) == "handed over\n"
    assert lab.held() == lab.records() == {"quiet1"}
    process.kill()
    process.communicate()
    until(lambda: not lab.held() and not lab.records())


def test_lease_without_claims_is_refused(lab: Lab) -> None:
    with pytest.raises(keeper.KeeperError, match="n: the claims of lease never2 do not exist"):
        lab.adopt("never2")
    assert lab.records() == set()


def test_record_that_cannot_be_written(lab: Lab) -> None:
    script = lab.holding("first1")
    (lab.place / "full1.json").mkdir()
    with pytest.raises(keeper.KeeperError, match=r"refused the lease: .*: Is a directory"):
        lab.adopt("full1", gpu=1)
    (lab.place / "full1.json").rmdir()
    assert lab.records() == {"first1"}
    script.kill()
    script.communicate()
    until(lambda: not lab.held())


def test_unreadable_record_is_renamed(lab: Lab) -> None:
    lab.holding("good1")
    lab.signal_keeper(signal.SIGKILL)
    (lab.place / "bad1.json").write_text('{"lease": "bad1"')
    keeper.restart_if_needed(lab.env)
    until(lambda: "good1: taken over" in lab.log())
    assert lab.records() == {"good1"}
    assert (lab.place / "bad1.json.bad").exists()
    assert keeper.restart_if_needed(lab.env) == ["lease bad1 gets no heartbeats: its record was damaged"]


def test_a_damaged_record_that_cannot_be_renamed_ends_no_keeper(lab: Lab) -> None:
    lab.holding("good3")
    lab.signal_keeper(signal.SIGKILL)
    (lab.place / "bad3.json").write_text('{"lease": "bad3"')
    (lab.place / "bad3.json.bad").mkdir()
    keeper.restart_if_needed(lab.env)
    until(lambda: "good3: taken over" in lab.log())


def test_a_lease_is_taken_over_when_its_record_can_be_read_again(lab: Lab) -> None:
    for number, lease in enumerate(("disk1", "good4")):
        lab.holding(lease, number)
    lab.signal_keeper(signal.SIGKILL)
    with fuse(str(lab.place / "disk1.json"), "is gone", uid=0):
        keeper.restart_if_needed(lab.env)
        until(lambda: "good4: taken over" in lab.log())
    until(lambda: "disk1: taken over" in lab.log())
    assert lab.records() == {"disk1", "good4"}


def test_a_record_removed_while_it_is_read_ends_no_keeper(lab: Lab) -> None:
    """As by a command that releases a lease while its keeper starts."""
    lab.holding("good2")
    lab.signal_keeper(signal.SIGKILL)
    until(lambda: not lab.keepers())
    record = lab.place / "gone1.json"  # read before good2.json
    os.mkfifo(record)
    keeper.restart_if_needed(lab.env)
    with record.open("wb"):  # returns when the keeper has opened it, too
        record.unlink()
    until(lambda: "good2: taken over" in lab.log())
    assert lab.records() == {"good2"}


def test_a_full_disk_ends_no_keeper_of_a_shared_lease(lab: Lab) -> None:
    folder = claims.Folder(str(lab.claims))
    claims.handle("take", {"lease": "else2", "uuids": UUIDS[1:2], "for_s": 3600.0, "nodes": ["n"], "gpus": 1}, folder)
    kept = keeper.KeptNode("n", [UUIDS[1]], None, str(lab.claims), None)
    heads = [subprocess.Popen(["sleep", "300"], start_new_session=True) for _ in range(2)]
    with heads[0], heads[1]:
        for head in heads:
            record = keeper.record("else2", [kept], {}, holder.identify(head.pid), 3600.0, shared=True)
            keeper.hand_over(record, lab.env).confirm()
        (lab.place / "else2.json").unlink()
        (lab.place / "else2.json").mkdir()  # the record cannot be replaced
        heads[0].kill()
        until(lambda: f"else2: still used by pid {heads[1].pid}" in lab.log())
        heads[1].kill()
        until(lambda: "else2: left to its own keeper" in lab.log())


def test_suspended_keeper_is_named(lab: Lab) -> None:
    lab.holding("stop1")
    lab.signal_keeper(signal.SIGSTOP)
    with pytest.raises(keeper.KeeperError, match="did not accept the lease within"):
        lab.adopt("stop2", timing=KeeperTiming(adopt_s=0.3))


def test_the_time_to_accept_a_lease_grows_with_the_rounds_of_connections(lab: Lab) -> None:
    lab.holding("stop4")
    lab.signal_keeper(signal.SIGSTOP)
    far = [keeper.KeptNode(f"gpu{n}", [UUIDS[n]], f"gpu{n}", str(lab.claims), None) for n in range(4)]
    record = keeper.record("many1", far, {"max_connections": 1}, None, 60.0)
    with pytest.raises(keeper.KeeperError, match="did not accept the lease within 2 s"):
        keeper.hand_over(record, lab.env, timing=KeeperTiming(adopt_remote_s=0.5))


def test_a_keeper_suspended_for_many_commands_hangs_none(lab: Lab) -> None:
    lab.holding("stop3")
    pid = lab.signal_keeper(signal.SIGSTOP)
    with contextlib.ExitStack() as commands, pytest.raises(keeper.KeeperError) as refused:
        for _ in range(100):  # more than its socket queues
            commands.callback(keeper.start_early(lab.env).close)
    assert str(refused.value) == f"the keeper, pid {pid}, is suspended; resume it with `kill -CONT {pid}`"
    os.kill(pid, signal.SIGCONT)
    until(lambda: keeper.recover(lab.env) == [])


def test_state_folder_that_cannot_be_written(lab: Lab) -> None:
    with pytest.raises(keeper.KeeperError, match="set XDG_STATE_HOME"):
        keeper.start_early({**lab.env, "XDG_STATE_HOME": "/proc"})


@pytest.mark.parametrize("ready", [True, False])
def test_keeper_that_ended_before_the_handover_is_started_again(lab: Lab, ready: bool) -> None:
    early = keeper.start_early(lab.env)  # claiming then takes longer than a keeper without leases runs
    first = until(lab.keeper_pid if ready else lambda: next(iter(lab.keepers()), None))
    for pid in lab.keepers():
        with contextlib.suppress(ProcessLookupError):  # it has already ended by itself
            os.kill(pid, signal.SIGKILL)
    until(lambda: not lab.keepers())

    sleeper = subprocess.Popen(["sleep", "60"])
    who = holder.identify(sleeper.pid)
    args = {"lease": "late1", "uuids": [UUIDS[0]], "for_s": 60.0, "holder": None, "nodes": ["n"], "gpus": 1}
    claims.handle("take", args, claims.Folder(str(lab.claims)))
    lab.adopt("late1", holder=who, started=early)
    assert lab.records() == {"late1"}
    assert lab.keeper_pid() not in {None, first}
    sleeper.kill()
    sleeper.wait()
    until(lambda: not lab.held())
