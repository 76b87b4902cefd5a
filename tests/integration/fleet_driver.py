"""Keeps a fleet open on a test node and prints what it sees: one JSON line for every change.

Usage: fleet_driver.py '{"nodes": [...], "interval_s": 1.0, "settings": {…}}'. Ends at end-of-file on stdin.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import msgspec

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import inventory
from gpuboard.config import Settings
from gpuboard.model.late import plain


def main(options: dict[str, Any]) -> None:
    settings = msgspec.convert({"nodes": options["nodes"], **options.get("settings", {})}, Settings)
    fleet = Fleet(inventory(settings), settings, interval_s=options["interval_s"], one_shot=False)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    fleet.start()
    while not ended.is_set():
        fleet.wait_change(0.25)
        sys.stdout.buffer.write(msgspec.json.encode(fleet.snapshot(), enc_hook=plain) + b"\n")
        sys.stdout.buffer.flush()
    fleet.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
