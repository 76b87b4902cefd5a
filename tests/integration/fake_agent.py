"""A node's `python3` for tests: takes the loader's place and behaves as the node's name asks for.

With a file as its argument it is a lying agent: one of two GPUs, whose claims are kept in ``<file>.<node>``, and which
lies where the file, JSON by node, has it: ``hello`` and ``reading`` have fields to replace, ``replies`` by op the raw
bytes behind the reply's id.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


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


class Liar:
    """See the module's docstring."""

    def __init__(self, file: str) -> None:
        with open(file) as text:
            self.lies = json.load(text).get(node, {})
        self.state = f"{file}.{node}"
        self.seq = 0
        self.uid = os.getuid()
        self.gpus = [f"GPU-{node}-{index}" for index in range(2)]

    def run(self) -> None:
        """Serve until the connection ends."""
        first = {"hostname": node, "boot_id": "b", "uid": self.uid, "user": "liar", "pid": os.getpid(), "python": "3"}
        say({"t": "hello", **first, **self.lies.get("hello", {})})
        facts = [{"index": k, "uuid": uuid, "name": "H100", "pci_bus_id": str(k)} for k, uuid in enumerate(self.gpus)]
        say({"t": "static", "gpus": facts})
        if start["config"].get("now"):
            self.reading()
        while True:
            message = json.loads(line())
            if message["t"] == "call":
                self.answer(message["id"], message["op"], message["args"])

    def answer(self, number: int, op: str, args: dict[str, Any]) -> None:
        raw = self.lies.get("replies", {}).get(op) or '"value":' + json.dumps(self.honest(op, args))
        os.write(1, prefix + b'{"t":"reply","id":%d,' % number + raw.encode("utf-8", "surrogateescape") + b"}\n")

    def honest(self, op: str, args: dict[str, Any]) -> object:
        now = time.time()
        claims = self.claims()
        if op == "take":
            self.keep({**claims, args["lease"]: args})
        elif op == "release":
            self.keep({lease: took for lease, took in claims.items() if lease != args["lease"]})
            return {"released": claims.get(args["lease"], {}).get("uuids", [])}
        elif op == "touch":
            alive = [lease for lease in args["leases"] if lease in claims]
            return {"alive": alive, "lapsed": [], "missing": [x for x in args["leases"] if x not in claims]}
        elif op == "carriers":
            return {"processes": []}
        elif op == "read":
            self.reading()
            return {"seq": self.seq}
        return {"until": now + float(args.get("for_s", 0)), "now": now}

    def reading(self) -> None:
        self.seq += 1
        now = time.time()
        gpus = [
            {"uuid": uuid, "memory_used": 0, "utilization": 0, "compute_mode": 0, "processes": []} for uuid in self.gpus
        ]
        claims = [
            {
                "lease": lease, "uuid": uuid, "uid": self.uid, "owner": "alice", "state": "live", "since": now,
                "from": now, "until": now + 600, "remaining_s": 600, "nodes": took["nodes"], "gpus": took["gpus"],
            }
            for lease, took in self.claims().items()
            for uuid in took["uuids"]
        ]  # fmt: skip
        message = {"t": "reading", "seq": self.seq, "at": now, "interval_s": 0, "gpus": gpus, "claims": claims}
        say({**message, **self.lies.get("reading", {})})

    def claims(self) -> dict[str, Any]:
        try:
            with open(self.state) as file:
                found: dict[str, Any] = json.load(file)
                return found
        except FileNotFoundError:
            return {}

    def keep(self, claims: dict[str, Any]) -> None:
        with open(self.state + ".new", "w") as file:
            json.dump(claims, file)
        os.replace(self.state + ".new", self.state)


if len(sys.argv) > 1:
    Liar(sys.argv[1]).run()
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
