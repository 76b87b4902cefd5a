"""Run with ``-m``: relative imports, its spec, and a spawned child that imports it again."""

import json
import multiprocessing
import sys

from .values import NAME


def child(queue: "multiprocessing.Queue[list[str]]") -> None:
    """Report how the child was started."""
    queue.put([NAME, __name__, sys.argv[0]])


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    seen = {
        "argv": sys.argv,
        "path": sys.path,
        "file": __file__,
        "spec": [__spec__.name, __spec__.origin, __spec__.parent] if __spec__ else None,
        "package": __package__,
        "child": answers.get(timeout=60),
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }
    process.join()
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.exit(5)
