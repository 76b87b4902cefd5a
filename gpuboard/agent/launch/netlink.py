"""The kernel's answers over netlink(7)."""

import socket
import struct

MYPY = False
if MYPY:
    from typing import Dict, List, Tuple

REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ENDS = (2, 3)  # NLMSG_ERROR, NLMSG_DONE


def dump(protocol: int, kind: int, body: bytes) -> "List[Tuple[int, bytes]]":
    """Return the messages of a dump, each with its kind. Raises OSError and struct.error."""
    found: "List[Tuple[int, bytes]]" = []
    header = struct.pack("=LHHLL", 16 + len(body), kind, REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as netlink:
        netlink.sendto(header + body, (0, 0))
        while True:
            data = netlink.recv(65536)
            while data:
                length, answer = struct.unpack_from("=LH", data)
                if answer in _ENDS:
                    return found
                found.append((answer, data[16:length]))
                data = data[(length + 3) & ~3 :]


def attributes(data: bytes) -> "Dict[int, bytes]":
    """Return the attributes of a message by their type."""
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind] = data[4:length]
        data = data[max(4, (length + 3) & ~3) :]
    return found
