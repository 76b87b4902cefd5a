"""One GPU, and one node, as lines: their text, every line fits, and unknown is shown as unknown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.dialogs.request_form import local
from gpuboard.board.history import HOUR, Samples
from gpuboard.board.scene import Place
from gpuboard.board.screens.gpu import Known, Memory, notice
from gpuboard.board.screens.node import node_lines
from gpuboard.board.text.cells import width as cells_of
from gpuboard.board.text.detail import gpu as gpu_lines
from gpuboard.board.text.detail.graphs import Graph, GraphFrame, graphs
from gpuboard.board.text.detail.sensors import sensor_lines
from gpuboard.board.text.format import reason_of
from gpuboard.board.text.lines import Runs, named, wrapped
from gpuboard.board.theme.styles import ASCII, UNICODE
from gpuboard.model.gpu import Sensors
from gpuboard.model.snapshot import JobView, ProcessView
from tests.board.made import AT, GIB, awaited, busy, gpu, lease, mig, node, scene, unread


def text(lines: list[Runs]) -> list[str]:
    return ["".join(run for run, _ in line).rstrip() for line in lines]


def place(one: Any, *others: Any, **changes: Any) -> Place:
    return Place(node("n", [one, *others], **changes), one)


def here(hour: int, minute: int) -> str:
    """Return a time of the scenes' day as the board writes it in the local time zone."""
    now, then = datetime.fromisoformat(AT), datetime(2026, 1, 31, hour, minute, tzinfo=UTC)
    return local(then.timestamp(), now.timestamp())


def test_a_reserved_gpu_names_each_holder_once() -> None:
    one = gpu("n", 0, "reserved", reason="alice, 8h left; eve, 8h left", leases=["k3f9", "k3f9"])
    held = [lease("k3f9", "alice", [("n", 0)]), lease("k3f9", "eve", [("n", 0)], uid=1002)]
    lines = text(gpu_lines.head(place(one), scene(node("n", [one]), leases=held), 100))
    assert lines[2:] == [
        "State        R reserved", "Lease        k3f9 of alice, 8h00m left", "Lease        k3f9 of eve, 8h00m left"
    ]  # fmt: skip
    lines = text(gpu_lines.head(place(one), scene(node("n", [one]), leases=held[:1]), 100))
    assert lines[2] == "State        R reserved: alice, 8h left; eve, 8h left"


def test_the_top_shows_state_reason_and_user() -> None:
    one = busy("n", 1, "eve", flags=["rogue"], leases=["k3f9", "gone"], numa_node=0,
               jobs=[JobView("77", "dan", "gpu", "2026-01-31T15:10:00.000Z"), JobView("78", "eve", "", None),
                     JobView("79", "fay", "gpu", "2026-01-31T11:59:00.000Z")])  # fmt: skip
    held = lease("k3f9", "alice", [("n", 1)])
    seen = scene(node("n", [one]), leases=[held])
    assert text(gpu_lines.head(seen.places["GPU-n-1"], seen, 100)) == [
        "n  GPU 1  NVIDIA H100 80GB HBM3",
        "GPU-n-1   00000000:01:00.0   NUMA 0",
        "State        B busy: eve: python (pid 4001)",
        "             rogue: a process of a user who does not hold it",
        "Lease        k3f9 of alice, 8h00m left",
        "Lease        gone",
        f"Job          77 of dan in gpu, 3h10m left, until {here(15, 10)}",
        "Job          78 of eve in no partition",
        f"Job          79 of fay in gpu, 0s left, until {here(11, 59)}",
    ]


def test_a_bus_and_numa_node_that_are_not_reported_are_left_out() -> None:
    one = gpu("n", 0, "unknown", reason="no reading of this GPU yet", pci_bus_id="")
    assert text(gpu_lines.head(place(one), scene(), 60)) == [
        "n  GPU 0  NVIDIA H100 80GB HBM3",
        "GPU-n-0",
        "State        ? unknown: no reading of this GPU yet",
    ]
    narrow = text(gpu_lines.head(place(one), scene(), len("GPU-n-0") - 1))
    assert narrow[1] == "GPU-n-0"
    assert narrow[2].startswith("State"), "no empty line where the bus would be"


