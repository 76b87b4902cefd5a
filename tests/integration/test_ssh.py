"""Agents over a real sshd: what reaches the node, what is refused, and how everything ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings
from gpuboard.model.replies import Touched
from gpuboard.model.snapshot import NodeView
from tests.sshd import SSHD, Sshd, children, make_key
from tests.waiting import Stopwatch, kill_each, until

pytestmark = pytest.mark.skipif(SSHD is None or os.geteuid() != 0, reason="needs sshd (openssh-server) and root")

FAKE = Path(__file__).with_name("fake_agent.py")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    try:
        yield server
    finally:
        server.stop()


def fleet(server: Sshd, *names: str, interval_s: float | None = None, **settings: Any) -> Fleet:
    settings = {"ssh_config": str(server.ssh_config), "python": sys.executable, "connect_timeout": "30s"} | settings
    return Fleet([Node(name, name) for name in names], Settings(**settings), interval_s=interval_s)


def look(server: Sshd, *names: str, timeout_s: float = 60, **settings: Any) -> dict[str, NodeView]:
    """Return the nodes ``names`` as a one-shot command reads them."""
    it = fleet(server, *names, **settings)
    it.start()
    try:
        it.wait(timeout_s)
        it.freshen()
        return {node.name: node for node in it.snapshot().nodes}
    finally:
        it.close()


def agents(server: Sshd) -> list[int]:
    """Return the pids of agents (their own children included) below a server."""
    found = []
    for pid in children(server.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"gpuboard.agent.bundle_loader" in command or b"fake_agent" in command:
            found.append(pid)
    return found


def test_ports_aliases_includes_and_jumps_through_jumps_are_followed(sshd: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    changed = tmp_path / "changed"
    changed.write_text(f"[127.0.0.1]:{sshd.port} {(tmp_path / 'other.pub').read_text()}")
    known = tmp_path / "known"
    known.write_text(f"x {(sshd.folder / 'host_key.pub').read_text()}")
    sshd.host("good")
    sshd.host("aliased", HostName="127.0.0.1", HostKeyAlias="x", UserKnownHostsFile=known)
    sshd.host("changed", UserKnownHostsFile=changed)
    sshd.host("keyless", IdentityFile=tmp_path / "missing")
    sshd.host("jump", ProxyJump="good")
    sshd.host("jump-twice", ProxyJump="good,jump")
    sshd.host("jump-closed", ProxyJump="good", Port=1)
    own = tmp_path / "config"
    own.write_text(f"Include {tmp_path}/more\nInclude {sshd.ssh_config}\n")
    (tmp_path / "more").write_text("Host elsewhere\n    ProxyJump good\nHost *\n    User root\n")
    seen = look(sshd, "aliased", "changed", "keyless", "jump-twice", "jump-closed", ssh_config=str(own))
    assert {name: (node.state, node.hostname) for name, node in seen.items() if node.state == "up"} == {
        name: ("up", os.uname().nodename) for name in ("aliased", "jump-twice")
    }
    words = {
        "changed": ("ssh: the host key of changed has CHANGED (ssh-ed25519 SHA256:", f"-R '[127.0.0.1]:{sshd.port}'"),
        "keyless": ("ssh: root@keyless was refused: no key was accepted", "IdentityFile"),
        "jump-closed": ("ssh: jump-closed cannot be reached through good: Connection refused", ""),
    }
    for name, (what, remedy) in words.items():
        error = seen[name].error or ""
        assert error.startswith(what), error
        assert remedy in error


@pytest.mark.parametrize("python", ["/etc/passwd", "/nonexistent/python3"])
def test_a_node_without_python_is_reported(sshd: Sshd, python: str) -> None:
    sshd.host("bare")
    node = look(sshd, "bare", python=python)["bare"]
    assert node.state == "unreachable"
    assert (node.error or "").startswith(f"{python} cannot be started there (")
    assert (node.error or "").endswith("; install python3 (3.6 or later) or set `python` in the config")


def test_bad_agents_affect_their_own_node_only(sshd: Sshd) -> None:
    names = ["good1", "malformed", "huge", "dies", "noisy", "late", "silent", "stops", "good2"]
    for name in names:
        sshd.host(name)
    wrapper = sshd.folder / "fake_python"
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {FAKE}\n")
    wrapper.chmod(0o755)
    it = fleet(sshd, *names, interval_s=0.2, python=str(wrapper))
    try:
        it.start()
        it.wait(60, [name for name in names if name != "silent"])

        def right() -> dict[str, NodeView]:
            """Return the nodes once one has stopped and all readings of the others have arrived."""
            seen = {node.name: node for node in it.snapshot().nodes}
            stopped = (seen["stops"].age_s or 0) > 1
            fresh = max(seen[name].age_s or 9 for name in ("good1", "good2", "late")) < 0.6
            return seen if stopped and fresh else {}

        seen = until(right, "one stopped, others go on")
        assert {name for name in names if seen[name].state == "up"} - {"stops"} == {"good1", "good2", "late"}
        assert seen["stops"].state in {"up", "stale"}
        assert [seen[name].gpus[0].state for name in ("good1", "good2")] == ["free", "free"]
        assert seen["good1"].gpus[0].name == "H100 [31m[/x]"
        assert (seen["malformed"].error or "").startswith("malformed answer: Expected `int`, got `str`")
        assert seen["malformed"].gpus[0].state == "unknown"
        assert seen["huge"].error == "malformed answer: a line without end"
        assert seen["dies"].error == "the agent ended with exit code 3: OSError: no[2J space"
        assert seen["noisy"].error == (
            "malformed answer: the node's shell start-up files print more than 64 kB; "
            "run `ssh NODE true` and see what it prints"
        )
        assert (seen["silent"].state, seen["silent"].error) == ("unreachable", "no answer yet")
        assert [name for name in names if seen[name].connecting] == ["silent"]
        until(lambda: it.snapshot().nodes[names.index("stops")].state == "stale", "stale after 5 s")
        stopped = it.snapshot().nodes[names.index("stops")]
        assert stopped.gpus[0].state == "unknown"
    finally:
        it.close()
    until(lambda: not agents(sshd), "all agents gone")


def test_a_stopped_sshd_delays_neither_other_nodes_nor_the_exit(sshd: Sshd, tmp_path: Path) -> None:
    hung = Sshd(tmp_path)
    try:
        sshd.host("hung", Port=hung.port, UserKnownHostsFile=hung.known_hosts, IdentityFile=hung.key)
        sshd.host("well1")
        sshd.host("well2")
        os.kill(hung.process.pid, signal.SIGSTOP)
        it = fleet(sshd, "hung", "well1", "well2", interval_s=0.2, connect_timeout="30s")
        try:
            it.start()
            readings: dict[str, list[float]] = {"well1": [], "well2": []}

            def ten_of_each() -> bool:
                it.wait_change(1)
                for node in it.snapshot().nodes[1:]:
                    seen = readings[node.name]
                    if node.age_s is not None and (not seen or node.age_s < seen[-1]):
                        seen.append(node.age_s)
                    elif node.age_s is not None:
                        seen[-1] = node.age_s
                return all(len(seen) >= 10 for seen in readings.values())

            until(ten_of_each, "ten readings of each")
            node = it.snapshot().nodes[0]
            assert (node.state, node.error, node.connecting) == ("unreachable", "no answer yet", True)
        finally:
            start = Stopwatch()
            it.close()
            took_s = start.stop()
        assert took_s < 3.0
        error = look(sshd, "hung", connect_timeout="1s")["hung"].error
        assert error == "ssh: no answer in 1 s; is the node hung or overloaded?"
    finally:
        hung.stop()


def test_a_killed_agent_is_replaced_and_readings_continue(sshd: Sshd) -> None:
    sshd.host("one")
    it = fleet(sshd, "one", interval_s=0.2)
    try:
        it.start()
        it.wait(60)
        first = agents(sshd)
        os.kill(sshd.process.pid, signal.SIGSTOP)  # no new login until the check below
        kill_each(first)
        until(lambda: "killed" in (it.snapshot().nodes[0].error or ""), "its end is seen")
        os.kill(sshd.process.pid, signal.SIGCONT)
        until(lambda: it.snapshot().nodes[0].error in {None, NO_DRIVER}, "a reading of the next one")
        assert set(agents(sshd)).isdisjoint(first)
    finally:
        os.kill(sshd.process.pid, signal.SIGCONT)
        it.close()


NO_DRIVER = "NVML: no NVIDIA driver here (libnvidia-ml.so.1 not found)"


def test_a_one_shot_fleet_connects_again_for_a_call(sshd: Sshd) -> None:
    sshd.host("one")
    it = fleet(sshd, "one")
    try:
        it.start()
        it.wait(60)
        assert it.call("one", "touch", {"leases": []}, 60, Touched) == Touched([], [], [])
        kill_each(agents(sshd))
        until(lambda: it.snapshot().nodes[0].error not in {None, NO_DRIVER}, "its end is seen")
        calls: dict[str, Any] = {"one": ("touch", {"leases": []})}
        until(lambda: isinstance(it.call_all(calls, 60, Touched)["one"], Touched), "an answer again")
    finally:
        it.close()


def test_nothing_is_written_on_the_node(sshd: Sshd) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    sshd.host("traced")
    log = sshd.folder / "trace"
    wrapper = sshd.folder / "traced_python"
    calls = "trace=open,openat,creat,mkdir,mkdirat,link,linkat,symlink,symlinkat,rename,renameat,renameat2,mknod"
    wrapper.write_text(f'#!/bin/sh\nexec {strace} -f -o {log} -e {calls} {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    it = fleet(sshd, "traced", python=str(wrapper))
    it.start()
    it.wait(60)
    assert it.snapshot().nodes[0].state == "up"
    assert it.refresh(["traced"], 60) in ({}, {"traced": NO_DRIVER.removeprefix("NVML: ")})
    it.close()
    until(lambda: not agents(sshd), "the agent ended")
    lines = [line for line in log.read_text().splitlines() if " = -1 " not in line]
    assert any("openat(" in line for line in lines)
    writes = [line for line in lines if "openat(" not in line and "open(" not in line and "(" in line]
    writes += [line for line in lines if "O_CREAT" in line or ("O_WRONLY" in line or "O_RDWR" in line)]
    assert [line for line in writes if "/dev/null" not in line and "+++" not in line and "---" not in line] == []
