"""Asks Slurm on a test host as gpuboard does and prints what it learnt, a JSON object a line.

Usage: slurm_driver.py look|watch '{"settings": {…}, "timeout_s": 15}'. `watch` prints a line for each change, until
end-of-file on stdin. ``took_s``: of the look, or of the closing in the last line of `watch`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from gpuboard.config import Settings
from gpuboard.scheduler.find import find
from gpuboard.scheduler.slurm.service import Slurm

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.waiting import Stopwatch


def main(how: str, options: dict[str, Any]) -> None:
    settings = msgspec.convert(options.get("settings", {}), Settings)
    slurm = find(settings, os.environ)
    if slurm is None:
        print("null", flush=True)
        return
    begun = time.monotonic()
    if how == "look":
        slurm.look(options.get("timeout_s", 15.0))
        _print(slurm, time.monotonic() - begun)
        return
    slurm.start(lambda: _print(slurm, 0.0))
    sys.stdin.read()
    closing = Stopwatch()
    slurm.close()
    _print(slurm, closing.stop())


def _print(slurm: Slurm, took_s: float) -> None:
    seen = slurm.seen
    found = {"seen": seen, "age_s": time.monotonic() - seen.arrived, "took_s": took_s}
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