def test_mig_devices_are_listed() -> None:
    lines = text(gpu_lines.head(place(mig("n", 0, "free", "busy")), scene(), 100))
    assert lines[-2:] == [
        "0:0 3g.40gb  F free: made free; 0/40G",
        "0:1 3g.40gb  B busy: made busy; 0/40G",
    ]


SAMPLES = Samples((1.0, 2.0), (50, None), (0.5, None), (60, None), (350, None))


def test_readings_stand_side_by_side_where_there_is_room() -> None:
    lines = text(gpu_lines.readings(busy("n", 0), SAMPLES, GraphFrame(73, 2, UNICODE)))
    assert [line[:5].strip() for line in lines] == ["Utili", "100│", "0│", "Power", "700│", "0│", ""]
    assert lines[0] == "Utilization  90 %  mean 50  peak 50   Memory       60 GiB of 80 GiB"
    assert lines[3] == "Power        540 of 700 W  peak 350   Temperature  64 °C          peak 60"
    assert lines[6] == "     5 min ago ──────────────── now        5 min ago ──────────────── now"


@pytest.mark.parametrize(("peak", "top"), [(350, "500|"), (3, "100|"), (None, "100|")])
def test_the_power_of_a_gpu_without_a_limit_has_a_round_scale(peak: float | None, top: str) -> None:
    lost = gpu("n", 0, "broken", power=None, power_limit=None)
    lines = text(gpu_lines.readings(lost, SAMPLES._replace(power=(peak, None)), GraphFrame(50, 2, ASCII)))
    at = next(number for number, line in enumerate(lines) if line.startswith("Power        ? of ? W"))
    assert lines[at + 1].split()[0].partition("|")[0] + "|" == top


def test_sensors_that_the_driver_does_not_report_are_named_in_one_line() -> None:
    one = gpu("n", 0, sensors=Sensors(performance_state=0, sm_clock=1755, sm_clock_max=1980, encoder=0, decoder=12))
    assert text(sensor_lines(one, UNICODE, 100)) == [
        "Sensors      SM clock 1755 of 1980 MHz, performance P0, encoder 0 %, decoder 12 %",
        "Not reported memory clock, fan, activity, PCIe throughput",
    ]
    assert [line[0][0] for line in sensor_lines(gpu("n", 0), UNICODE, 100)] == ["Not reported "]


def test_activity_and_throughput_have_bars_up_to_their_maximum() -> None:
    full = Sensors(
        sm_activity=50, sm_occupancy=25, tensor_activity=61, tensor_hmma=60, tensor_imma=0, dram_activity=100,
        pcie_sent=1_258_291_200, pcie_received=31_504_000_000, nvlink_sent=8 * 10**9, nvlink_received=10**7,
    )  # fmt: skip
    one = gpu("n", 0, sensors=full, pcie_generation=1, pcie_generation_max=5, pcie_width=16, links={"GPU-n-1": 18})
    assert text(sensor_lines(one, UNICODE, 120)) == [
        "Activity     SM ━━━━────  50 %   occupancy ━━──────  25 %   tensor ━━━━━───  61 %   DRAM ━━━━━━━━ 100 %",
        "             tensor cores by format: HMMA 60 %, IMMA 0 %",
        "PCIe         ━━━━────  in 32 GB/s    out 1.3 GB/s   of 63 GB/s each way",
        "NVLink       in 10 MB/s    out 8.0 GB/s",
        "Not reported SM clock, memory clock, performance, fan, encoder, decoder",
    ]
    assert text(sensor_lines(one, UNICODE, 80))[0] == (
        "Activity     SM  50 %   occupancy  25 %   tensor  61 %   DRAM 100 %"
    )
    names = [text(gpu_lines.readings(one, Samples(), GraphFrame(cells, 2, UNICODE)))[0] for cells in (60, 38, 25)]
    assert [name.rstrip() for name in names] == [
        "Utilization  0 %    SM 50 %   tensor 61 %",
        "Utilization  0 %    SM 50 %",
        "Utilization  0 %",
    ]
    without = msgspec.structs.replace(one, sensors=Sensors(nvlink_max=478 * 10**9))
    assert text(sensor_lines(without, UNICODE, 200)) == [
        "Not reported SM clock, memory clock, performance, fan, encoder, decoder, activity, PCIe throughput, "
        "NVLink throughput"
    ]


