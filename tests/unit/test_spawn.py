"""Start of a child process with three pipes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from gpuboard.transport.spawn import spawn


@pytest.fixture
def few_files() -> Iterator[None]:
    """Allow this process only a few open files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 8, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("left", range(1, 7))
def test_nothing_stays_open_when_open_files_run_out(left: int) -> None:
    taken = []
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    for fd in taken[:left]:
        os.close(fd)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files"):
        spawn(["/bin/true"])
    after = os.listdir("/proc/self/fd")
    for fd in taken[left:]:
        os.close(fd)
    assert after == before
