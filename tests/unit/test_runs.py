"""The folders of runs: private, complete, found by name; a run whose head has died is failed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpuboard.agent import proc
from gpuboard.cli.run_access import listed_runs
from gpuboard.cli.use import stop
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.keeper import holder
from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.access import LocalRun
from gpuboard.launch.runs.control import ControlRequest, ControlServer, ask
from gpuboard.launch.runs.folder import (
    HeadProcess,
    RankView,
    RunFolder,
    RunState,
    RunView,
    VerdictView,
    find_run,
    read_runs,
)
from gpuboard.launch.runs.index import Runbook
from gpuboard.launch.stalls.request import explain_run
from tests.calls import calls_of
from tests.integration.here import Here


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


def view(
    run: str, head: HeadProcess, state: RunState = "running", started: str = "2026-01-31T12:00:00.000Z"
) -> RunView:
    """Return a run of one rank."""
    ranks = [RankView(0, "gpu01", 0, 3, 4242, "running", "loss 0.3")]
    return RunView(run, "k3f9", "train.py --lr 1", started, state, None, ranks, [], head)


def test_a_run_is_private_and_found_again(env: dict[str, str]) -> None:
    folder = RunFolder(env, "rabc")
    written = view("rabc", run_folder.this_head())
    assert folder.keep("state.json", written) is None
    assert read_runs(env) == [msgspec.structs.replace(written, folder=str(folder.path))]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "state.json").stat().st_mode & 0o777 == 0o600


def test_a_state_is_replaced_atomically(env: dict[str, str]) -> None:
    folder = RunFolder(env, "rabc")
    folder.keep("state.json", view("rabc", run_folder.this_head()))
    with (folder.path / "state.json").open("rb") as before:
        folder.keep("state.json", view("rabc", run_folder.this_head(), "done"))
        assert b'"running"' in before.read(), "a reader of the old file sees the old state, whole"
    assert read_runs(env)[0].state == "done"


def test_a_run_whose_head_has_died_is_failed(env: dict[str, str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = holder.identify(child.pid)
    assert start is not None
    RunFolder(env, "rabc").keep("state.json", view("rabc", HeadProcess(*start)))
    assert read_runs(env)[0].state == "running"
    child.kill()
    child.wait()
    died = read_runs(env)[0]
    assert (died.state, died.verdicts[-1].kind, died.exit_code) == ("failed", "head-died", None)
    assert f"pid {child.pid}" in died.verdicts[-1].text


def test_old_runs_are_deleted_but_none_that_may_be_in_progress(env: dict[str, str]) -> None:
    elsewhere = HeadProcess("other", "boot", 1, 1)
    runs: list[tuple[str, int, RunState]] = [
        ("rold", 100, "done"), ("rbig", 50, "failed"), ("rnew", 10, "stopped"), ("rgone", 100, "failed"),
        ("rhere", 100, "running"), ("rthere", 100, "running"),
    ]  # fmt: skip
    for run, age_s, state in runs:
        folder = RunFolder(env, run)
        folder.keep("state.json", view(run, elsewhere if run == "rthere" else run_folder.this_head(), state))
        (folder.path / "rank-0.out").write_bytes(b"x" * 10_000)
        at = time.time() - age_s
        os.utime(folder.path / "state.json", (at, at))
    (run_folder.runs_dir(env) / "rgone" / "state.json").write_text("{")  # a newer gpuboard, or a failing disk
    (run_folder.runs_dir(env) / "link").symlink_to(env["HOME"])
    run_folder.prune(env, 60.0, 10**6)
    assert {entry.name for entry in run_folder.runs_dir(env).iterdir()} == {
        "rbig", "rnew", "rgone", "rhere", "rthere", "link",
    }  # fmt: skip
    run_folder.prune(env, 60.0, 45_000)
    assert {entry.id for entry in read_runs(env)} == {"rnew", "rgone", "rhere", "rthere"}
    run_folder.prune(env, 60.0, 1)
    assert {entry.id for entry in read_runs(env)} == {"rgone", "rhere", "rthere"}


@pytest.mark.parametrize(
    "read",
    [lambda env: read_runs(env)[0], lambda env: next(e.view for e in Runbook(env).read() if e.written > 1)],
)
def test_a_run_that_ends_while_it_is_read_is_done(
    env: dict[str, str], read: Callable[[dict[str, str]], RunView]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = holder.identify(child.pid)
    assert start is not None
    folder = RunFolder(env, "rabc")
    folder.keep("state.json", view("rabc", HeadProcess(*start)))
    os.utime(folder.path / "state.json", (1, 1))  # long ago

    def end() -> None:
        """Write the final state and end, before the head is looked for."""
        folder.keep("state.json", view("rabc", HeadProcess(*start), "done"))
        child.kill()
        child.wait()

    with calls_of(run_folder.alive, end) as calls:
        found = read(env)
    assert calls
    assert (found.state, found.verdicts) == ("done", [])


def test_after_a_reboot_the_head_is_dead_and_on_another_host_unknown(env: dict[str, str]) -> None:
    me = run_folder.this_head()
    assert run_folder.alive(me) is True
    assert run_folder.alive(msgspec.structs.replace(me, boot_id="another")) is False
    assert run_folder.alive(msgspec.structs.replace(me, start=me.start + 1)) is False
    elsewhere = HeadProcess("login9", "another", 1, 1)
    assert run_folder.alive(elsewhere) is None
    RunFolder(env, "rabc").keep("state.json", view("rabc", elsewhere))
    assert read_runs(env)[0].state == "running"


def test_a_head_is_found_dead_after_its_host_was_renamed(env: dict[str, str]) -> None:
    """As on a laptop: in the same boot, and after a reboot where the folder is on a disk of its own."""
    me = msgspec.structs.replace(run_folder.this_head(), host="name-of-yesterday")
    assert run_folder.alive(me) is True
    assert run_folder.alive(msgspec.structs.replace(me, start=me.start + 1)) is False
    rebooted = msgspec.structs.replace(me, boot_id="another", machine="0123456789abcdef")
    RunFolder(env, "rabc").keep("state.json", view("rabc", rebooted))
    assert read_runs(env)[0].state == "running", "another machine may run it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proc, "machine_id", lambda: rebooted.machine)  # containers often have none
        assert [verdict.kind for verdict in read_runs(env)[0].verdicts] == ["head-died"]
        assert run_folder.alive(rebooted, "/proc") is False
        assert run_folder.alive(rebooted) is None, "a note of a run: its folder is on another machine"
    container = msgspec.structs.replace(run_folder.this_head(), start=1, namespace="pid:[1]")
    assert run_folder.alive(container) is None, "a process of another PID namespace is not seen"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"id": 1}'])
def test_a_state_that_cannot_be_read_is_a_row(env: dict[str, str], content: bytes) -> None:
    (RunFolder(env, "rabc").path / "state.json").write_bytes(content)
    found = read_runs(env)[0]
    assert (found.id, found.state, found.verdicts[0].kind) == ("rabc", "failed", "unreadable")


def test_runs_are_found_by_the_start_of_their_id_and_by_last(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"^there are no runs in"):
        find_run(env, "last")
    with pytest.raises(UsageError, match=r"^no run 'raaa': there are no runs in"):
        find_run(env, "raaa")
    for minute, run in enumerate(("rbbb2", "raaa1", "rbba3")):
        RunFolder(env, run).keep(
            "state.json", view(run, run_folder.this_head(), "done", f"2026-01-31T12:0{minute}:00.000Z")
        )
    assert [find_run(env, name).id for name in ("last", "ra", "rbbb", "rbbb2")] == ["rbba3", "raaa1", "rbbb2", "rbbb2"]
    with pytest.raises(UsageError, match="run 'rbb' is ambiguous: rbbb2, rbba3"):
        find_run(env, "rbb")
    with pytest.raises(UsageError, match="no run 'x'; recent runs: "):
        find_run(env, "x")
    with pytest.raises(UsageError, match="is not a run id"):
        find_run(env, "../../etc")


def test_a_folder_that_cannot_be_created_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GpuboardError, match="set XDG_STATE_HOME to a folder that you can write to"):
        RunFolder({"XDG_STATE_HOME": str(tmp_path / "file")}, "rabc")


def test_a_folder_whose_path_is_not_utf_8_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(GpuboardError, match=r"h\\udcff.*: the path is not UTF-8; set XDG_STATE_HOME to a folder"):
        RunFolder({"XDG_STATE_HOME": f"{tmp_path}/h\udcff"}, "rabc")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_written_is_reported(env: dict[str, str]) -> None:
    folder = RunFolder(env, "rabc")
    (folder.path / "state.json").mkdir()
    assert "Is a directory" in (folder.keep("state.json", view("rabc", run_folder.this_head())) or "")


def test_the_control_socket_works_under_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    asked: list[ControlRequest] = []

    def answer(request: ControlRequest) -> object:
        asked.append(request)
        return {"run": "rabc"}

    server = ControlServer(folder, answer)
    assert ask(folder, ControlRequest("stop", 5.0)) == {"run": "rabc"}
    server.close()
    assert asked == [ControlRequest("stop", 5.0)]
    assert not os.path.lexists(folder / "control.sock")
    with pytest.raises(GpuboardError, match="`gpuboard launch` did not respond"):
        ask(folder, ControlRequest("state"))


def test_a_head_that_was_short_of_descriptors_can_still_be_stopped(tmp_path: Path) -> None:
    program = """
