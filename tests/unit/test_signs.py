"""Signs of activity of a real process: what counts, and what a look at it causes itself."""

from __future__ import annotations

import socket
import subprocess
import sys

from gpuboard.agent.launch.watch.signs import QUIET_S, Signs

READER = """
for line in open(0, "rb", 0):
    open(line.decode().split()[0], "rb", 0).read(int(line.split()[1]))
    print(flush=True)
"""


def test_the_few_bytes_that_an_inspection_causes_are_no_activity() -> None:
    """A thread of torch that answers for the first time reads the list of CPUs."""
    now = [1000.0]
    events: list[object] = []
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watched = Signs(lambda _, data: events.append(data["quiet_s"] is not None), lambda: now[0])

        def second(read: str = "/sys/devices/system/cpu/online 64") -> int:
            """Let the process read; return the bytes that were seen to move."""
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(read.encode() + b"\n")
            process.stdout.readline()
            now[0] += 1.0
            watched.sample()
            return watched.recent(0)[1]

        second()
        watched.follow(0, process.pid)
        for _ in range(int(QUIET_S) + 1):
            assert second() == 0
        assert set(events) == {True}  # again when its state changes
        assert second("/dev/zero 4096") > 4096
        assert events[-1] is False
        process.stdin.close()


RECEIVER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as server:
    while (data := server.recv(65536)):
        print(flush=True) if data.endswith(b"\\n") else None
"""


def test_bytes_over_the_network_count_but_for_heartbeats() -> None:
    """A rank that downloads into memory; recv is not in /proc/PID/io."""
    now = [1000.0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", RECEIVER, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process, server.accept()[0] as sender:
            watched = Signs(lambda *_: None, lambda: now[0])
            watched.follow(0, process.pid)

            def second(size: int) -> int:
                """Send that many bytes; return those that were seen to move once they have arrived."""
                assert process.stdout is not None
                sender.sendall(b"x" * (size - 1) + b"\n" if size else b"")
                process.stdout.read(1) if size else None
                now[0] += 1.0
                watched.sample()
                return watched.recent(0)[1]

            second(0)
            second(0)
            assert [second(size) for size in (0, 1000, 100_000, 0)] == [0, 0, 100_000, 0]


LOADER = """
import subprocess, sys, threading
def load():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=0, stdout=1)
    child.wait()
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""


def test_processes_that_another_thread_has_started_count() -> None:
    now = [1000.0]
    events: list[object] = []
    command = [sys.executable, "-c", LOADER, READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watched = Signs(lambda _, data: events.append(data["quiet_s"]), lambda: now[0])
        watched.follow(0, process.pid)
        for _ in range(4 * int(QUIET_S)):
            process.stdin.write(b"/dev/zero 4096\n")
            process.stdout.readline()
            now[0] += 1.0
            watched.sample()
        assert events == []
        for _ in range(int(QUIET_S) + 1):
            now[0] += 1.0
            watched.sample()
        assert events[0] == QUIET_S
        process.stdin.close()
