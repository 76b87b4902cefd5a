"""Do one all-reduce and write its time (CLOCK_MONOTONIC, which all processes of a machine share)."""

import os
import sys
import time

import torch
from torch import distributed

distributed.init_process_group("gloo")
value = torch.ones(1)
distributed.all_reduce(value)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(time.monotonic()))
distributed.destroy_process_group()
