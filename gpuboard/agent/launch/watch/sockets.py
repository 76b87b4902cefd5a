"""Bytes that processes exchange over TCP: recv and send do not count in /proc/PID/io."""

import os
import socket
import struct

from gpuboard.agent.launch import netlink

MYPY = False
if MYPY:
    from typing import Dict, Iterable

_INODE = 68  # in struct inet_diag_msg (linux/inet_diag.h), after which attributes follow
_ATTRIBUTES = 72
_BYTES = 120  # tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since 4.1)


def moved(pids: "Iterable[int]") -> "Dict[int, int]":
    """Return, by inode, the bytes that the connections of these processes have sent and received so far.

    Empty where they cannot be read, and without those of another network namespace.
    """
    own = {inode for pid in pids for inode in _inodes(pid)}
    try:
        counts = _counts(socket.AF_INET) if own else {}
        counts.update(_counts(socket.AF_INET6) if own else {})
    except (OSError, struct.error):  # no sock_diag, or another format
        return {}
    return {inode: counts[inode] for inode in own & counts.keys()}


def _inodes(pid: int) -> "Iterable[int]":
    """Return the inodes of a process's sockets."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:  # another user's
        return
    for name in names:
        try:
            link = os.readlink(os.path.join(folder, name))
        except OSError:  # just closed
            continue
        if link.startswith("socket:["):
            yield int(link[8:-1])


def _counts(family: int) -> "Dict[int, int]":
    """Return the bytes of all established connections, by inode, from netlink (sock_diag(7))."""
    # with INET_DIAG_INFO, state TCP_ESTABLISHED
    request = struct.pack("=BBBBL48x", family, socket.IPPROTO_TCP, 2, 0, 2)
    return {
        struct.unpack_from("=L", message, _INODE)[0]: _transferred(message[_ATTRIBUTES:])
        for _, message in netlink.dump(4, 20, request)  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY
    }


def _transferred(attributes: bytes) -> int:
    info = netlink.attributes(attributes).get(2, b"")  # INET_DIAG_INFO: struct tcp_info
    return sum(struct.unpack_from("=QQ", info, _BYTES)) if len(info) >= _BYTES + 16 else 0
