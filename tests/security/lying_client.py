"""A client that keeps a fleet open and reports, as JSON, what lying nodes cost it.

python -m tests.security.lying_client SSH_CONFIG PYTHON SECONDS MARKS NODE…

Nodes whose name begins with "honest" are. MARKS: JSON, for each other node the parts of an error that identify its lie.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from gpuboard.cluster.fleet import Fleet
from gpuboard.cluster.inventory.nodes import Node
from gpuboard.config import Settings

INTERVAL_S = 1.0
PATIENCE_S = 60.0  # for the errors of all liars


def main(ssh_config: str, python: str, seconds: float, marks: dict[str, list[str]], names: list[str]) -> None:
    """Watch for ``seconds`` from when all honest nodes are up, until all liars are identified; print what was seen."""
    settings = Settings(ssh_config=ssh_config, python=python, connect_timeout="30s")
    fleet = Fleet([Node(name, name) for name in names], settings, interval_s=INTERVAL_S, one_shot=False)
    fleet.start()
    honest = [name for name in names if name.startswith("honest")]
    fleet.wait(60.0, honest)
    ages: list[float] = []
    errors: dict[str, set[str]] = {}
    up: set[str] = set()

    def identified() -> bool:
        return all(any(part in words for words in errors.get(name, ()) for part in marks[name]) for name in marks)

    began = time.monotonic()
    while (spent := time.monotonic() - began) < seconds or (spent < PATIENCE_S and not identified()):
        fleet.wait_change(INTERVAL_S / 4)
        for node in fleet.snapshot().nodes:
            if node.name in honest:
                ages.append(60.0 if node.age_s is None else node.age_s)
            elif node.error is not None:
                errors.setdefault(node.name, set()).add(f"{node.state}: {node.error}")
            elif node.gpus:
                up.add(node.name)
    last = {node.name: [node.state, len(node.gpus)] for node in fleet.snapshot().nodes}
    print(json.dumps({
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ages": sorted(ages), "errors": {name: sorted(words) for name, words in errors.items()}, "last": last,
        "cpu_s": time.process_time(),
    }))  # fmt: skip
    fleet.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5:])