def test_memory_shared_with_the_host_is_marked() -> None:
    lines = text(gpu_lines.readings(busy("n", 0, memory_shared=True), SAMPLES, GraphFrame(90, 2, UNICODE)))
    assert "60 GiB of 80 GiB, the host's" in lines[0]


def test_readings_stand_below_each_other_where_there_is_not() -> None:
    lines = text(gpu_lines.readings(busy("n", 0), SAMPLES, GraphFrame(50, 1, ASCII)))
    assert [line.split()[0] for line in lines] == [
        "Utilization", "100|", "Memory", "80|", "Power", "700|", "Temperature", "100|", "5",
    ]  # fmt: skip


def test_a_graph_has_thresholds_in_its_line_and_no_track_where_there_is_a_gap() -> None:
    times = [float(at) for at in range(0, 3600, 30)]
    values = [None if 60 <= k < 90 else 95.0 if k >= 110 else 20.0 for k in range(120)]
    shown = Graph("Memory", "95 %", times, values, 100.0, "busy", warn=90.0)
    name, top, bottom, axis = graphs([shown], GraphFrame(65, 2, UNICODE, span=HOUR))
    assert text([name, axis]) == [
        "Memory       95 %                                mean 28  peak 95",
        "     60 min ago ─── 45 ─────────── 30 ─────────── 15 ──────── now",
    ]
    assert top == [(" 100│", "dim"), ("⠉" * 30, "dim"), (" " * 15, ""), ("⠉" * 10, "dim"), ("⡏⠉⠉⠉⠉", "warn")]
    assert bottom == [
        ("   0│", "dim"), ("⠤" * 30, "busy"), (" " * 15, ""), ("⠤" * 10, "busy"), ("⠃", "warn"),
        ("    ", ""),
    ]  # fmt: skip
    old = graphs([shown], GraphFrame(65, 2, ASCII, dim=True, span=HOUR))
    assert {role for line in old for run, role in line if run.strip()} == {"dim"}
    assert text(old)[1].startswith(" 100|" + "." * 30 + " " * 15)


def test_unknown_readings_are_question_marks() -> None:
    one = gpu("n", 0, utilization=None, memory_used=None, memory_total=None, power=None, power_limit=None,
              temperature=None)  # fmt: skip
    lines = text(gpu_lines.readings(one, Samples(), GraphFrame(50, 1, UNICODE)))
    assert [line for line in lines if "?" in line] == [
        "Utilization  ? %", "Memory       ? of ?", "Power        ? of ? W", "Temperature  ? °C",
    ]  # fmt: skip


def test_old_readings_are_dim() -> None:
    lines = gpu_lines.readings(busy("n", 0), SAMPLES, GraphFrame(50, 2, UNICODE, dim=True))
    assert {role for line in lines for run, role in line if run.strip()} == {"dim"}


def test_processes_in_lines() -> None:
    found = [
        ProcessView(7, "bob", "python a.py", 1 * GIB, "compute"),
        ProcessView(8, None, "[/x]", None, "compute"),
        ProcessView(9, "eve", "python b.py", 3 * GIB, "compute", rogue=True),
    ]
    assert text(gpu_lines.processes(place(gpu("n", 0, processes=found)), 2, 66)) == [
        "!eve             9  3.0 GiB python b.py",
        " bob             7  1.0 GiB python a.py",
        "and 1 more",
    ]
    assert text(gpu_lines.processes(place(gpu("n", 0)), 2, 66)) == ["none"]
    assert text(gpu_lines.processes(place(gpu("n", 0, processes=None)), 2, 66)) == ["cannot be read"]


def test_long_commands_share_the_lines_that_processes_have() -> None:
    command = "python pretrain.py --config configs/llama_8b.yaml --lr 3e-4"
    found = [ProcessView(7 + k, "bob", command, GIB, "compute") for k in range(2)]
    one = place(gpu("n", 0, processes=found))
    first, second = "python pretrain.py --config", "configs/llama_8b.yaml --lr 3e-4"
    assert text(gpu_lines.processes(one, 4, 66)) == [
        f" bob             7  1.0 GiB {first}", " " * 28 + second,
        f" bob             8  1.0 GiB {first}", " " * 28 + second,
    ]  # fmt: skip
    assert [line[28:] for line in text(gpu_lines.processes(one, 3, 66))] == [command, command]


