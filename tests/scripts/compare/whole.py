"""Print all that a script can see of how it runs, use DataLoaders of two start methods, and end with an exception."""

NAMES = sorted(globals())

import gc  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from inspect import getsource  # noqa: E402

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Squares(Dataset[int]):
    """Defined in __main__, where a spawned worker must find it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def setting() -> dict[str, object]:
    """Return everything that a script can see of how it was started."""
    main = sys.modules["__main__"]
    return {
        "names": NAMES,
        "argv": sys.argv,
        "path": sys.path,
        "file": __file__,
        "spec": str(__spec__),
        "package": __package__,
        "doc": __doc__,
        "loader": type(globals()["__loader__"]).__name__,
        "main is main": main.__dict__ is globals(),
        "cwd": os.getcwd(),
        "parent_process": str(multiprocessing.parent_process()),
        "process": [multiprocessing.current_process().name, multiprocessing.current_process().daemon],
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "threads": [thread.name for thread in threading.enumerate()],
        "handlers": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "stdin": [sys.stdin.read(), sys.stdin.isatty()],
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty(), sys.stdout.line_buffering],
        "nice": os.nice(0),
        "umask": os.umask(0o022),
        "source": getsource(Squares).splitlines()[0],
        "pickled": pickle.loads(pickle.dumps(Squares())).__class__ is Squares,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "settrace": sys.gettrace() is None and sys.getprofile() is None,
    }


def loaders() -> dict[str, object]:
    """Return the results of DataLoader workers: forked with a lambda, spawned with a class of __main__."""
    forked = DataLoader(Squares(), num_workers=1, collate_fn=lambda batch: [x + 1 for x in batch])
    spawned = DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
    return {"forked": [batch[0] for batch in forked], "spawned": [int(batch) for batch in spawned]}


def handled() -> list[str]:
    """Return the signals that the script's own handler receives."""
    seen: list[str] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(signal.Signals(number).name))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return seen


def fail() -> None:
    """Raise out of two frames, with a cause."""
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        raise ValueError("the last word") from error


if __name__ == "__main__":
    found = setting()
    if "LOADERS" in os.environ:
        found["loaders"] = loaders()
    found["handled"] = handled()
    sys.stdout.write(json.dumps(found) + "\n")
    for step in range(4):
        sys.stderr.write(f"\r\x1b[32m{step + 1}/4\x1b[0m")
        sys.stderr.flush()
    sys.stderr.write("\n")
    fail()
