"""The agent of role `runs` on this machine and its client: what is listed and read, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpuboard.cli.main import main
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.launch.runs import folder as run_folder
from gpuboard.launch.runs.access import LocalRun, RunAccess
from gpuboard.launch.runs.control import ControlRequest, ControlServer
from gpuboard.launch.runs.folder import RunFolder, RunView, read_runs
from gpuboard.launch.runs.remote import NodeRuns, RemoteRun, node_of, once
from gpuboard.transport.connector import Connector
from tests.unit.test_runs import view


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, which the agent inherits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return {**os.environ}


@pytest.fixture
def here(env: dict[str, str]) -> Iterator[NodeRuns]:
    connector = Connector(Settings())
    place = NodeRuns(Node("here", None), connector, Settings())
    yield place
    place.close()
    connector.close()


def written(env: dict[str, str], found: RunView) -> Path:
    """Write a run's folder."""
    folder = RunFolder(env, found.id)
    assert folder.keep("state.json", found) is None
    return folder.path


def test_runs_are_listed_as_on_the_node_itself(env: dict[str, str], here: NodeRuns) -> None:
    """A live head, a dead one, one elsewhere, an unreadable state; more than one page."""
    me = run_folder.this_head()
    assert here.runs() == [], "there is no folder yet"
    written(env, view("rlive", me))
    written(env, view("rdead", msgspec.structs.replace(me, start=me.start + 1)))
    written(env, view("rfar", msgspec.structs.replace(me, host="gpu77", boot_id="another", machine="")))
    (written(env, view("rbroken", me)) / "state.json").write_text("{")
    RunFolder(env, "rnew")
    for number in range(40):
        noise = os.urandom(40_000).hex()
        written(env, msgspec.structs.replace(view(f"rx{number}", me), target=noise))
    found = {one.id: one for one in here.runs()}
    local = {one.id: one for one in read_runs(env)}
    assert found.keys() == local.keys()
    assert {run: (one.state, one.folder) for run, one in found.items()} == {
        run: (one.state, one.folder) for run, one in local.items()
    }
    for run in ("rlive", "rdead", "rfar"):
        assert found[run] == msgspec.structs.replace(local[run], node="here")
    assert [one.kind for one in found["rbroken"].verdicts] == ["unreadable"]
    assert here.find("rdea").view() == found["rdead"]
    with pytest.raises(UsageError, match="no run 'rzz'"):
        here.find("rzz")


@pytest.mark.parametrize("remote", [True, False])
def test_files_are_read_in_pieces_and_requests_reach_the_head(
    env: dict[str, str], here: NodeRuns, *, remote: bool
) -> None:
    state = view("rabc", run_folder.this_head())
    folder = written(env, state)
    run: RunAccess = RemoteRun(here, "rabc") if remote else LocalRun(read_runs(env)[0])
    data = os.urandom(3 * 2**20) + b"end"
    (folder / "rank-0.out").write_bytes(data)
    (folder / "rank-1.out").write_bytes(b"x\xff")
    offsets = {"rank-0.out": 0, "rank-0.err": 0, "rank-1.out": 1}
    assert run.sizes(offsets) == {"rank-0.out": len(data), "rank-1.out": 2}
    read = dict.fromkeys(offsets, b"")
    while pieces := run.read({name: offset + len(read[name]) for name, offset in offsets.items()}):
        for name, piece in pieces.items():
            read[name] += piece
    assert read == {"rank-0.out": data, "rank-0.err": b"", "rank-1.out": b"\xff"}
    with pytest.raises(GpuboardError, match="did not respond"):
        run.ask(ControlRequest("stop"))
    text = "a long reply\n" * 100_000
    server = ControlServer(folder, lambda request: {"op": request.op, "grace_s": request.grace_s, "text": text})
    try:
        assert run.ask(ControlRequest("explain", 1.5)) == {"op": "explain", "grace_s": 1.5, "text": text}
    finally:
        server.close()


@pytest.mark.parametrize("name", ["../rabd/state.json", "/etc/passwd", "..", ".hidden", "a/b", ""])
def test_only_files_of_the_run_are_read(env: dict[str, str], here: NodeRuns, name: str) -> None:
    folder = written(env, view("rabc", run_folder.this_head()))
    run = RemoteRun(here, "rabc")
    with pytest.raises(GpuboardError, match="is not a file of a run"):
        run.read({name: 0})
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/passwd")
    for special in ("fifo", "link"):
        with pytest.raises(GpuboardError, match=special):
            run.read({special: 0})
    with pytest.raises(GpuboardError, match="is not a run id"):
        RemoteRun(here, "../runs/rabc").view()


def test_a_run_that_several_nodes_list_appears_once() -> None:
    head = msgspec.structs.replace(run_folder.this_head(), host="gpu02.site")
    seen = [msgspec.structs.replace(view("rabc", head), node=node) for node in ("gpu01", "gpu02", "gpu03")]
    assert [one.node for one in once(seen)] == ["gpu02"]
    ended = msgspec.structs.replace(seen[0], state="done")
    assert once([*seen, ended]) == [ended]
    nodes = [Node("a", "alice@gpu01"), Node("gpu02", "gpu02"), Node("gpu02.other", "gpu02.other")]
    assert node_of(nodes, "gpu02.site") == nodes[1]
    assert node_of(nodes, "gpu01") == nodes[0]
    assert node_of(nodes, "gpu03") is None


def test_a_character_that_two_pieces_of_a_log_share_is_whole(
    env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(env, view("rabc", run_folder.this_head()))
    line = "x" * 63
    (folder / "rank-0.out").write_text(f"{line}\n" * (2**14 - 1) + f"{line}\u20ac\n")  # its first byte is that of a MiB
    assert main(["logs", "rabc"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"[rank 0 gpu01:3] {line}\u20ac"