def test_links_as_a_matrix_or_in_a_line() -> None:
    gpus = [gpu("n", k, links={f"GPU-n-{j}": 18 for j in range(3) if j != k}) for k in range(3)]
    of = place(gpus[1], gpus[0], gpus[2])
    assert text(gpu_lines.links(of, 40)) == [
        "GPU        1     0     2",
        "1          X  NV18  NV18",
        "0       NV18     X  NV18",
        "2       NV18  NV18     X",
        "NV# NVLinks",
    ]
    assert text(gpu_lines.links(of, 20)) == ["NV18  GPU 0,2", "NV# NVLinks"]
    assert text(gpu_lines.neighbour_line(of, 40)) == ["Links        NV18 GPU 0,2"]
    assert text(gpu_lines.links(place(gpus[0]), 40)) == ["the only GPU of its node"]
    unread = place(gpu("n", 0), gpu("n", 1))
    assert text(gpu_lines.links(unread, 40)) == ["not readable"]
    assert text(gpu_lines.neighbour_line(unread, 40)) == ["Links        not readable"]


def test_health_in_short() -> None:
    one = gpu("n", 0, ecc_uncorrected=3, remap_pending=False, recovery_action="none", xids=[], pcie_generation=5)
    assert text(gpu_lines.health(one, 60, only_bad=True)) == ["ECC          3 uncorrected since the driver loaded"]
    assert text(gpu_lines.health(gpu("n", 0), 60, only_bad=True)) == [
        "Not readable ECC, Row remap, Recovery, PCIe, XID"
    ]


@given(st.text(max_size=200), st.integers(4, 60))
def test_words_are_broken_so_that_they_fit(words: str, cells: int) -> None:
    lines = wrapped(words, cells, most=1000)
    assert " ".join(lines).split() == words.split()
    assert all(cells_of(line) <= cells or len(line.split()) == 1 for line in lines)


def test_wrapping() -> None:
    assert wrapped("", 10) == []
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("a" * 20 + " b", 7) == ["a" * 20, "b"]
    assert wrapped("漢字 漢字 漢字", 9) == ["漢字 漢字", "漢字"]
    assert wrapped("a b c d", 1, most=2) == ["a", "b c d"]
    assert named("Name", "one two three", "", 23) == [
        [("Name         ", "dim"), ("one two", "")],
        [("             ", "dim"), ("three", "")],
    ]


@pytest.mark.parametrize("width", range(40))
def test_no_width_is_too_small(width: int) -> None:
    one = busy("n", 0, flags=["rogue"], leases=["k3f9"])
    at = place(one, gpu("n", 1), error="ssh: no answer")
    lines = gpu_lines.head(at, scene(), width) + gpu_lines.health(one, width) + gpu_lines.links(at, width)
    lines += gpu_lines.readings(one, SAMPLES, GraphFrame(width, 2, UNICODE)) + node_lines(at.node, UNICODE, width)
    assert "Utilization" in "".join(text(lines))


def test_the_reason_of_a_gpu_begins_with_why_it_is_sick() -> None:
    sick = busy("n", 0, "alice", flags=["sick"], sick=["row remap pending; reset the GPU", "PCIe x4 of x16"])
    why = "sick (row remap pending; reset the GPU; PCIe x4 of x16); "
    assert reason_of(sick, ["alice"]) == f"{why}python (pid 4000)"
    assert reason_of(sick) == f"{why}alice: python (pid 4000)"
    assert reason_of(gpu("n", 1)) == "no process, no reservation"


def test_the_last_values_of_a_gpu_are_kept() -> None:
    memory = Memory("GPU-n-0")
    seen = scene(node("n", [busy("n", 0)]))
    now = seen.places["GPU-n-0"]
    assert memory.look(scene(), 0.0) == Known(None, None, None)
    assert memory.look(seen, 1.0) == Known(now, now, None)
    assert memory.look(scene(), 6.0) == Known(None, now, 5.0)
    lost = scene(node("n", [gpu("n", 0, "broken", error="GPU is lost")]))
    assert memory.look(lost, 7.0) == Known(lost.places["GPU-n-0"], now, 6.0)
    hung = scene(node("n", [gpu("n", 0, "unknown", delay_s=30.0)]))
    assert memory.look(hung, 8.0) == Known(hung.places["GPU-n-0"], now, 30.5), "as old as its reason says"
    assert Memory("GPU-n-0").look(hung, 8.0) == Known(hung.places["GPU-n-0"], hung.places["GPU-n-0"], 30.5)
    assert memory.look(seen, 9.0) == Known(now, now, None)


