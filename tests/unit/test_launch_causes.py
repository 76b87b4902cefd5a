"""The line of a rank's stderr that names its error."""

from __future__ import annotations

import pytest

from gpuboard.launch.causes.stderr import evidence

TRACEBACK = """
Traceback (most recent call last):
  File "/exp/train.py", line 30, in <module>
    main()
  File "/env/lib/python3.12/site-packages/tool/run.py", line 7, in run
    raise Boom("no")
tool.Boom: no
"""
GUARD = """
Traceback (most recent call last):
  File "/exp/train.py", line 12, in <module>
    process.start()
RuntimeError:\x20
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.
"""
TRACKER = """
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""
CUDA = """
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("step 3", "last line on stderr: step 3"),
        ("line 3: nvcc: command not found\nbye", "last error on stderr: line 3: nvcc: command not found"),
        (TRACKER, ""),
        ("Error: no such table\n" + TRACKER, "last error on stderr: Error: no such table"),
        (TRACEBACK + TRACKER, "last error on stderr: tool.Boom: no at /exp/train.py:30"),
        (
            TRACEBACK + "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
            "last error on stderr: tool.Boom: no at /exp/train.py:30",
        ),
        (
            GUARD,
            "last error on stderr: RuntimeError: An attempt has been made to start a new process before the "
            "current process has finished its bootstrapping phase. at /exp/train.py:12",
        ),
        (TRACEBACK + "train failed, see the docs", "last error on stderr: tool.Boom: no at /exp/train.py:30"),
        (
            TRACEBACK + CUDA,
            "last error on stderr: what():  CUDA error: an illegal memory access was encountered",
        ),
        (
            CUDA + "Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):",
            "last error on stderr: what():  CUDA error: an illegal memory access was encountered",
        ),
    ],
)  # fmt: skip
def test_the_newest_error_on_stderr(text: str, line: str) -> None:
    assert evidence([line for line in text.splitlines() if line.strip()]) == line
