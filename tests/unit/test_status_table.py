"""The status table: alignment by display width, narrow terminals, hostile text, colour."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest

from gpuboard.agent.nvml.terms import NO_DRIVER
from gpuboard.board.scene import Scene
from gpuboard.cli.context import Context
from gpuboard.cli.main import load, parser_of
from gpuboard.cli.see import columns, status
from gpuboard.cli.see.selection import Selection
from gpuboard.cli.see.status import next_due, sums
from gpuboard.cli.table import Step, elide, fit, pad, width_of, wrap
from gpuboard.errors import UsageError
from gpuboard.model.gpu import GpuState
from gpuboard.model.lease import Lease, LeaseGpu, LeaseList
from gpuboard.model.snapshot import GpuView, JobView, MigView, NodeView, ProcessView, Snapshot
from gpuboard.model.text import clean
from tests.board.made import mig

GIB = 2**30
FREE = GpuView(
    index=0, uuid="GPU-0", name="NVIDIA H100 80GB HBM3", pci_bus_id="00000000:1B:00.0", state="free",
    reason="no process, no reservation", memory_used=GIB // 2, memory_total=80 * GIB, utilization=0, temperature=31,
    power=70.1, power_limit=700.0, processes=[],
)  # fmt: skip
BUSY = GpuView(
    index=11, uuid="GPU-1", name="NVIDIA H100 80GB HBM3", pci_bus_id="00000000:1C:00.0", state="busy",
    reason="张伟: \x1b[31mpy\x07 [/x] (p7)", flags=["sick"], memory_used=79 * GIB, memory_total=80 * GIB,
    utilization=100, temperature=88, power=699.9, power_limit=700.0,
    processes=[ProcessView(pid=7, user="张伟", command="python", memory=None, type="compute")],
)  # fmt: skip
UNKNOWN = GpuView(
    index=2, uuid="GPU-2", name="NVIDIA H100 80GB HBM3", pci_bus_id="00000000:1D:00.0", state="unknown",
    reason="not readable: memory",
)  # fmt: skip
UP = NodeView(name="gpu01", state="up", age_s=0.42, gpus=[FREE, BUSY, UNKNOWN])
DOWN = NodeView(
    name="gpu02", state="unreachable", error="ssh: no answer from 10.0.0.2 in 10 s; is it up? try: ssh gpu02 true"
)


def snapshot(*nodes: NodeView) -> Snapshot:
    return Snapshot(schema=1, at="2026-01-31T12:00:00.000Z", cluster="lab", nodes=list(nodes))


def table(of: Snapshot, width: int | None, *args: str, leases: Sequence[Lease] = (), colour: bool) -> list[str]:
    """Return the table that a command line with ``args`` prints."""
    read = parser_of(load("status")).read(args)
    names = columns.columns(read.columns) if read.columns else columns.TABLE
    scene = Scene(of, LeaseList(1, of.at, list(leases)), uids={"gpu01": 1000})
    selection = Selection(read.filter, read.user, free=read.free, sort=read.sort)
    return status.table(scene, width, names, selection, colour=colour)


def lease(name: str, owner: str, *uuids: str) -> Lease:
    gpus = [LeaseGpu("gpu01", 0, uuid) for uuid in uuids]
    return Lease(name, owner, 1001, "login1", gpus, "2026-01-31T12:00:00.000Z", "2026-01-31T20:00:00.000Z", None)


def test_wide_table_in_full() -> None:
    assert table(snapshot(UP, DOWN), None, colour=False) == [
        "NODE   GPU  MODEL      STATE     USER       MEM  UTIL  TEMP  POWER  REASON",
        "gpu01    0  H100 80GB  free      -      0.5/80G    0%  31°C    70W  no process, no reservation",
        "gpu01   11  H100 80GB  busy      张伟    79/80G  100%  88°C   700W  sick; [31mpy [/x] (p7)",
        "gpu01    2  H100 80GB  unknown   ?         ?/?G     ?     ?      ?  not readable: memory",
        "gpu02  unreachable: ssh: no answer from 10.0.0.2 in 10 s; is it up? try: ssh gpu02 true",
        "",
        "lab: 3 GPUs: 1 free, 1 busy, 1 unknown; 1 of 2 nodes unreachable, its GPUs are not counted",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 100, 200])
def test_no_line_exceeds_the_width(width: int) -> None:
    lines = table(snapshot(UP, DOWN), width, colour=False)
    assert [line for line in lines if width_of(line) > width] == []


def test_eighty_columns_show_state_and_reason() -> None:
    lines = table(snapshot(UP), 80, colour=False)
    assert lines[1] == "gpu01    0  H100 80GB  free      -      0.5/80G    0%  no process, no reservati…"
    assert lines[3].endswith("not readable: memory")


def test_the_totals_are_wrapped_not_cut() -> None:
    lines = table(snapshot(UP, DOWN), 40, colour=False)
    assert " ".join(lines[-3:]).endswith("1 unknown; 1 of 2 nodes unreachable, its GPUs are not counted")


def test_columns_align_with_wide_characters() -> None:
    header, *rows = table(snapshot(UP), 80, colour=False)[:4]
    start = width_of(header[: header.index("REASON")])
    for row, reason in zip(rows, ("no process", "sick; ", "not readable"), strict=True):
        assert width_of(row[: row.index(reason)]) == start


def test_unreachable_node_shows_its_complete_error_wrapped() -> None:
    lines = table(snapshot(DOWN), 40, colour=False)
    assert " ".join(line.strip() for line in lines[1 : lines.index("")]) == (
        "gpu02  unreachable: ssh: no answer from 10.0.0.2 in 10 s; is it up? try: ssh gpu02 true"
    )


def test_hostile_text_is_inert() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\u200b\r\n[bold]x[/]"
    node = NodeView(
        name=evil, state="up", age_s=1.0, error=evil, claims_error=evil,
        gpus=[GpuView(index=0, uuid=evil, name=evil, pci_bus_id=evil, state="busy", reason=evil, leases=[evil])],
    )  # fmt: skip
    text = "\n".join(table(Snapshot(schema=1, at="", cluster=evil, nodes=[node]), None, colour=False))
    assert [c for c in text if c != "\n" and clean(c) != c] == []
    assert "[bold]x[/]" in text


def test_colour_adds_to_the_text() -> None:
    plain, coloured = (table(snapshot(UP, DOWN), 80, colour=on) for on in (False, True))
    assert "\x1b[32mfree" in coloured[1]
    stripped = [line.replace("\x1b[0m", "") for line in coloured]
    for sgr in ("32", "33", "35", "1;31"):
        stripped = [line.replace(f"\x1b[{sgr}m", "") for line in stripped]
    assert stripped == plain


def test_each_mig_device_has_a_row() -> None:
    parent = GpuView(
        index=1, uuid="GPU-3", name="NVIDIA A100", pci_bus_id="0", state="busy", reason="MIG", flags=["mig"],
        mig=[MigView("MIG-1", "3g.40gb", "free", "no process, no reservation", 0, 40 * GIB, ["k3f9"])],
    )  # fmt: skip
    lines = table(snapshot(NodeView(name="gpu01", state="up", age_s=0.0, gpus=[parent])), None, colour=False)
    assert " ".join(lines[2].split()) == "gpu01 1:0 3g.40gb free - 0.0/40G no process, no reservation"


def test_the_user_of_a_busy_mig_device_is_not_known() -> None:
    states: tuple[GpuState, ...] = ("free", "busy", "unknown")
    devices = [MigView(f"MIG-{n}", "3g.40gb", state, "", 0, 40 * GIB) for n, state in enumerate(states)]
    gpu = msgspec.structs.replace(FREE, state="mig", flags=["mig"], mig=devices)
    one = snapshot(msgspec.structs.replace(UP, gpus=[gpu]))
    rows = [line.split() for line in table(one, None, "--columns", "gpu,user", colour=False)[1:5]]
    assert rows == [["0", "-"], ["0:0", "-"], ["0:1", "?"], ["0:2", "?"]]


def test_in_mig_mode_the_devices_are_counted_instead_of_the_gpu() -> None:
    states: tuple[GpuState, ...] = ("free", "busy")
    devices = [MigView(f"MIG-{n}", "3g.40gb", state, "", 0, 40 * GIB, []) for n, state in enumerate(states)]
    parent = GpuView(
        index=1, uuid="GPU-3", name="NVIDIA A100", pci_bus_id="0", state="mig", reason="in MIG mode",
        flags=["mig", "sick"], mig=devices,
    )  # fmt: skip
    one = snapshot(NodeView(name="gpu01", state="up", age_s=0.0, gpus=[parent, FREE]))
    assert sums(one) == "lab: 1 GPU: 1 free; 2 MIG devices: 1 free, 1 busy"
    assert " ".join(table(one, None, colour=False)[1].split()) == "gpu01 1 A100 mig ? ?/?G ? ? ? sick; in MIG mode"


def test_the_user_is_not_repeated_in_the_reason() -> None:
    held = msgspec.structs.replace(FREE, state="reserved", reason="alice, 3h10m left: ablation", leases=["k3f9"])
    job = JobView("12", "bob", "gpu", None)
    given = msgspec.structs.replace(FREE, uuid="GPU-5", state="allocated", reason="job 12 of bob in gpu", jobs=[job])
    crowded = msgspec.structs.replace(
        BUSY, reason="bob: python (pid 7) and 1 more", flags=[],
        processes=[ProcessView(pid, user, "x", pid, "compute") for pid, user in ((7, "bob"), (6, "carol"))],
    )  # fmt: skip
    node = msgspec.structs.replace(UP, gpus=[held, given, crowded])
    shown = table(snapshot(node), None, "--columns=user,reason", leases=[lease("k3f9", "alice", "GPU-0")], colour=False)
    assert shown[1:4] == [
        "alice      3h10m left: ablation",
        "bob        job 12 in gpu",
        "bob,carol  bob: python (pid 7) and 1 more",
    ]
    shown = table(snapshot(node), None, "--columns=reason", leases=[lease("k3f9", "alice", "GPU-0")], colour=False)
    assert shown[1:3] == ["alice, 3h10m left: ablation", "job 12 of bob in gpu"]


def test_an_old_reading_shows_its_age_in_the_reason() -> None:
    given = msgspec.structs.replace(FREE, state="allocated", reason="job 12 of bob in gpu")
    node = msgspec.structs.replace(UP, state="stale", age_s=42.0, error="no new reading", gpus=[given])
    assert table(snapshot(node), None, "--columns=reason", colour=False)[1] == "42s old: job 12 of bob in gpu"


def test_columns_in_the_order_asked_for_also_by_the_boards_names() -> None:
    shown = table(snapshot(UP, DOWN), None, "--columns", "index,memory,NODE", colour=False)
    assert shown[:4] == ["GPU      MEM  NODE", "  0  0.5/80G  gpu01", " 11   79/80G  gpu01", "  2     ?/?G  gpu01"]
    assert shown[4].strip().startswith("gpu02: unreachable: ssh: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--columns", "node,utl"), "--columns: 'utl' is not a column; did you mean util?\n  there are: node, gpu, "),
        (("--columns", "util,utilization"), "--columns: util is listed twice"),
        (("--columns", "node,,gpu"), "--columns: '' is not a column\n  there are: "),
        (("--sort", "pwoer"), "--sort: 'pwoer' is not a key to sort by; did you mean power?\n  there are: "),
        (("--sort", "mem,down"), "--sort: 'down' after the key; write mem or mem,desc"),
        (("--filter", "state:fre stat:x"), "--filter: stat is not a key; the keys are: "),
        (("--user", 'a"b'), "--user: 'a\"b' is not a user's name"),
    ],
)
def test_wrong_names_are_errors_with_the_list_and_the_nearest(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as error:
        table(snapshot(UP), None, *args, colour=False)
    assert str(error.value).startswith(message)


def test_filter_sort_user_and_free() -> None:
    cold = msgspec.structs.replace(FREE, index=3, uuid="GPU-4", temperature=20)
    busy = msgspec.structs.replace(BUSY, processes=[ProcessView(7, "bobby", "x", 1, "compute")])
    cluster = snapshot(msgspec.structs.replace(UP, gpus=[FREE, cold, busy]), DOWN)

    def indexes(*args: str) -> list[str]:
        lines = table(cluster, None, "--columns=gpu", *args, leases=[lease("k3f9", "bob", "GPU-4")], colour=False)
        return [line.strip() for line in lines[1:-2]]

    assert indexes("--free") == ["0", "3"]
    assert indexes("--free", "--sort", "temp") == ["3", "0"]
    assert indexes("--user", "bob") == indexes("--user", "BOB") == ["3"]  # not bobby's
    assert indexes("--user", "bob", "--filter", "temp>20") == []
    assert indexes("--filter", "temp>20", "--sort", "gpu,desc") == ["11", "0"]
    assert indexes("--sort", "mem,desc")[:3] == ["11", "0", "3"]
    assert indexes("--filter", "state:unreachable")[0].startswith("gpu02: unreachable")
    last = table(cluster, None, "--free", colour=False)[-1]
    assert last == "lab: 2 GPUs: 2 free; 2 of 3 GPUs match; 1 of 2 nodes unreachable, its GPUs are not counted"


def test_a_filter_leaves_out_mig_devices_and_the_others_keep_their_numbers() -> None:
    held = lease("k3f9", "alice", "MIG-gpu01-1-2")
    split, whole = mig("gpu01", 1, "busy", "free", "free"), mig("gpu01", 2, "busy")
    cluster = snapshot(NodeView(name="gpu01", state="up", age_s=0.0, gpus=[split, whole, BUSY]))

    def slots(*args: str) -> list[str]:
        lines = table(cluster, None, "--columns=gpu", *args, leases=[held], colour=False)
        return [line.strip() for line in lines[1:-2]]

    assert slots("--free") == slots("--filter", "state:free") == ["1", "1:1", "1:2"]
    assert slots("--filter", "state:busy", "--sort", "gpu,desc") == ["11", "2", "2:0", "1", "1:0"]
    assert slots("--user", "alice") == slots("--free", "--user", "alice") == ["1", "1:2"]
    assert slots("--filter", "state:mig") == ["1", "1:0", "1:1", "1:2", "2", "2:0"]  # the GPU itself
    for options in (("--filter", "state:busy", "--user", "alice"), ("--free", "--filter", "state:mig")):
        assert slots(*options) == []  # no device is both, nor the GPU itself
    assert table(cluster, None, "--free", colour=False)[-1] == "lab: 2 MIG devices: 2 free; 1 of 3 GPUs match"


def test_a_machine_under_two_names_is_listed_under_both_in_every_order() -> None:
    twice = snapshot(msgspec.structs.replace(UP, name="beta"), msgspec.structs.replace(UP, name="alpha"))
    assert len(table(twice, None, colour=False)) == len(table(twice, None, "--sort", "node", colour=False)) == 9
    rows = [line.split() for line in table(twice, None, "--columns=gpu,node", "--sort", "gpu", colour=False)[1:-2]]
    assert rows == [["0", "alpha"], ["0", "beta"], ["2", "alpha"], ["2", "beta"], ["11", "alpha"], ["11", "beta"]]


def test_node_without_gpus() -> None:
    lines = table(snapshot(NodeView(name="cpu01", state="up", age_s=0.1)), None, colour=False)
    assert lines[1:] == ["cpu01  no GPU found", "", "lab: 0 GPUs"]


def test_nodes_whose_nvml_fails_are_counted_apart_from_those_without_gpus() -> None:
    cpu, login = NodeView(name="cpu01", state="up"), NodeView(name="login1", state="up", error=f"NVML: {NO_DRIVER}")
    bad = NodeView(name="gpu03", state="up", age_s=0.1, error="NVML: driver/library version mismatch")
    assert sums(snapshot(UP, cpu, login)) == "lab: 3 GPUs: 1 free, 1 busy, 1 unknown"
    assert sums(snapshot(bad)) == "lab: 0 GPUs; the node is without working NVML, its GPUs are not counted"
    assert table(snapshot(login, bad), None, colour=False)[1:3] == [
        "login1  no GPU: NVML: no NVIDIA driver here (libnvidia-ml.so.1 not found)",
        "gpu03   GPUs unknown: NVML: driver/library version mismatch",
    ]
    assert table(snapshot(UP, DOWN, bad), None, "--free", colour=False)[-1] == (
        "lab: 1 GPU: 1 free; 1 of 3 GPUs match; 1 of 3 nodes unreachable, its GPUs are not counted; "
        "1 of 3 nodes without working NVML, its GPUs are not counted"
    )


def test_simulated_nodes_are_labelled() -> None:
    node = NodeView(name="sim1", state="up", age_s=0.1, source="simulated", gpus=[FREE])
    assert sums(snapshot(node)) == "lab: 1 GPU: 1 free; SIMULATED"


def test_width_of_wide_and_combining_characters() -> None:
    assert [width_of(text) for text in ("abc", "张伟", "e\u0301", "ﾊﾝ", "°")] == [3, 4, 1, 2, 1]


def test_elide_and_pad_count_cells() -> None:
    assert (elide("张伟张伟", 5), elide("abcdef", 4), elide("abc", 3)) == ("张伟…", "abc…", "abc")
    assert (pad("张", 4), pad("7", 3, right=True), pad("张伟", 3)) == ("张  ", "  7", "张…")


def test_wrap_breaks_words_longer_than_a_line() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("abcdefghij k", 4) == ["abcd", "efgh", "ij k"]


def test_fit_takes_steps_in_order_and_gives_the_rest_to_the_last_column() -> None:
    assert fit([5, 10, 20], [Step(2, 15), Step(1, 0)], 39) == [5, 10, 20]
    assert fit([5, 10, 20], [Step(2, 15), Step(1, 0)], 36) == [5, 10, 17]
    assert fit([5, 10, 20], [Step(2, 15), Step(1, 0)], 30) == [5, 0, 20]


def test_next_due_skips_missed_updates() -> None:
    assert next_due(10.0, 2.0, 10.5) == 12.0
    assert next_due(10.0, 2.0, 12.5) == 14.0
    assert next_due(10.0, 2.0, 31.0) == 32.0


@pytest.mark.parametrize("columns", [26, 80])
@pytest.mark.parametrize("lines", [6, 8, 24])
def test_a_frame_of_watch_fits_a_small_terminal(lines: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = [*map(str, range(40)), "", *"abcdef"]
    frame = status._frame(shown, Context([]), 1.0).split("\r\n")
    assert len(frame) == lines - 1
    assert "more rows" in frame[1 if lines < 9 else lines - 9]
    assert all(width_of(re.sub(r"\x1b\[[?\d;]*\w", "", line)) <= columns for line in frame)
