"""Starts a process under the method spawn without ``if __name__ == "__main__":``, on rank 1: ``no_guard.py _ FILE``."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

from torch import distributed

if os.environ["RANK"] == "1":
    Path(sys.argv[2]).write_text(str(time.time()))
    multiprocessing.set_start_method("spawn", force=True)
    child = multiprocessing.Process(target=print)
    child.start()
    child.join()
    sys.exit(child.exitcode)
distributed.init_process_group("gloo")
distributed.barrier()
