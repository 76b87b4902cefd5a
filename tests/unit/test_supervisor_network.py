"""Ports, handshakes and addresses, on real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.event_loop import IN, Loop
from gpuboard.agent.launch import CallRefused, network
from tests.waiting import read_line

SECRET = "0123456789abcdef"


def attempt(loop: Loop, targets: list[tuple[str, int]], secret: str = SECRET, timeout_s: float = 0.5) -> dict[int, Any]:
    """Return the results by port."""
    found: list[list[dict[str, Any]]] = []
    wanted = [{"node": "n", "address": address, "port": port} for address, port in targets]
    network.ConnectAttempts(loop, secret, wanted, timeout_s, found.append)
    while not found:
        loop.turn()
    assert len(found) == 1
    return {result["port"]: result for result in found[0]}


def test_results_of_connections() -> None:
    loop = Loop()
    answering = network.Answering(loop, SECRET)
    listener = network.listen("127.0.0.1", 0)
    answering.add(listener)
    port = listener.getsockname()[1]
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # it does not listen, and no other process can
    refused = closed.getsockname()[1]
    silent = socket.create_server(("127.0.0.1", 0))
    targets = [("127.0.0.1", port), ("127.0.0.1", refused), ("no-such-host.invalid", 9)]
    results = attempt(loop, targets, timeout_s=60.0) | attempt(loop, [("127.0.0.1", silent.getsockname()[1])])
    words = [results[p]["result"] for p in (port, refused, silent.getsockname()[1], 9)]
    assert words == ["ok", "refused", "stranger", "unreachable"]
    assert (results[port]["local_address"], results[port]["interface"]) == ("127.0.0.1", "lo")
    assert attempt(loop, [("127.0.0.1", port)], secret="another run")[port]["result"] == "stranger"
    answering.stop()
    silent.close()
    closed.close()
    assert attempt(loop, [("127.0.0.1", port)])[port]["result"] == "refused"


def test_a_late_reply_on_an_accepted_connection_is_ok() -> None:
    loop = Loop()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        caller, _ = listener.accept()
        caller.send(network._mac(SECRET.encode(), caller.recv(64)[-16:]))

        def confirm() -> None:
            caller.recv(network._BULK, socket.MSG_WAITALL)
            caller.send(network._ARRIVED)
            caller.close()

        threading.Thread(target=confirm, daemon=True).start()

    loop.after(0.3, answer)
    port = listener.getsockname()[1]
    assert attempt(loop, [("127.0.0.1", port)], timeout_s=0.2)[port]["result"] == "ok"
    listener.close()


def test_a_path_that_delivers_small_packets_only_is_recognized() -> None:
    loop = Loop()
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def accept() -> None:
        caller, _ = listener.accept()
        accepted.append(caller)
        loop.watch(caller.fileno(), IN, lambda: answer(caller))

    def answer(caller: socket.socket) -> None:
        caller.send(network._mac(SECRET.encode(), caller.recv(64)[-16:]))
        loop.unwatch(caller.fileno())  # the rest does not arrive

    loop.watch(listener.fileno(), IN, accept)
    port = listener.getsockname()[1]
    assert attempt(loop, [("127.0.0.1", port)], timeout_s=0.2)[port]["result"] == "small-only"
    for opened in [listener, *accepted]:
        opened.close()


def test_after_a_suspension_arrived_replies_are_read_before_the_timeout() -> None:
    loop = Loop()
    answering = network.Answering(loop, SECRET)
    answering.add(network.listen("127.0.0.1", 0))
    port = answering._listeners[0].getsockname()[1]
    loop.after(0.0, lambda: time.sleep(0.3))
    assert attempt(loop, [("127.0.0.1", port)], timeout_s=0.2)[port]["result"] == "ok"
    answering.stop()


def test_a_full_backlog_is_dropped() -> None:
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for caller in waiting:
        caller.setblocking(False)
        caller.connect_ex(full.getsockname())
    port = full.getsockname()[1]
    assert attempt(Loop(), [("127.0.0.1", port)], timeout_s=0.2)[port]["result"] == "dropped"
    for opened in [full, *waiting]:
        opened.close()


def test_no_targets_give_no_results_at_once() -> None:
    assert attempt(Loop(), []) == {}


def test_the_master_socket_stays_open_for_the_store() -> None:
    loop = Loop()
    answering = network.Answering(loop, SECRET)
    listener = network.listen("127.0.0.1", 0)
    answering.add(listener)
    answering.leave(listener)
    answering.stop()
    assert listener.fileno() >= 0
    listener.close()


def test_a_port_in_use_names_its_holder() -> None:
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(read_line(child))
    with pytest.raises(CallRefused) as refused:
        network.listen("127.0.0.1", port)
    child.communicate()
    name = os.path.basename(os.path.realpath(sys.executable))[:15]
    assert refused.value.kind == "port-in-use"
    holder = refused.value.detail["holder"]
    assert holder.startswith(f"pid {child.pid} (")
    assert name[:6] in holder
    assert holder in str(refused.value)


def test_an_address_of_another_node() -> None:
    with pytest.raises(CallRefused) as refused:
        network.listen("192.0.2.200", 0)
    assert (refused.value.kind, "127.0.0.1" in str(refused.value)) == ("address", True)
    with pytest.raises(CallRefused) as refused:
        network.listen("no-such-host.invalid", 0)
    assert refused.value.kind == "address"


def test_a_port_of_root() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 2:
        pytest.skip("every user may listen on port 1 here")
    child = os.fork()
    if not child:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            network.listen("127.0.0.1", 1)
        except CallRefused as refused:
            os._exit(42 if refused.kind == "root-port" else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_addresses_by_interface() -> None:
    before = socket.if_nameindex()  # other programs, such as docker, may remove one meanwhile
    found = network.addresses()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= {name for _, name in [*before, *socket.if_nameindex()]}
