"""Recordings: what is written is read back, from any moment, also from files that are cut, damaged or hostile."""

from __future__ import annotations

import gzip
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.errors import GpuboardError, UsageError
from gpuboard.model.gpu import Sensors
from gpuboard.model.lease import Lease, LeaseGpu, LeaseList
from gpuboard.model.snapshot import GpuView, JobView, MigView, NodeView, ProcessView, SchedulerView, Snapshot, XidView
from gpuboard.model.units import day_time, iso, seconds_of
from gpuboard.recording.changes import applied, difference
from gpuboard.recording.events import EVENTS_MOST, NODES_MAX, ClusterEvent
from gpuboard.recording.file import Cursor, ForwardClock, Recording, RecordingWriter
from gpuboard.recording.frames import Frame, cleaned, is_clean
from gpuboard.recording.player import Player, moment_of

replace = msgspec.structs.replace
T0 = 1_800_000_000.0
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda members: st.lists(members, max_size=3) | st.dictionaries(st.sampled_from("abc"), members, max_size=3),
    max_leaves=12,
)


@given(TREES, TREES)
@settings(max_examples=40)
def test_a_change_leads_from_one_tree_to_the_other(old: Any, new: Any) -> None:
    change = difference(old, new)
    kept = json.dumps(old)
    assert json.dumps(applied(old, json.loads(json.dumps(change)))) == json.dumps(new) or applied(old, change) == new
    assert json.dumps(old) == kept


@pytest.mark.parametrize(
    ("tree", "change"),
    [
        ({"a": 1}, {"b": [2]}),
        ([{"a": 1}], {"1": [2]}),
        ([{"a": 1}], {"-1": [2]}),
        ([{"a": 1}], {"x": [2]}),
        (1, {"a": [2]}),
        ({"a": 1}, [1, 2]),
        ({"a": 1}, "x"),
    ],
)
def test_a_change_that_does_not_fit_is_an_error(tree: Any, change: Any) -> None:
    with pytest.raises(ValueError, match="change"):
        applied(tree, change)


def frame(seconds: float, *, utilization: int = 50, lease: bool = False, nodes: int = 2) -> Frame:
    """Return a frame ``seconds`` after T0: every node was read 0.5 s before."""
    at = T0 + seconds
    process = ProcessView(
        pid=7, user="alice", command="/opt/env/bin/python train.py --token=s3cret", memory=2**30, type="compute",
        runtime_s=seconds + 90.0,
    )  # fmt: skip
    gpu = GpuView(
        index=0, uuid="GPU-0", name="NVIDIA H100", pci_bus_id="1", state="busy", reason="alice: python (pid 7)",
        utilization=utilization, power=300.5, processes=[process], xids=[XidView(79, iso(T0), seconds + 5.0)],
        links={"GPU-1": 18}, mig=[MigView("MIG-0", "3g.40gb", "busy", "", 0, 40, processes=[process])],
    )  # fmt: skip
    found = [
        NodeView(f"gpu0{number}", "up", age_s=0.5, gpus=[replace(gpu, uuid=f"GPU-{number}"), replace(gpu, index=1)])
        for number in range(nodes)
    ]
    held = [
        Lease("k3f9", "alice", 1000, "login1", [LeaseGpu("gpu00", 0, "GPU-0")], iso(T0), iso(T0 + 3600), None,
              remaining_s=3600.0 - seconds)
    ]  # fmt: skip
    return Frame(
        at,
        Snapshot(1, iso(at), "lab", found, SchedulerView("slurm", 2.0, current=True)),
        LeaseList(1, iso(at), held if lease else [], ["gpu09"]),
        {"gpu00": 1000},
    )


def plain(frame: Frame) -> Any:
    """Return a frame with its seconds rounded and without arguments of commands, to compare."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value)
        if isinstance(value, dict):
            return {key: "python" if key == "command" else rounded(one) for key, one in value.items()}
        return [rounded(one) for one in value] if isinstance(value, list) else value

    return rounded(msgspec.to_builtins(frame))


def recorded(path: Path, frames: list[Frame], *, commands: bool = False) -> Path:
    """Write a recording."""
    writer = RecordingWriter(path, version="1.2.3", commands=commands)
    for one in frames:
        writer.add(one)
    writer.close()
    assert writer.frames == len(frames)
    assert writer.bytes == path.stat().st_size
    return path


LONG = [frame(5 * n, utilization=n % 100, lease=n % 7 == 3, nodes=2 + (n > 100)) for n in range(200)]  # 16 minutes


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of LONG."""
    return recorded(tmp_path_factory.mktemp("recording") / "long.gz", LONG)


def test_every_frame_is_read_back(long: Path) -> None:
    recording = Recording(long)
    assert [plain(one) for one in recording.frames()] == [plain(one) for one in LONG]
    assert (recording.begin, recording.end, recording.incomplete) == (T0, T0 + 5 * 199, False)


