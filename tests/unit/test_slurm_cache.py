"""Slurm's answers are shared safely, and queried rarely."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuboard import files
from gpuboard.config import Settings
from gpuboard.errors import NoNodeReached
from gpuboard.leases.slurm.schedule import schedule_of
from gpuboard.model.schedule import Schedule, SchedulerNode
from gpuboard.scheduler.find import find
from gpuboard.scheduler.slurm import service as slurm
from gpuboard.scheduler.slurm.cache import Cache, CachedAnswer, now
from gpuboard.scheduler.slurm.query_cycle import CycleResult
from gpuboard.scheduler.slurm.site import here
from tests.calls import calls_of
from tests.slurmtext import FOLDER
from tests.waiting import Stopwatch, until

SCHEDULE = Schedule(1.0, "lab", {"gpu01": SchedulerNode("gpu01", "gpu01", "", "idle")})


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}


def stored(env: Mapping[str, str], key: str = "k") -> tuple[Cache, CachedAnswer, Path]:
    """Return a cache with a record in it, that record, and the file."""
    cache = Cache(env, key)
    record = CachedAnswer(cache.boot, asked=now() - 5, schedule=SCHEDULE, answered=now() - 5, credit_s=15.0)
    cache.store(record)
    (path,) = [path for path in Path(env["XDG_CACHE_HOME"]).rglob("slurm-*") if path.name.endswith(f"-{key}")]
    return cache, record, path


def test_one_process_loads_what_another_stored(env: dict[str, str]) -> None:
    _, record, path = stored(env)
    other = Cache(env, "k")
    assert other.load() == record
    assert other.load() is other.load()
    assert (path.stat().st_mode & 0o7777, path.parent.stat().st_mode & 0o7777) == (0o600, 0o700)
    assert Cache(env, "another").load() is None


def test_torn_or_invalid_files_are_ignored(env: dict[str, str], tmp_path: Path) -> None:
    cache, record, path = stored(env)
    whole = path.read_bytes()
    for text in (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        os.urandom(200),
        b"\xff" * 50,
        msgspec.msgpack.encode([1, 2]),
    ):
        path.write_bytes(text)
        assert Cache(env, "k").load() is None
    path.write_bytes(whole)
    assert Cache(env, "k").load() == record
    path.chmod(0o622)
    assert Cache(env, "k").load() is None
    path.chmod(0o600)
    aside = tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    assert Cache(env, "k").load() is None
    path.unlink()
    os.mkfifo(path)
    assert Cache(env, "k").load() is None
    path.unlink()
    path.mkdir()
    cache.store(record)
    assert Cache(env, "k").load() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_file_is_ignored(env: dict[str, str]) -> None:
    _, _, path = stored(env)
    os.chown(path, 12345, 12345)
    assert Cache(env, "k").load() is None


def test_files_of_an_earlier_boot_and_from_the_future_are_ignored(env: dict[str, str]) -> None:
    cache, record, _ = stored(env)
    cache.store(replace(record, boot="b4b1a6c4-another-boot"))
    assert Cache(env, "k").load() is None
    cache.store(replace(record, asked=now() + 60))
    assert Cache(env, "k").load() is None


def test_files_of_older_configurations_go_after_a_day(env: dict[str, str]) -> None:
    _, _, old = stored(env, "old")
    _, _, young = stored(env, "young")
    os.utime(old, (time.time() - 90000,) * 2)
    cache, record, _ = stored(env)
    cache.store(record)
    assert (old.exists(), young.exists()) == (False, True)
    assert [path.name for path in young.parent.iterdir() if path.name.startswith(".")] == []


def test_without_a_folder_every_process_may_query(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    cache = Cache(env, "k")
    cache.store(CachedAnswer(cache.boot))
    assert cache.load() is None
    with cache.turn() as one, Cache(env, "k").turn() as other:
        assert (one, other) == (True, True)


def test_one_process_at_a_time_holds_the_lock(env: dict[str, str]) -> None:
    cache = Cache(env, "k")
    with cache.turn() as ours:
        assert ours
        with Cache(env, "k").turn() as theirs:
            assert not theirs
    with Cache(env, "k").turn() as theirs:
        assert theirs


def play(minutes: float, took_s: float, error: str | None = None, interval_s: float = 30.0) -> list[float]:
    """Return the times at which Slurm is queried in ``minutes``, if each query takes ``took_s``."""
    rng = random.Random(1)
    known = CachedAnswer("", credit_s=slurm.TIMING.credit_s)
    at, found = 1000.0, []
    while at < 1000.0 + 60 * minutes:
        found.append(at)
        known = slurm.after(known, CycleResult(None if error else SCHEDULE, error), at, took_s)
        at += took_s + slurm.pause_s(known, interval_s, rng.uniform(0.8, 1.2))
    return found


@pytest.mark.parametrize("interval_s", [1.0, 30.0])
@pytest.mark.parametrize("error", [None, "hung"])
@pytest.mark.parametrize("took_s", [0.02, 0.3, 4.0, 12.0])
def test_slurms_commands_take_at_most_a_twentieth_of_the_time(
    took_s: float, error: str | None, interval_s: float
) -> None:
    for minutes in (10, 60, 600):
        asked = len(play(minutes, took_s, error, interval_s)) * took_s
        assert asked <= 0.05 * 60 * minutes + slurm.TIMING.credit_s + took_s


def test_a_fast_controller_is_queried_every_interval() -> None:
    assert len(play(10, 0.1)) == 20
    assert len(play(1, 0.02, interval_s=1.0)) == 59


def test_a_slow_or_hung_controller_is_retried_after_up_to_five_minutes() -> None:
    at = play(120, 12.0, "hung")
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert gaps[0] < 60
    assert 0.8 * 300 <= min(gaps[-5:]) <= max(gaps[-5:]) <= 1.2 * 300 + 12


def test_a_controller_that_refuses_at_once_is_retried_every_minute() -> None:
    at = play(60, 0.01, "refused")
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert max(gaps) <= 1.2 * 60 + 1


def test_an_answer_counts_while_no_newer_one_is_allowed() -> None:
    known = slurm.after(CachedAnswer("", credit_s=0.0), CycleResult(SCHEDULE), 1000.0, 20.0)
    assert slurm.pause_s(known, 30.0, 1.0) == 100.0  # 5 s of credit are owed


# --- a program in scontrol's place, where what counts is who starts it and when -------------------------------------


@pytest.fixture
def bench(tmp_path: Path, env: dict[str, str]) -> tuple[dict[str, str], Path]:
    """An environment with a scontrol that prints recordings, and the file in which it counts; `wait` makes it hang."""
    folder = tmp_path / "bin"
    folder.mkdir()
    recorded = FOLDER / "shapes"
    (folder / "scontrol").write_text(
        f"#!/bin/sh\nfor what; do :; done\necho $what >>{folder}/log\nwhile [ -e {folder}/wait ]; do sleep 0.02; done\n"
        f"exec cat {recorded}/$what-d-oneliner.txt\n"
    )
    (folder / "scontrol").chmod(0o755)
    (folder / "slurm.conf").write_text("ClusterName=lab\n")
    (folder / "log").touch()
    return env | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_CONF": str(folder / "slurm.conf")}, folder


def client(env: Mapping[str, str], timing: slurm.SlurmTiming = slurm.TIMING) -> slurm.Slurm:
    return slurm.Slurm(Settings(), env, here(env), timing)


def test_a_later_query_takes_the_answer_of_an_earlier_one(bench: tuple[dict[str, str], Path]) -> None:
    env, folder = bench
    first = client(env).look(60.0)
    second = client(env).look(60.0)
    assert first.schedule == second.schedule
    assert first.schedule is not None
    assert abs(second.arrived - first.arrived) < 0.1
    assert (folder / "log").read_text().split() == ["job", "node"]


def test_setting_the_date_changes_nothing(bench: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    env, folder = bench
    client(env).look(60.0)
    real = time.time()
    for shift in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda shift=shift: real + shift)
        seen = client(env).look(60.0)
        assert seen.schedule is not None
        assert 0 <= time.monotonic() - seen.arrived < 10
    assert (folder / "log").read_text().split() == ["job", "node"]


def test_a_process_suspended_while_querying_does_not_block_others(
    bench: tuple[dict[str, str], Path],
) -> None:
    env, _ = bench
    one = client(env)
    with one._cache.turn() as ours:  # and then ctrl-Z
        assert ours
        begun, watch = time.monotonic(), Stopwatch()
        assert client(env, slurm.SlurmTiming(stuck_s=0.3)).look(60.0).schedule is not None
        assert time.monotonic() - begun >= 0.3
        assert watch.stop() < 5


def test_a_timeout_while_another_process_queries_is_reported(bench: tuple[dict[str, str], Path]) -> None:
    env, _ = bench
    with client(env)._cache.turn():
        seen = client(env).look(0.2)
    assert (seen.schedule, seen.error) == (
        None,
        "another of your gpuboard processes is waiting for its answer",
    )


def test_closing_kills_the_command_without_an_error(bench: tuple[dict[str, str], Path]) -> None:
    env, folder = bench
    (folder / "wait").touch()
    told: list[None] = []
    asking = client(env)
    asking.start(lambda: told.append(None))
    until((folder / "log").read_text, "it asks")
    watch = Stopwatch()
    asking.close()
    assert watch.stop() < 0.3
    until(lambda: not any(thread.name == "slurm" for thread in threading.enumerate()), "the thread ends")
    assert (told, Cache(env, "").load()) == ([], None)
    (folder / "wait").unlink()
    assert client(env).look(60.0).error is None


def test_another_process_answer_reaches_a_watch(
    bench: tuple[dict[str, str], Path],
) -> None:
    env, folder = bench
    changes = threading.Semaphore(0)
    watching = client(env, slurm.SlurmTiming(news_s=0.1))
    watching.start(changes.release)
    try:
        assert changes.acquire(timeout=60)
        slurm.outdate(env)
        assert changes.acquire(timeout=60)
        until(lambda: (folder / "log").read_text().split() == ["job", "node"] * 2, "it has asked anew")
    finally:
        watching.close()


def test_a_change_during_a_query_is_queried_again(bench: tuple[dict[str, str], Path]) -> None:
    env, folder = bench
    asking = client(env)
    asking.look(60.0)
    slurm.outdate(env)
    (folder / "wait").touch()
    thread = threading.Thread(target=asking.look, args=(60.0,))
    thread.start()
    until(lambda: len((folder / "log").read_text().split()) == 3, "it asks for the second time")
    slurm.outdate(env)
    (folder / "wait").unlink()
    thread.join()
    client(env).look(60.0)
    assert (folder / "log").read_text().split() == ["job", "node"] * 3
    client(env).look(60.0)
    assert (folder / "log").read_text().split() == ["job", "node"] * 3, "and then no more"


def test_a_change_while_an_answer_is_stored_is_queried_again(bench: tuple[dict[str, str], Path]) -> None:
    """A command that changes a job between the end of a query and the storing of its answer is not forgotten."""
    env, folder = bench
    asking = client(env)
    asking.look(60.0)
    slurm.outdate(env)
    with calls_of(Cache.store, lambda: slurm.outdate(env)):
        asking.look(60.0)
    client(env).look(60.0)
    assert (folder / "log").read_text().split() == ["job", "node"] * 3


def test_marking_an_answer_as_outdated_never_brings_back_an_older_one(bench: tuple[dict[str, str], Path]) -> None:
    env, _ = bench
    asking = client(env)
    asking.look(60.0)
    with calls_of(files.write_private, lambda: asking._ask(60.0)) as writes:
        slurm.outdate(env)
    assert writes
    assert asking._cache.load() == asking._known


def test_an_unreadable_answer_is_an_error_and_the_earlier_one_stays(
    bench: tuple[dict[str, str], Path],
) -> None:
    env, folder = bench
    asking = client(env)
    before = asking.look(60.0).schedule
    script = (folder / "scontrol").read_text()
    for words in ("exit 0", "echo no jobs today", f"head -c 700 {FOLDER}/shapes/job-d-oneliner.txt"):
        (folder / "scontrol").write_text(f"#!/bin/sh\n{words}\n")
        asking._ask(60.0)
        assert asking.seen.schedule is before
        assert (asking.seen.error or "").startswith("Slurm's answer cannot be read: ")
    (folder / "scontrol").write_text("#!/bin/sh\necho 'slurm_load_jobs error: \x1b[31mnew words' >&2\nexit 1\n")
    asking._ask(60.0)
    assert asking.seen.error == "`scontrol` ended with exit code 1: slurm_load_jobs error: [31mnew words"
    (folder / "scontrol").write_text(script)
    asking._ask(60.0)
    assert asking.seen.error is None


def test_an_old_error_does_not_hide_a_controller_that_is_back(bench: tuple[dict[str, str], Path]) -> None:
    env, folder = bench
    script = (folder / "scontrol").read_text()
    (folder / "scontrol").write_text("#!/bin/sh\necho 'slurm_load_jobs error: new words' >&2\nexit 1\n")
    with pytest.raises(NoNodeReached, match="new words"):
        schedule_of(client(env))
    (folder / "scontrol").write_text(script)
    assert client(env).look(60.0).schedule is None
    assert schedule_of(client(env)).nodes
    schedule_of(client(env))
    assert (folder / "log").read_text().split() == ["job", "node"]
    overdrawn = CachedAnswer(client(env)._cache.boot, asked=now(), error="new words", failures=1, credit_s=-60.0)
    client(env)._cache.store(overdrawn)
    with pytest.raises(NoNodeReached, match="new words"):
        schedule_of(client(env))


def test_auto_finds_slurm_only_where_it_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "opt/slurm/bin"
    folder.mkdir(parents=True)
    (folder / "scontrol").write_text("#!/bin/sh\n")
    (folder / "scontrol").chmod(0o755)
    env = {"PATH": str(folder)}
    assert find(Settings(), env) is None or Path("/etc/slurm/slurm.conf").exists()
    assert find(Settings(scheduler="slurm"), env) is not None
    assert find(Settings(), env | {"SLURM_CONF_SERVER": "ctld:6817"}) is not None
    assert find(Settings(), env | {"SLURM_CONF": "/anywhere"}) is not None
    (tmp_path / "opt/slurm/etc").mkdir()
    (tmp_path / "opt/slurm/etc/slurm.conf").write_text("ClusterName=x\n")
    assert find(Settings(), env) is not None
    assert find(Settings(scheduler="none"), env) is None
    assert find(Settings(), {"PATH": "relative:"}) is None