def test_a_notice_explains_old_values() -> None:
    one = place(busy("n", 0))
    lost = place(gpu("n", 0, "broken", error="GPU is lost", reason="GPU lost: GPU is lost"))
    unreadable = place(gpu("n", 0, "unknown", error="Unknown Error"))
    hung = place(gpu("n", 0, "unknown", reason="last reading is 30 s old", delay_s=30.0))
    never = place(gpu("n", 0, "unknown", error="NVML hangs", memory_used=None))
    stale = place(busy("n", 0), state="stale", error="no reading for 9 s")
    assert [text(notice(known, 100)) for known in (
        Known(one, one, None), Known(None, one, 65.0), Known(None, None, None), Known(lost, one, 5.0),
        Known(unreadable, one, 5.0), Known(stale, stale, 9.0), Known(hung, one, 30.0), Known(never, never, 0.5),
    )] == [
        [],
        ["Gone         No node lists this GPU now. The values shown are 1m old."],
        ["Gone         No node lists this GPU."],
        ["Lost         GPU is lost. The values shown are 5s old."],
        ["Not read     Unknown Error. The values shown are 5s old."],
        ["Stale        n: no new reading. The values shown are 9s old."],
        ["Not read     last reading is 30 s old. The values shown are 30s old."],
        ["Not read     NVML hangs."],
    ]  # fmt: skip


def test_a_node_in_lines() -> None:
    one = node("n", load1=3.5, cuda="13.0", hostname="n.lab", addresses=["10.0.0.1", "fd00::1"], scheduler_state="idle")
    assert text(node_lines(one, UNICODE, 80)) == [
        "n  driver 580.159.04   CUDA 13.0   read through nvml",
        "Connection   up",
        "Scheduler    idle",
        "Last reading 1s ago",
        "CPU          ━━╸─────────────────  12 %   load 3.50",
        "Memory       ━━━━────────────────  97 GiB of 512 GiB",
        "Host name    n.lab",
        "Addresses    10.0.0.1, fd00::1",
    ]


def test_a_node_that_never_answered() -> None:
    cure = "ssh: host key unknown; run: ssh-keyscan gpu07 >> ~/.ssh/known_hosts"
    assert text(node_lines(unread("n", cure), ASCII, 60)) == [
        "n  driver ?   CUDA ?",
        "Connection   unreachable: never connected",
        "Error        ssh: host key unknown; run: ssh-keyscan gpu07",
        "             >> ~/.ssh/known_hosts",
        "Last reading never",
        "CPU          ? %   load ?",
        "Memory       ? of ?",
        "Host name    ?",
        "Addresses    ?",
    ]


def test_a_node_whose_first_answer_is_still_to_come_is_not_called_down() -> None:
    assert node_lines(awaited("n"), ASCII, 60)[1:3] == [
        [("Connection   ", "dim"), ("connecting: no answer yet", "unknown")],
        [("Last reading ", "dim"), ("never", "unknown")],
    ]
    one = place(gpu("n", 0, "unknown", reason="no reading of this GPU yet", memory_used=None))
    about = Place(msgspec.structs.replace(awaited("n"), gpus=[one.gpu]), one.gpu)
    assert text(notice(Known(about, about, 1.0), 60)) == ["Connecting   n: no answer yet."]


def test_a_node_without_reservations_and_a_stale_one() -> None:
    lines = text(node_lines(node("n", claims_error="/var/tmp is NFS"), UNICODE, 80))
    assert lines[2] == "Reservations not possible here: /var/tmp is NFS"
    stale = node("n", state="stale", age_s=12.0, error="no reading for 12 s", connected=True)
    assert text(node_lines(stale, UNICODE, 80))[1:4] == [
        "Connection   stale: connected, but no new reading",
        "Error        no reading for 12 s",
        "Last reading 12s ago",
    ]
