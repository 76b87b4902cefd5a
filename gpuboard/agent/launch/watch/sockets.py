"""Bytes that processes exchange over TCP: recv and send do not count in /proc/PID/io."""

import os
import socket
import struct

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
        links = [os.readlink(os.path.join(folder, name)) for name in os.listdir(folder)]
    except OSError:  # another user's, or one that has just closed a file
        return []
    return [int(link[8:-1]) for link in links if link.startswith("socket:[")]


def _counts(family: int) -> "Dict[int, int]":
    """Return the bytes of all established connections, by inode, from netlink (sock_diag(7))."""
    found: "Dict[int, int]" = {}
    # SOCK_DIAG_BY_FAMILY, REQUEST | DUMP; with INET_DIAG_INFO, state TCP_ESTABLISHED
    request = struct.pack("=LHHLLBBBBL48x", 72, 20, 0x301, 1, 0, family, socket.IPPROTO_TCP, 2, 0, 2)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # NETLINK_SOCK_DIAG
        netlink.sendto(request, (0, 0))
        while True:
            data = netlink.recv(65536)
            while data:
                length, kind = struct.unpack_from("=LH", data)
                if kind in (2, 3):  # NLMSG_ERROR, NLMSG_DONE
                    return found
                message = data[16:length]
                found[struct.unpack_from("=L", message, _INODE)[0]] = _transferred(message[_ATTRIBUTES:])
                data = data[(length + 3) & ~3 :]


def _transferred(attributes: bytes) -> int:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == 2 and length >= 4 + _BYTES + 16:  # INET_DIAG_INFO: struct tcp_info
            return sum(struct.unpack_from("=QQ", attributes, 4 + _BYTES))
        attributes = attributes[max(4, (length + 3) & ~3) :]
    return 0
