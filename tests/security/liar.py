"""A lying node's `python3`: takes the agent's place and sends what the node's name asks for, for a minute at most."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator

KINDS = ("uuids", "gpus", "lines", "noise", "bytes", "fast", "claims", "processes", "migs", "replies")
LASTS_S = 60.0


def exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            sys.exit(0)
        data += more
    return data


def line() -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        data += exactly(1)
    return data


def start_line() -> dict[str, object]:
    line()  # the guard
    exactly(int(exactly(8)))  # the agent that was sent
    found: dict[str, object] = json.loads(line())
    return found


def gpu(uuid: str, **more: object) -> dict[str, object]:
    return {"uuid": uuid, "memory_used": 0, "utilization": 0, "compute_mode": 0, "processes": [], **more}


def static(uuid: str, **more: object) -> dict[str, object]:
    return {"index": 0, "uuid": uuid, "name": "H100", "pci_bus_id": "0", **more}


def reading(gpus: list[dict[str, object]], **more: object) -> dict[str, object]:
    return {"t": "reading", "seq": 1, "at": time.time(), "interval_s": 1.0, "gpus": gpus, **more}


def lies(kind: str, frame: bytes) -> Iterator[bytes]:
    """Yield what is written, one piece after the other."""

    def framed(message: dict[str, object]) -> bytes:
        return frame + json.dumps(message, separators=(",", ":")).encode() + b"\n"

    one = reading([gpu("GPU-0")])
    migs = [{"uuid": f"MIG-{k}"} for k in range(1000)]
    endless = {
        "gpus": framed(reading([{"uuid": f"GPU-{k:06d}"} for k in range(100_000)])),
        "lines": framed({**one, "nvml_error": "x" * (4 * 2**20 - 400)}),
        "fast": framed(one),
        "claims": framed({**one, "claims": [
            {"lease": f"l{k}", "uuid": "GPU-0", "uid": 1, "owner": "a", "state": "live", "from": 0, "until": 9}
            for k in range(40_000)
        ]}),
        "processes": framed(reading([gpu("GPU-0", processes=[{"pid": k, "type": "compute"} for k in range(100_000)])])),
        "migs": framed(reading([gpu(f"GPU-{k}", mig=migs) for k in range(100)])),
        "replies": framed({"t": "reply", "id": 4711, "value": ["x" * 1000]}),
        "noise": b"Welcome to the cluster! " * 1000,
    }  # fmt: skip
    number = 0
    while True:
        number += 1
        if kind == "uuids":
            names = [f"GPU-{number}-{k}" for k in range(64)]
            yield framed({"t": "static", "gpus": [static(name) for name in names]}) + framed(
                reading(list(map(gpu, names)))
            )
        elif kind == "bytes":
            yield b"%c" % framed(one)[number % 40]
        else:
            yield endless[kind]


def main() -> None:
    start = start_line()
    config = start["config"]
    assert isinstance(config, dict)
    frame = f"@{start['nonce']}".encode()
    hello = {"t": "hello", "hostname": "x", "boot_id": "b", "uid": 0, "user": "root", "pid": 1, "python": "3"}
    first = [hello, {"t": "static", "gpus": [static("GPU-0")]}, reading([gpu("GPU-0")])]
    os.write(1, b"".join(frame + json.dumps(message).encode() + b"\n" for message in first))
    until = time.monotonic() + LASTS_S
    for piece in lies(str(config["node"]).partition("-")[0], frame):
        left = piece
        while left:
            left = left[os.write(1, left) :]
        if time.monotonic() > until or (select.select([0], [], [], 0)[0] and not os.read(0, 65536)):
            return


if __name__ == "__main__":
    main()
