"""`gpuboard record`, and `status --replay` on what it recorded, as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

from gpuboard.model.units import iso
from gpuboard.recording.file import Recording
from gpuboard.recording.frames import Frame
from tests.integration.here import Here
from tests.nvml import GIB, LOST, Gpu
from tests.waiting import until


def test_a_recording_has_what_status_had(here: Here, tmp_path: Path) -> None:
    here.gpus([Gpu(), Gpu(name="NVIDIA L40S", total=48 * GIB, used=9 * GIB, utilization=73, power=250_500)])
    file = tmp_path / "a.gz"
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    recording = here.start("record", str(file), "--every", "1s")
    signal.signal(signal.SIGHUP, hangup)
    try:
        until(lambda: file.stat().st_size if file.exists() else 0, "a member is written")
        assert Path(f"/proc/{recording.pid}/status").read_text().partition("SigIgn:\t")[2][15] == "1"
    finally:
        recording.send_signal(signal.SIGTERM)
        _, err = recording.communicate(timeout=60)
    assert recording.returncode == 0, err
    assert f"{file}: " in err
    assert " frame" in err
    now = here.json("status", "--json")
    then = json.loads(here.run("status", "--json", "--replay", str(file)).stdout)
    same = ("uuid", "name", "state", "memory_used", "memory_total", "utilization", "temperature", "power")
    before, after = ([{key: gpu[key] for key in same} for gpu in found["nodes"][0]["gpus"]] for found in (now, then))
    for gpu in before:
        gpu["power"] = round(gpu["power"])  # a recording has whole watts
    assert after == before
    assert then["nodes"][0]["age_s"] < 60
    table = here.run("board", "--replay", str(file), "--at", "-0.1s").stdout  # no terminal: the status
    assert "L40S" in table
    assert "73%" in table
    refused = here.run("record", str(file))
    assert (refused.returncode, refused.stderr) == (2, f"gpuboard: {file} exists; name a new file\n")


def test_a_recording_has_the_events_of_its_time(here: Here, tmp_path: Path) -> None:
    here.gpus([Gpu(), Gpu()])
    file = tmp_path / "a.gz"
    process = here.start("record", str(file), "--every", "1s")

    def newest() -> Frame:
        recording = Recording(file)
        found = recording.at(recording.end)
        recording.close()
        return found

    try:
        until(lambda: file.stat().st_size if file.exists() else 0, "a member is written")
        begin = newest()
        here.gpus([Gpu(), Gpu(trouble=(f"fault * {LOST}",))])
        until(lambda: newest().events, "a GPU is lost", 60)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert begin.events == []
    [event] = [one for one in newest().events or () if one.kind == "lost"]
    assert (event.gpus, event.by) == ("1", "")
    frames = Recording(file).frames()
    first = next(one for one in frames if one.snapshot.nodes[0].gpus[1].state == "broken")
    assert event.at == iso(first.at)


def test_bad_input(here: Here, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    os.mkfifo(tmp_path / "fifo")
    for words, message in (
        (["status", "--replay", "nosuch"], "cannot read nosuch: No such file or directory"),
        (["status", "--replay", str(tmp_path / "text")], "is not a recording of gpuboard"),
        (["status", "--replay", str(tmp_path / "fifo")], "fifo: not a regular file"),
        (["status", "--replay", ""], "--replay: empty value; is a shell variable unset?"),
        (["status", "--replay", "x", "--nodes", "gpu01"], "--nodes cannot be combined with --replay"),
        (["status", "--at", "-10m"], "--at needs --replay FILE"),
        (["board", "--speed", "2"], "--speed needs --replay FILE"),
        (["record", "/nosuch/a.gz"], "cannot create /nosuch/a.gz: No such file or directory"),
        (["record", str(tmp_path / "b.gz"), "--every", "0.5s"], "is not between one second and an hour"),
        (["record", str(tmp_path / "b.gz"), "--nodes", "gpu["], "a bracket is not closed"),
    ):
        done = here.run(*words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "b.gz").exists()


def test_ctrl_c_before_the_first_frame_leaves_no_file(here: Here, tmp_path: Path) -> None:
    file = tmp_path / "none.gz"
    here.config('connect_timeout = "10m"\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections but never sends an ssh banner
        here.ssh_config(f"Host mute\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        recording = here.start("record", str(file), "--nodes", "mute")
        until(file.exists, "it has begun")
        recording.send_signal(signal.SIGINT)
        _, err = recording.communicate(timeout=60)
    assert (recording.returncode, file.exists()) == (130, False)
    assert "nothing was recorded" in err
