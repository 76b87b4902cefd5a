"""A node's `python3` for tests: takes the loader's place and behaves as the node's name asks for."""

from __future__ import annotations

import json
import os
import sys
import time


def exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += _read(count - len(data))
    return data


def line() -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        data += _read(1)
    return data


def _read(count: int) -> bytes:
    data = os.read(0, count)
    if not data:
        sys.exit(0)  # the client went away before it had said what it wants
    return data


line()  # the guard
exactly(int(exactly(8)))
start = json.loads(line())
prefix = b"@" + start["nonce"].encode()
node = start["config"]["node"]


def say(message: object) -> None:
    os.write(1, prefix + json.dumps(message).encode() + b"\n")


def hello() -> None:
    say({"t": "hello", "hostname": node, "boot_id": "b", "uid": 0, "user": "root", "pid": os.getpid(), "python": "3"})
    gpu = {"index": 0, "uuid": f"GPU-{node}", "name": "H100 \x1b[31m[/x]", "pci_bus_id": "0"}
    say({"t": "static", "gpus": [gpu], "driver": "580"})


def reading(seq: int) -> None:
    gpu = {"uuid": f"GPU-{node}", "memory_used": 0, "utilization": 0, "compute_mode": 0, "processes": []}
    say({"t": "reading", "seq": seq, "at": time.time(), "interval_s": 0.2, "gpus": [gpu]})


if node.startswith("silent"):
    time.sleep(60)
if node.startswith("dies"):
    sys.stderr.write("Traceback\nOSError: no\x1b[2J space\n")
    sys.exit(3)
if node.startswith("noisy"):
    os.write(1, b"Welcome to the cluster!\n" * 6000)
hello()
if node.startswith("malformed"):
    os.write(1, prefix + b'{"t":"reading","seq":"one"}\n')
if node.startswith("huge"):
    try:
        while True:
            os.write(1, prefix + b"x" * 65536)
    except OSError:
        sys.exit(0)
if node.startswith("late"):
    time.sleep(1.5)
for number in range(1, 1000):
    reading(number)
    if node.startswith("stops"):
        time.sleep(60)
    time.sleep(0.2)
