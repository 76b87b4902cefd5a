"""`gpuboard status` as a process: values, failing nodes, --watch on a terminal and in a pipe."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from tests.integration.here import Here
from tests.nvml import GIB, Gpu, Mig
from tests.waiting import read_line


def test_json_has_the_values_of_nvml(here: Here) -> None:
    pid = os.getpid()
    gpus = here.gpus(
        [
            Gpu(),
            Gpu(name="NVIDIA L40S", total=48 * GIB, used=9 * GIB, utilization=73, temperature=64, power=250_500,
                power_limit=350_000, processes=(("compute", pid, 8 * GIB),)),
        ]
    )  # fmt: skip
    found = here.json("status", "--json")
    assert found["schema"] == 1
    [node] = found["nodes"]
    assert (node["state"], node["error"], node["source"], node["driver"], node["cuda"]) == (
        "up", None, "nvml", "580.159.04", "13.0",
    )  # fmt: skip
    first, second = node["gpus"]
    assert [first["uuid"], second["uuid"]] == [gpu.uuid for gpu in gpus]
    assert (first["state"], first["index"], first["memory_used"], first["memory_total"]) == ("free", 0, 0, 80 * GIB)
    expected = {
        "index": 1, "name": "NVIDIA L40S", "state": "busy", "memory_used": 9 * GIB, "memory_total": 48 * GIB,
        "utilization": 73, "temperature": 64, "power": 250.5, "power_limit": 350.0, "pci_bus_id": "00000000:11:00.0",
        "leases": [], "jobs": [], "mig": [],
    }  # fmt: skip
    assert {key: second[key] for key in expected} == expected
    [process] = second["processes"]
    assert (process["pid"], process["memory"], process["type"]) == (pid, 8 * GIB, "compute")


def test_activity_is_measured_when_it_is_asked_for(here: Here) -> None:
    here.gpus([Gpu(gpm={2: 85.4, 5: 61.0}), Gpu(), Gpu(gpm={2: 5.0, 5: 0.0})])
    assert here.json("status", "--json")["nodes"][0]["gpus"][0]["sensors"]["sm_activity"] is None
    found = here.json("status", "--json", "--filter", "sm>10")["nodes"]
    assert [(gpu["index"], gpu["sensors"]["tensor_activity"]) for node in found for gpu in node["gpus"]] == [(0, 61)]
    lines = here.run("status", "--columns", "gpu,sm,tensor", "--sort", "sm").stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["GPU", "SM", "TENSOR"], ["2", "5%", "0%"], ["0", "85%", "61%"], ["1", "?", "?"],
    ]  # fmt: skip
    text = here.run("status", "--format", "csv", "--columns", "gpu,sm,tensor").stdout
    assert text.splitlines()[0] == "gpu,mig_device,sm_activity_percent,tensor_activity_percent"
    assert text.splitlines()[1] == "0,,85,61"


def test_gpu_in_mig_mode_is_never_free_even_if_unreadable(here: Here) -> None:
    unreadable = ("fault nvmlDeviceGetMemoryInfo_v2 4", "fault nvmlDeviceGetComputeRunningProcesses_v3 4")
    failing = Gpu(mig=(Mig("MIG-c"),), trouble=("fault nvmlDeviceGetMemoryInfo_v2 999",))
    here.gpus([Gpu(mig=(Mig("MIG-a"),)), Gpu(mig=(), trouble=unreadable), failing])
    [node] = here.json("status", "--json")["nodes"]
    assert [(gpu["state"], gpu["reason"], gpu["flags"]) for gpu in node["gpus"]] == [
        ("mig", "in MIG mode: its devices can be reserved", ["mig"]),
        ("mig", "in MIG mode, without devices", ["mig"]),
        ("mig", "in MIG mode; NVML: Unknown Error", ["mig"]),
    ]
    assert [[device["state"] for device in gpu["mig"]] for gpu in node["gpus"]] == [["free"], [], []]


JETSON = "ddae9891-aaa8-5edd-bbf3-3a33c5adc75f"
NO_MEMORY = ("fault nvmlDeviceGetMemoryInfo_v2 3", "fault nvmlDeviceGetMemoryInfo 3")
INTEGRATED = tuple(
    f"fault nvmlDevice{name} 3"
    for name in ("GetPciInfo_v3", "GetComputeMode", "GetUtilizationRates", "GetTemperature", "GetMinorNumber")
)


def test_unified_memory_shows_and_marks_the_hosts_memory(here: Here) -> None:
    here.gpus(
        [
            Gpu(name="NVIDIA GB10", trouble=NO_MEMORY),
            Gpu(name="Orin (nvgpu)", uuid=JETSON, trouble=(*NO_MEMORY, *INTEGRATED)),
            Gpu(trouble=NO_MEMORY),  # a discrete one whose memory cannot be read
            Gpu(name="NVIDIA GB10", trouble=NO_MEMORY, processes=(("compute", os.getpid(), 8 * GIB),)),
        ]
    )
    [node] = here.json("status", "--json")["nodes"]
    assert [gpu["state"] for gpu in node["gpus"]] == ["free", "free", "unknown", "busy"]
    assert [gpu["memory_shared"] for gpu in node["gpus"]] == [True, True, False, True]
    assert node["gpus"][2]["reason"] == "not readable: memory"
    for gpu in node["gpus"][:2]:
        assert (gpu["memory_used"], gpu["memory_total"]) == (node["memory_used"], node["memory_total"])
    lines = [line for line in here.run("status").stdout.splitlines() if "memory shared with the host" in line]
    assert len(lines) == 3


def test_gpu_with_unified_memory_can_be_reserved(here: Here) -> None:
    here.needs_claims()
    here.gpus([Gpu(name="Orin (nvgpu)", uuid=JETSON, trouble=(*NO_MEMORY, *INTEGRATED))])
    for words in (["--n", "1", "--gpu-mem", "64MiB"], ["--gpus", JETSON]):
        taken = here.run("allocate", *words, "--uuid", "--detach", "--for", "1m")
        assert (taken.returncode, "CUDA_VISIBLE_DEVICES='0'" in taken.stdout) == (0, True), taken.stderr
        assert here.run("release", "--mine").returncode == 0


def test_sick_flag_has_its_reasons(here: Here) -> None:
    here.gpus([Gpu(remap=(1, 0)), Gpu(), Gpu(pcie=(5, 4, 5, 16)), Gpu(name="NVIDIA A10G", pcie=(4, 8, 4, 16))])
    [node] = here.json("status", "--json")["nodes"]
    assert [gpu["sick"] for gpu in node["gpus"]] == [
        ["row remap pending; reset the GPU"],
        [],
        ["PCIe x4 of x16: narrower than most of its model on this node"],
        [],  # x8 of x16 by construction
    ]
    assert ["sick" in gpu["flags"] for gpu in node["gpus"]] == [True, False, True, False]
    assert "sick (row remap pending; reset the GPU); no process" in here.run("status").stdout


def test_table_without_a_terminal_is_plain_and_complete(here: Here) -> None:
    here.gpus([Gpu(), Gpu(utilization=100)])
    done = here.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    header, free, busy, _, total = done.stdout.splitlines()
    assert header.split()[:4] == ["NODE", "GPU", "MODEL", "STATE"]
    assert free.endswith("no process, no reservation")
    assert busy.endswith("100 % utilization, no process visible")
    assert total == f"{os.uname().nodename.partition('.')[0]}: 2 GPUs: 1 free, 1 busy"
    assert here.run().stdout.splitlines()[0].split() == header.split()  # same output without a command


HOSTILE = [
    '=HYPERLINK("http://x";"a, b")',
    "@SUM(1+1)*cmd|' /C calc'!A0",
    '-2+3", "injected',
    "café 漢字; \x1b[31m[/x]",
]


def test_csv_is_read_back_with_hostile_names(here: Here) -> None:
    pid = os.getpid()
    gpus = here.gpus(
        [Gpu(name=HOSTILE[0]), *(Gpu(name=name, processes=(("compute", pid, GIB),)) for name in HOSTILE[1:])]
    )
    done = subprocess.run(here.command("status", "--format", "csv"), env=here.env, capture_output=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert text.count("\r\n") == len(gpus) + 1
    assert text.count("\n") == text.count("\r\n")
    found = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    assert [row["uuid"] for row in found] == [gpu.uuid for gpu in gpus]
    assert [row["model"] for row in found] == [*("'" + name for name in HOSTILE[:3]), "café 漢字; [31m[/x]"]
    first = {"gpu": "0", "mig_device": "", "state": "free", "users": "", "memory_total_bytes": str(80 * GIB)}
    assert {name: found[0][name] for name in first} == first
    user = here.json("status", "--json")["nodes"][0]["gpus"][1]["processes"][0]["user"]
    assert [row["users"] for row in found[1:]] == [user] * 3
    chosen = here.run("status", "--format=csv", "--columns=index,mem", "--sort=gpu,desc").stdout.splitlines()
    assert chosen[:2] == ["gpu,mig_device,memory_used_bytes,memory_total_bytes", f"3,,0,{80 * GIB}"]


def test_filters_apply_to_the_table_and_json(here: Here) -> None:
    gpus = here.gpus([Gpu(), Gpu(utilization=100), Gpu(name="NVIDIA L40S")])
    [node] = here.json("status", "--json", "--free", "--filter", "model:L40S")["nodes"]
    assert [gpu["uuid"] for gpu in node["gpus"]] == [gpus[2].uuid]
    assert here.json("status", "--json", "--filter", "util>200")["nodes"] == []
    lines = here.run("status", "--columns=gpu,util", "--sort=util,desc").stdout.splitlines()
    assert lines[:2] == ["GPU  UTIL", "  1  100%"]
    here.gpus([Gpu(mig=(Mig("MIG-a", used=30 * GIB), Mig("MIG-b", "1g.10gb", gi=2)))])
    [node] = here.json("status", "--json", "--free")["nodes"]
    assert [device["uuid"] for gpu in node["gpus"] for device in gpu["mig"]] == ["MIG-b"]
    lines = here.run("status", "--format=csv", "--columns=gpu,uuid", "--filter=state:free").stdout.splitlines()
    assert lines[2:] == ["0,1,MIG-b"]
    for args, message in (
        (("--columns", "utl"), "gpuboard: --columns: 'utl' is not a column; did you mean util?"),
        (("--sort", "utl"), "gpuboard: --sort: 'utl' is not a key to sort by; did you mean util?"),
        (("--filter", "utl>1"), "gpuboard: --filter: utl is not a key; the keys are: state, "),
        (("--json", "--sort", "util"), "gpuboard: --columns and --sort are for the table and CSV; "),
        (("--json", "--format", "csv"), "gpuboard: --format cannot be combined with --json"),
    ):
        done = here.run("status", *args)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(message)


def test_missing_nvml_is_a_row_with_the_reason(here: Here) -> None:
    done = here.run("status", LD_LIBRARY_PATH="")
    assert done.returncode == 0  # the node was reached; it has no NVML
    assert re.search(r"NVML: .*(not found|libnvidia-ml)", done.stdout, re.IGNORECASE)
    assert done.stdout.splitlines()[-1].endswith("0 GPUs")
    assert "list the GPU nodes with --nodes 'gpu[01-04]'" in done.stderr
    assert "gpuboard demo --board" in done.stderr
    assert here.run("status", "--nodes", "localhost", LD_LIBRARY_PATH="").stderr == done.stderr
    here.config('nodes = ["localhost"]\n')
    assert here.run("status", LD_LIBRARY_PATH="").stderr == ""  # no hint: nodes are configured


def test_refusing_node_is_a_row_and_delays_no_other(here: Here) -> None:
    here.ssh_config("Host gone\n  HostName 127.0.0.1\n  Port 1\n")
    here.config('nodes = ["localhost", "gone"]\n')
    done = here.run("status")
    assert done.returncode == 0
    assert sum(line.startswith("localhost") for line in done.stdout.splitlines()) == 2
    [row] = [line for line in done.stdout.splitlines() if line.startswith("gone ")]
    assert "unreachable" in row
    assert "refused" in row
    assert done.stdout.splitlines()[-1].endswith("1 of 2 nodes unreachable, its GPUs are not counted")


def test_no_node_reached_is_exit_code_6(here: Here) -> None:
    here.ssh_config("Host gone\n  HostName 127.0.0.1\n  Port 1\n")
    here.config('nodes = ["gone"]\n')
    done = here.run("status", "--json")
    assert done.returncode == 6
    [node] = json.loads(done.stdout)["nodes"]
    assert (node["state"], node["gpus"], node["age_s"]) == ("unreachable", [], None)
    assert "refused" in node["error"]
    assert here.run("leases").returncode == 6


def test_waiting_for_an_unresponsive_node_is_shown_on_a_terminal(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections but never sends an ssh banner
        here.ssh_config(f"Host mute\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        here.config('nodes = ["mute", "localhost"]\nconnect_timeout = "2s"\n')
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            here.command("status", "--json"), env=here.env, stdout=subprocess.PIPE, stderr=theirs, text=True
        ) as child:
            os.close(theirs)
            out = child.communicate(timeout=60)[0]
        output = _read_until(ours, lambda _: False)
        os.close(ours)
    assert "no reading yet from mute" in output
    assert output.endswith("\r\x1b[K")  # then erased
    states = {node["name"]: node["state"] for node in json.loads(out)["nodes"]}
    assert states == {"mute": "unreachable", "localhost": "up"}


def test_watch_json_prints_a_line_per_snapshot_until_ctrl_c(here: Here) -> None:
    with subprocess.Popen(
        here.command("status", "--watch", "0.3", "--json"), env=here.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        lines = [json.loads(read_line(child)) for _ in range(4)]
        while lines[-1]["nodes"][0]["gpus"][0]["state"] != "free":  # after two readings in a row
            lines.append(json.loads(read_line(child)))
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, b"")
    assert len({line["at"] for line in lines}) == len(lines)
    assert {line["schema"] for line in lines} == {1}


def test_watch_redraws_in_place_until_ctrl_c(here: Here) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(here.command()[0], here.command("status", "--watch", "0.3"), here.env | {"TERM": "xterm-256color"})
    text = _read_until(terminal, lambda text: "\x1b[32mfree" in text.rpartition("\x1b[H")[0])
    os.write(terminal, b"\x03")
    _read_until(terminal, lambda _: False)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert text.count("\x1b[2J") == 1  # cleared once; later frames only overwrite
    frame = text.split("\x1b[H")[-2]
    assert "ctrl-C ends" in frame
    assert "\x1b[32mfree" in frame
    assert "Traceback" not in text


def test_no_color_is_honoured_on_a_terminal(here: Here) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(here.command()[0], here.command("status"), here.env | {"NO_COLOR": "1", "TERM": "xterm-256color"})
    text = _read_until(terminal, lambda _: False)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "free" in text
    assert re.findall(r"\x1b\[[0-9;]*m", text) == []


def test_a_hung_gpu_does_not_hide_the_others(here: Here) -> None:
    here.gpus([Gpu(), Gpu(trouble=("hang *",)), Gpu()])
    started = time.monotonic()
    found = here.json("status", "--json")
    assert time.monotonic() - started < 30
    states = [gpu["state"] for gpu in found["nodes"][0]["gpus"] if gpu["state"] != "unknown"]
    assert states == ["free", "free"]


def test_a_gpu_that_hung_at_first_is_listed_once_when_it_can_be_read(here: Here) -> None:
    gpus = here.gpus([Gpu(trouble=("hang *",)), Gpu()])
    with here.start("status", "--watch", "1", "--json") as watching:
        seen: list[list[str]] = []
        while seen[-1:] != [[gpu.uuid for gpu in gpus]] and len(seen) < 60:
            [node] = json.loads(read_line(watching))["nodes"]
            seen.append([gpu["uuid"] for gpu in node["gpus"]])
            here.gpus([Gpu(), Gpu()])
        watching.kill()
    assert seen[0] == [f"unread-{socket.gethostname()}-0", gpus[1].uuid]
    assert {len(uuids) for uuids in seen} == {2}


def _read_until(terminal: int, enough: Callable[[str], bool], timeout_s: float = 60.0) -> str:
    """Return what the terminal's program writes until ``enough(text)``, or to its end."""
    text = ""
    deadline = time.monotonic() + timeout_s
    while not enough(text):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more within {timeout_s} s: {text!r}"
        try:
            data = os.read(terminal, 65536)
        except OSError:  # EIO: the program has ended
            break
        if not data:
            break
        text += data.decode("utf-8", "replace")
    return text
