"""The line of a rank's stderr that names its error."""

from __future__ import annotations

import pytest

from gpuboard.launch.causes.advice import advice
from gpuboard.launch.causes.stderr import evidence, root_error

TRACEBACK = """
Traceback (most recent call last):
  File "/exp/train.py", line 30, in <module>
    main()
  File "/env/lib/python3.12/site-packages/tool/run.py", line 7, in run
    raise Boom("no")
tool.Boom: no
"""
INSTALLED = """
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/env/lib/python3.12/site-packages/vision/train.py", line 30, in <module>
    loss(batch)
  File "/env/lib/python3.12/site-packages/torch/nn/functional.py", line 7, in cross_entropy
    raise Boom("no")
ValueError: no
"""
GUARD = """
Traceback (most recent call last):
  File "/exp/train.py", line 12, in <module>
    process.start()
RuntimeError:\x20
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.
"""
SPAWNED = """
W1123 22:20:16.7 13766 torch/multiprocessing/spawn.py:165] Terminating process 13942 via signal SIGTERM
Traceback (most recent call last):
  File "/exp/train.py", line 12, in <module>
    mp.spawn(f, nprocs=2)
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 1
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


CHILD = """
step 4
Traceback (most recent call last):
  File "/exp/prepare.py", line 8, in read
    raise KeyError("vocab")
KeyError: 'vocab'
[rank1]: Traceback (most recent call last):
[rank1]:   File "/exp/train.py", line 3, in <module>
[rank1]:     subprocess.run(["python", "prepare.py"], check=True)
[rank1]:   File "/usr/lib/python3.11/subprocess.py", line 571, in run
[rank1]:     raise CalledProcessError(retcode, process.args,
[rank1]: subprocess.CalledProcessError: Command '['python', 'prepare.py']' returned non-zero exit status 1.
"""
TORCHRUN = """
W1123 15:57:29.1 1063 torch/distributed/run.py:852] Setting OMP_NUM_THREADS
[rank1]: Traceback (most recent call last):
[rank1]:   File "/exp/child.py", line 8, in f
[rank1]:     raise ValueError("batch of size 0")
[rank1]: ValueError: batch of size 0
[rank0]: Traceback (most recent call last):
[rank0]:   File "/exp/child.py", line 9, in <module>
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4240
E1123 15:57:31.1 1063 torch/distributed/elastic/multiprocessing/api.py:987] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
child.py FAILED
exitcode  : -15 (pid: 10639)  (SIGTERM)
Traceback (most recent call last):
  File "/exp/train.py", line 3, in <module>
subprocess.CalledProcessError: Command '['python', '-m', 'torch.distributed.run', 'child.py']' returned non-zero
"""
CRASH = """
Fatal Python error: Segmentation fault

Thread 0x00007f8a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f8b (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/exp/kernels.py", line 12 in scatter
  File "/exp/train.py", line 40 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 20)
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("step 3", "last line on stderr: step 3"),
        ("line 3: nvcc: command not found", "last error on stderr: line 3: nvcc: command not found"),
        ("nvcc: command not found\nbye", "last error on stderr: nvcc: command not found; last line: bye"),
        ("curl: (22) returned error: 404", "last error on stderr: curl: (22) returned error: 404"),
        (
            "09:41 epoch 19: train error 0.31, test error: 0.42\n09:42 INFO retry failed\n09:42 quota used up",
            "last line on stderr: 09:42 quota used up",
        ),
        (
            "epoch 19: error .31, cannot save: no space\nepoch 20: error 2.1e-3",
            "last error on stderr: epoch 19: error .31, cannot save: no space; last line: epoch 20: error 2.1e-3",
        ),
        (TRACKER, ""),
        (CRASH, "last error on stderr: Fatal Python error: Segmentation fault at /exp/kernels.py:12 in scatter"),
        ("Error: no such table\n" + TRACKER, "last error on stderr: Error: no such table"),
        (TRACEBACK + TRACKER, "last error on stderr: tool.Boom: no at /exp/train.py:30"),
        (INSTALLED, "last error on stderr: ValueError: no at /env/lib/python3.12/site-packages/vision/train.py:30"),
        (
            TRACEBACK + "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
            "last error on stderr: tool.Boom: no at /exp/train.py:30",
        ),
        (
            GUARD,
            "last error on stderr: RuntimeError: An attempt has been made to start a new process before the "
            "current process has finished its bootstrapping phase. at /exp/train.py:12",
        ),
        (
            TRACEBACK + 'Traceback (most recent call last):\n  File "/exp/a.py", line 3, in f\n    assert x\n'
            "AssertionError\nSynced 5 files",
            "last error on stderr: AssertionError at /exp/a.py:3",
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


def test_the_error_that_explains_the_newest_one() -> None:
    lines = [line for line in CHILD.splitlines() if line.strip()]
    assert root_error(lines) == "last error on stderr: KeyError: 'vocab' at /exp/prepare.py:8"
    assert root_error(["no such file", *lines[5:]]) == "last error on stderr: no such file"
    spawned = [*GUARD.splitlines()[1:], *SPAWNED.splitlines()[1:]]
    assert root_error(spawned) == evidence(GUARD.splitlines()[1:])
    launched = [line for line in TORCHRUN.splitlines() if line.strip()]
    assert root_error(launched) == "last error on stderr: ValueError: batch of size 0 at /exp/child.py:8"
    worker = [
        "ERROR: Unexpected segmentation fault encountered in worker.",
        " [rank1]: Traceback (most recent call last):",
        "[rank1]: RuntimeError: DataLoader worker (pid 13818) is killed by signal: Segmentation fault.",
    ]
    assert root_error(worker) == f"last error on stderr: {worker[0]}"
    alone = root_error(launched[5:8])
    assert alone == f"last error on stderr: {launched[7].removeprefix('[rank0]: ')} at /exp/child.py:9"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might", "CUDA_LAUNCH_BLOCKING=1"),
        ("torch.AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable", "gpuboard status"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA", "spawn"),
        ("RuntimeError: CUDA error: invalid device ordinal", "LOCAL_RANK"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "quota"),
        ("RuntimeError: [enforce fail at /pytorch/gloo/context.cc:23] rank < size. 1 vs 1", "WORLD_SIZE"),
        ("OSError: [Errno 98] Address already in use", "MASTER_PORT"),
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting", "GLOO_SOCKET_IFNAME"),
        ("AssertionError: Process group cannot be None", "is_initialized()"),
        ("AssertionError: Torch not compiled with CUDA enabled", "torch.cuda.is_available()"),
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
            "is not compatible with static_graph set to True.",
            "remove static_graph",
        ),
        ("RuntimeError: context has already been set", "set_start_method"),
        ("RuntimeError:\n before the\n current process has finished its bootstrapping phase.", "__main__"),
        ("ValueError: invalid literal for int() with base 10: 'x'", ""),
    ],
)  # fmt: skip
def test_what_to_try_after_an_exception(message: str, words: str) -> None:
    assert words in advice(message)
    assert bool(advice(message)) == bool(words)
