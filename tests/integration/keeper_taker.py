"""Take one claim, hand it to the keeper and print lines for a shell: the last steps of allocate only.

Arguments: lease id, GPU's UUID, claims folder, seconds, and a host for ssh or ``-``.
"""

from __future__ import annotations

import json
import os
import sys

from gpuboard.agent.claims import store as claims
from gpuboard.keeper import client as keeper
from gpuboard.keeper import holder


def main() -> None:
    """Print ``export GPUBOARD_LEASE=…``; on a failure, a line that makes ``eval`` fail."""
    lease, uuid, folder, seconds, host = sys.argv[1:]
    settings = json.loads(os.environ.get("TAKER_SETTINGS", "{}"))
    started = keeper.start_early(os.environ)
    who = holder.find_holder()
    args = {
        "lease": lease,
        "uuids": [uuid],
        "for_s": float(seconds),
        "holder": who._asdict(),
        "nodes": ["n"],
        "gpus": 1,
    }
    place = claims.Folder(folder)
    claims.handle("take", args, place)
    node = keeper.KeptNode("n", [uuid], None if host == "-" else host, folder, None)
    try:
        handover = keeper.hand_over(keeper.record(lease, [node], settings, who, float(seconds)), os.environ, started)
    except keeper.KeeperError as error:
        claims.handle("release", {"lease": lease}, place)
        print("false")
        sys.exit(str(error))
    if os.environ.get("TAKER_SILENT"):
        print("handed over", flush=True)
        sys.stdin.read()
    handover.confirm()
    print(f"export GPUBOARD_LEASE={lease}")


if __name__ == "__main__":
    main()
