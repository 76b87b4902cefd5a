"""Code under kernels with and without pidfds: a seccomp filter refuses their system call, as kernels before 5.3 do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import pytest

T = TypeVar("T")


class Under(Protocol):
    """Calls a function under one of the kernels, and returns its result."""

    def __call__(self, do: Callable[[], T]) -> T: ...


_PIDFD_OPEN = 434  # on every architecture but alpha
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_CODE = struct.pack(
    "HBBI" * 4,
    *(0x20, 0, 0, 0),  # load the number of the system call
    *(0x15, 0, 1, _PIDFD_OPEN),  # skip the next instruction unless it is this one
    *(0x06, 0, 0, 0x00050000 | errno.ENOSYS),  # SECCOMP_RET_ERRNO
    *(0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
)


def without_pidfds(do: Callable[[], T]) -> T:
    """Return ``do()`` of a thread whose filter its own threads and processes inherit; skip where none is permitted."""

    def run() -> T:
        prctl, code = ctypes.CDLL(None, use_errno=True).prctl, ctypes.create_string_buffer(_CODE)
        prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        if prctl(_SECCOMP, _FILTER, struct.pack("HP", 4, ctypes.addressof(code))):
            pytest.skip(f"seccomp is not permitted here: {os.strerror(ctypes.get_errno())}")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
            os.pidfd_open(os.getpid())
        return do()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def with_pidfds(do: Callable[[], T]) -> T:
    """Return ``do()``."""
    return do()


on_each_kernel = pytest.mark.parametrize("under", [with_pidfds, without_pidfds], ids=["pidfd", "no pidfd"])