def test_throughput_is_kept_to_two_digits(tmp_path: Path) -> None:
    exact = Sensors(sm_activity=85, pcie_sent=1_258_291_200, pcie_received=0, nvlink_sent=7, nvlink_max=478_116_000_000)
    one = frame(0)
    nodes = [replace(node, gpus=[replace(gpu, sensors=exact) for gpu in node.gpus]) for node in one.snapshot.nodes]
    file = recorded(tmp_path / "rates.gz", [replace(one, snapshot=replace(one.snapshot, nodes=nodes))])
    [kept] = Recording(file).frames()
    assert kept.snapshot.nodes[0].gpus[0].sensors == replace(exact, pcie_sent=1_300_000_000)


@pytest.mark.parametrize("seconds", [-50, 0, 4, 5, 299, 300, 301, 302, 640, 995, 5000])
def test_any_moment_is_found(long: Path, seconds: float) -> None:
    number = min(max(0, int(seconds // 5)), 199)
    cursor = Cursor(Recording(long))
    cursor.frame(T0 + 400)
    assert plain(cursor.frame(T0 + seconds)) == plain(LONG[number])
    assert cursor.next_at == (LONG[number + 1].at if number < 199 else None)
    assert plain(Recording(long).at(T0 + seconds)) == plain(LONG[number])


def event(seconds: float, words: str = "") -> ClusterEvent:
    return ClusterEvent(iso(T0 + seconds), "xid", ("gpu00",), "0", words=words)


EVENTS = [event(n, f"{n} of 1000") for n in range(1000)]  # one a second; more than a frame has


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of LONG, each frame with what has happened until then."""
    found = [replace(one, events=EVENTS[: 5 * n + 1][-EVENTS_MOST:]) for n, one in enumerate(LONG)]
    return recorded(tmp_path_factory.mktemp("recording") / "eventful.gz", found)


@pytest.mark.parametrize("back_s", [0, 1, 10, 305, 900])
@pytest.mark.parametrize("seconds", [0, 4, 5, 299, 300, 302, 640, 995])
def test_a_frame_has_the_events_until_then(eventful: Path, seconds: float, back_s: float) -> None:
    cursor = Cursor(Recording(eventful))
    until = int(min(seconds, 995) // 5) * 5 + 1
    cursor.frame(T0 + seconds + back_s)
    for moment in (seconds - 5, seconds):
        found = cursor.frame(T0 + moment).events
    assert found == EVENTS[:until][-EVENTS_MOST:]
    assert Recording(eventful).at(T0 + seconds).events == found


def test_known_events_stay_the_same_objects(eventful: Path) -> None:
    cursor = Cursor(Recording(eventful))
    before = cursor.frame(T0 + 290).events
    after = cursor.frame(T0 + 310).events  # there is a key frame in between
    assert before is not None
    assert after is not None
    assert all(one is other for one, other in zip(before[20:], after, strict=False))


def test_frames_without_events_have_none(long: Path) -> None:
    assert {one.events for one in Recording(long).frames()} == {None}


def test_an_event_is_written_once_and_again_in_a_key_frame(tmp_path: Path) -> None:
    one = event(1)
    path = recorded(
        tmp_path / "events.gz",
        [replace(frame(at), events=[one] if at else []) for at in (0, 5, 10, 295, 300)],
    )
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    written = [{"at": one.at, "kind": "xid", "nodes": ["gpu00"], "gpus": "0"}]
    assert [line.get("events") for line in lines if "at" in line] == [[], written, None, None, written]


@pytest.mark.parametrize(
    "hostile",
    [
        {"at": "soon", "kind": "xid"},
        {"at": "0001-01-01T00:00", "kind": "xid"},
        {"at": 1, "kind": "xid"},
        {"kind": "xid"},
        {"at": iso(T0), "kind": "xid", "nodes": "gpu00"},
        "xid",
    ],
)
def test_events_that_cannot_be_shown_are_damage(tmp_path: Path, hostile: Any) -> None:
    path = recorded(tmp_path / "hostile.gz", [replace(frame(0), events=[hostile])])
    with pytest.raises(GpuboardError, match=r"hostile\.gz is damaged at "):
        Recording(path).at(T0)


def test_text_of_foreign_events_is_cleaned(tmp_path: Path) -> None:
    hostile = ClusterEvent("2026-01-31T13:00:00+01:00", "\x1b[31mxid", ("gpu\u202e",) * 2000, "0" * 99, "\x07eve", "\n")
    path = recorded(tmp_path / "hostile.gz", [replace(frame(0), events=[hostile])])
    [found] = Recording(path).at(T0).events or ()
    gpus = "0" * 63 + "…"
    assert found == ClusterEvent("2026-01-31T12:00:00.000Z", "[31mxid", ("gpu",) * NODES_MAX, gpus, "eve", " ")


def test_other_programs_read_it(long: Path) -> None:
    lines = [json.loads(line) for line in gzip.decompress(long.read_bytes()).splitlines()]
    assert lines[0] == {"format": "gpuboard recording", "schema": 1, "version": "1.2.3", "commands": False}
    assert [line["at"] for line in lines if "at" in line] == [one.at for one in LONG]
    assert set(lines[2]["change"]["nodes"]["gpu00"]["gpus"]["0"]) == {"utilization"}  # ages do not count as changes


def test_command_lines_only_when_asked(tmp_path: Path) -> None:
    cut = recorded(tmp_path / "cut.gz", LONG[:3])
    whole = recorded(tmp_path / "whole.gz", LONG[:3], commands=True)
    assert b"s3cret" not in gzip.decompress(cut.read_bytes())
    [process] = Recording(cut).at(T0).snapshot.nodes[0].gpus[0].processes or []
    assert process.command == "python"
    [process] = Recording(whole).at(T0).snapshot.nodes[0].gpus[0].processes or []
    assert process.command.endswith("--token=s3cret")


def test_a_file_cut_anywhere_is_good_up_to_there(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole.gz", [frame(4 * n, utilization=n) for n in range(20)]).read_bytes()
    counts = set()
    for length in range(0, len(whole) + 1, 7):
        (tmp_path / "cut.gz").write_bytes(whole[:length])
        try:
            recording = Recording(tmp_path / "cut.gz")
        except UsageError as error:
            assert "is not a recording" in str(error)
            continue
        found = list(recording.frames())
        assert [one.at for one in found] == [T0 + 4 * n for n in range(len(found))]
        assert recording.end == found[-1].at
        counts.add(len(found))
    assert len(counts) > 5


@given(st.data())
def test_a_damaged_file_is_an_error_and_nothing_else(long: Path, data: st.DataObject) -> None:
    content = bytearray(long.read_bytes()[:20_000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = long.with_name("damaged.gz")
    path.write_bytes(content)
    try:
        for one in Recording(path).frames():
            assert one.snapshot.cluster == "lab"
    except GpuboardError as error:
        assert str(path) in str(error)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, long: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(long.read_bytes())
    recording = Recording(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(GpuboardError, match=r"cut\.gz is damaged at .*: it was cut"):
        list(recording.frames())


def test_text_of_a_foreign_recording_is_cleaned(tmp_path: Path) -> None:
    hostile = replace(frame(0), snapshot=replace(frame(0).snapshot, cluster="l\x1b]0;owned\x07ab"))
    assert Recording(recorded(tmp_path / "hostile.gz", [hostile])).at(T0).snapshot.cluster == "l]0;ownedab"


TEXT = st.one_of(st.text(), st.sampled_from(["a" * 512, "a" * 513, "\x7f", 'a"b', "\\", "\u202e", "gpu[01-16]: 7 %"]))


@given(st.recursive(TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=5))
def test_what_counts_as_clean_is_not_changed_by_cleaning(tree: Any) -> None:
    assert not is_clean(msgspec.json.encode(tree)) or cleaned(tree) == tree


def test_usual_text_counts_as_clean() -> None:
    assert is_clean(msgspec.json.encode({"nodes": {"gpu01": {"gpus": [{"model": "NVIDIA A100", "power": 71.0}]}}}))


@pytest.mark.parametrize("text", ["", "soon", "0001-01-01T00:00", "9999-12-31T23:59:59-14:00"])
def test_times_of_a_foreign_recording_can_be_shown(tmp_path: Path, text: str) -> None:
    one = frame(0, lease=True)
    [lease] = one.leases.leases
    gpu = replace(one.snapshot.nodes[0].gpus[0], jobs=[JobView("7", "bob", "gpu", text)])
    with_job = replace(one.snapshot, nodes=[replace(one.snapshot.nodes[0], gpus=[gpu])])
    with_lease = replace(one.leases, leases=[replace(lease, since=text)])
    for number, foreign in enumerate((replace(one, snapshot=with_job), replace(one, leases=with_lease))):
        recording = Recording(recorded(tmp_path / f"{number}.gz", [foreign]))
        try:
            found = recording.at(T0)
        except GpuboardError as error:
            assert "is damaged at" in str(error)
            continue
        for shown in (found.leases.leases[0].since, *(job.until for job in found.snapshot.nodes[0].gpus[0].jobs)):
            assert shown is not None
            assert day_time(seconds_of(shown))


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for name, content in {"empty": b"", "text": b"hello\n", "gzip": gzip.compress(b"{}")}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="is not a recording of gpuboard"):
            Recording(tmp_path / name)
    with pytest.raises(UsageError, match="No such file"):
        Recording(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        Recording(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo: not a regular file"):
        Recording(tmp_path / "fifo")
    with pytest.raises(UsageError, match="exists; name a new file"):
        RecordingWriter(tmp_path / "text")


def test_a_recording_of_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordingWriter(tmp_path / "next.gz", version="1.2.3")
    writer._head["schema"] = 2
    writer.add(frame(0))
    writer.close()
    with pytest.raises(
        UsageError, match=r"has schema 2; .* reads schema 1: use the gpuboard that recorded it, 1\.2\.3"
    ):
        Recording(tmp_path / "next.gz")


def test_what_was_written_before_an_error_stays_good(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "full.gz")
    for n in range(4):
        writer.add(frame(5 * n))
    good = writer.bytes
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (good + 50, limits[1]))  # the next member is written in part
    try:
        with pytest.raises(GpuboardError, match=r"cannot write .*full\.gz: File too large; it ends at"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recording = Recording(tmp_path / "full.gz")
    assert (good, recording.incomplete) == ((tmp_path / "full.gz").stat().st_size, False)
    assert [one.at for one in recording.frames()] == [T0, T0 + 5, T0 + 10]


def test_a_recording_can_be_read_from_its_first_frame_on(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "young.gz")
    writer.add(frame(0))
    assert Recording(tmp_path / "young.gz").end == T0
    writer.close()


def test_a_removed_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "removed.gz"
    writer = RecordingWriter(path)
    writer.add(frame(0))
    path.unlink()
    writer.add(frame(1))
    with pytest.raises(GpuboardError, match=r"removed\.gz: the file was removed"):
        writer.close()


def test_without_frames_only_its_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "none.gz"
    RecordingWriter(path).close()
    assert not path.exists()
    writer = RecordingWriter(path)
    path.unlink()
    path.write_text("of another program")
    writer.close()
    assert path.exists()


def test_a_clock_that_is_set_back_loses_no_time() -> None:
    wall, passed = [T0], [0.0]
    clock = ForwardClock(lambda: wall[0], lambda: passed[0])

    def later(passed_s: float, set_s: float = 0.0) -> tuple[float, float]:
        passed[0] += passed_s
        wall[0] += passed_s + set_s
        at, ahead_s = clock.read()
        return at - T0, ahead_s

    assert later(5) == (5, 0)
    assert later(5, -3600) == (10, 3600)
    assert later(5, -60) == (15, 0)  # not reported once more
    assert later(5, +3660) == (20, 0)
    assert later(5, +100) == (125, 0)  # set forward, or suspended


def due(player: Player) -> float | None:
    """Return when the next frame is due."""
    return player.next_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("+1m", 60), ("-1m", 935), ("+16m", 960), (at := time.strftime("%H:%M:%S", time.localtime(T0 + 60)), 60),
     (f"2027-01-15T{at}", 60), (time.strftime("%H:%M:%S", time.localtime(T0 + 996)), 996)],
)  # fmt: skip
def test_moments(long: Path, text: str, seconds: float) -> None:
    assert moment_of(text, Recording(long)) == T0 + seconds


def test_a_minute_is_any_moment_of_it(tmp_path: Path) -> None:
    recording = Recording(recorded(tmp_path / "short.gz", [frame(25), frame(35)]))
    for form in ("%H:%M", "%Y-%m-%dT%H:%M"):
        found = moment_of(time.strftime(form, time.localtime(T0 + 25)), recording)
        assert recording.at(found).at == T0 + 25
    with pytest.raises(UsageError, match=time.strftime("from %Y-%m-%d %H:%M:%S", time.localtime(T0 + 25))):
        moment_of("+1h", recording)


@pytest.mark.parametrize("text", ["", "x", "25:00", "14", "2026-13-01", "+", "+2h", "-1d", "2026-01-01T00:00", "١٢:٠٠"])
def test_a_moment_outside_is_an_error(long: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"is no moment; write 14:03|is not in .*long\.gz, which is from"):
        moment_of(text, Recording(long))


def test_playing(long: Path) -> None:
    now = [100.0]
    player = Player(Recording(long), 2.0, lambda: now[0])
    assert player.frame().at == T0
    assert due(player) == 2.5
    now[0] += 5
    assert (player.position, player.frame().at) == (T0 + 10, T0 + 10)
    player.pause()
    now[0] += 50
    assert player.position == T0 + 10
    assert due(player) is None
    player.pause()
    player.faster()
    now[0] += 10
    assert (player.speed, player.position, player.frame().at) == (5.0, T0 + 60, T0 + 60)
    player.seek(T0 + 33)
    assert player.frame().at == T0 + 30
    player.slower()
    player.slower()
    player.slower()
    assert player.speed == 1.0
    player.seek(T0 + 5000)
    assert player.frame().at == T0 + 995
    assert due(player) is None
    player.seek(0)
    assert player.frame().at == T0