import os, resource, socket, sys, time
from pathlib import Path
from gpuboard.launch.runs.control import ControlRequest, ControlServer, ask
folder = Path(sys.argv[1])
server = ControlServer(folder, lambda request: {"op": request.op})
client = socket.socket(socket.AF_UNIX)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    client.connect(str(folder / "control.sock"))
time.sleep(0.5)
for fd in opened:
    os.close(fd)
print(ask(folder, ControlRequest("stop")))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{'op': 'stop'}\n", "")


def test_a_look_at_one_run_reads_its_state_alone(env: dict[str, str]) -> None:
    """Neither another run whose state cannot be read nor the id in a copied state.json matters."""
    path = RunFolder(env, "rabc").path
    (path / "state.json").write_bytes(msgspec.json.encode(view("rcopied", run_folder.this_head())))
    run = LocalRun(find_run(env, "rabc"))
    os.mkfifo(RunFolder(env, "rother").path / "state.json")  # to read it would block
    assert (run.view().id, run.view().folder) == ("rabc", str(path))
    shutil.rmtree(path)
    with pytest.raises(UsageError, match=f"run rabc: {path} was deleted"):
        run.view()


@pytest.mark.parametrize(("grace_s", "longest"), [(0.0, "15 s"), (5.0, "20 s"), (None, "3615 s")])
def test_stop_waits_for_the_grace_and_a_margin(
    grace_s: float | None, longest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(LocalRun):
        def view(self) -> RunView:
            return view("rabc", run_folder.this_head())

        def ask(self, request: ControlRequest, timeout_s: float = 5.0) -> object:
            return {}

    ticks = iter(range(0, 10_000, 10))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(stop, "time", clock)
    with pytest.raises(GpuboardError, match=f"did not end within {longest};"):
        stop._stop(Endless(view("rabc", run_folder.this_head())), grace_s)


def test_a_run_that_ends_while_it_is_explained_has_its_verdicts(env: dict[str, str]) -> None:
    folder = RunFolder(env, "rabc")
    running = view("rabc", run_folder.this_head())
    folder.keep("state.json", running)

    def end(_: ControlRequest) -> object:
        verdict = VerdictView("", "exit", 0, "gpu01", "root cause: rank 0", "exit code 3")
        folder.keep("state.json", msgspec.structs.replace(running, state="failed", verdicts=[verdict]))
        raise OSError  # as its process ends

    server = ControlServer(folder.path, end)
    found = explain_run(LocalRun(find_run(env, "rabc")))
    server.close()
    assert found.picture == ["root cause: rank 0", "exit code 3"]


def test_a_detached_run_whose_folder_on_its_node_is_gone_has_ended(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = msgspec.structs.replace(view("rabc", HeadProcess("gpu07", "boot", 1, 1)), node="gpu07")
    run_folder.note(env, noted)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "gpu07"))  # of the node's agent
    scope = SimpleNamespace(nodes=[Node("gpu07", None)])
    found: Any = SimpleNamespace(env=env, settings=Settings(), scope=lambda: scope, new_scheduler=lambda: None)
    (listed,), failed = listed_runs(found)
    assert (listed.state, listed.verdicts[-1].kind, failed) == ("failed", "head-died", {})
    assert "its folder on gpu07 does not exist any more" in listed.verdicts[-1].text
    assert [run.state for run in read_runs(env)] == ["failed"], "it is not asked for again"
    run_folder.prune(env, -1.0, 0)
    assert read_runs(env) == []


def test_a_node_that_gives_no_answer_is_named_once_and_in_json(here: Here) -> None:
    here.ssh_config("Host gone01\n  HostName 127.0.0.1\n  Port 1\n")
    here.config('nodes = ["gone01"]\n')
    run_folder.note(here.env, msgspec.structs.replace(view("rabc", HeadProcess("gone01", "b", 1, 1)), node="gone01"))
    for words, code in ((["runs", "--json"], 0), (["runs", "--json", "--all-nodes"], 6)):
        done = here.run(*words)
        found = json.loads(done.stdout)
        assert (done.returncode, [run["id"] for run in found["runs"]], [*found["failed"]]) == (
            code,
            ["rabc"],
            ["gone01"],
        )
        assert done.stderr == f"gpuboard: gone01: runs there are not listed: {found['failed']['gone01']}\n"


def test_ids_differ() -> None:
    ids = {run_folder.new_run_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(run) == 8 and run[0] == "r" for run in ids)
