"""Network part of preflight: the bound master port, sockets that answer a handshake, connections to those.

The handshake: the caller sends ``gpuboard`` and 16 random bytes, the listener replies with their HMAC-SHA256 under the
run's secret. Other programs and other runs cannot compute it; the secret itself is not sent. Then the caller sends
32 kB, whose arrival the listener confirms: a path with a smaller MTU than its ends can lose all packets of full size.
"""

import errno
import fcntl
import hashlib
import hmac
import os
import socket
import struct
import time
from functools import partial

from gpuboard.agent.event_loop import IN, OUT, Loop
from gpuboard.agent.launch import CallRefused, netlink
from gpuboard.agent.proc import user_name

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional

_HELLO = b"gpuboard"
_NONCE = 16
_BULK = 32768  # bytes: several packets of full size, also of jumbo frames
_ARRIVED = b"arrived"
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1  # netdevice(7)
REPLY_FACTOR = 3  # timeout of the handshake as a multiple of the connect timeout: the peer process may be slow
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EACCES, errno.EPERM)


def listen(host: str, port: int) -> socket.socket:
    """Bind ``port`` (0: any free one) of ``host``, an address of this node, and listen. Raises CallRefused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CallRefused("address", "%s does not resolve on this node: %s" % (host, error)) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(port)
            message = "port %d of %s is in use by %s" % (port, host, holder or "an unknown process")
            raise CallRefused("port-in-use", message, {"holder": holder}) from error
        if error.errno == errno.EADDRNOTAVAIL:
            known = ", ".join(ip for ips in addresses().values() for ip in ips)
            raise CallRefused("address", "%s is not an address of this node (%s)" % (host, known)) from error
        why = "root-port" if error.errno == errno.EACCES else "address"
        raise CallRefused(why, "cannot listen on %s port %d: %s" % (host, port, error)) from error
    listener.setblocking(False)
    return listener


def port_holder(port: int) -> "Optional[str]":
    """Return the process that listens on a TCP port: ``pid 12 (alice, python)``, else ``a process of alice``."""
    owners: "Dict[str, int]" = {}  # socket inode → uid
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.read().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:  # proc(5): local address is field 1 (hex), state 3 (0A: listening), uid 7, inode 9
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                owners[row[9]] = int(row[7])
    wanted = {"socket:[%s]" % inode for inode in owners}
    for entry in os.listdir("/proc") if wanted else []:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            links = [os.readlink("/proc/%s/fd/%s" % (entry, fd)) for fd in os.listdir("/proc/%s/fd" % entry)]
            uid = os.stat("/proc/" + entry).st_uid
            with open("/proc/%s/comm" % entry) as file:
                name = file.read().strip()
        except OSError:
            continue  # ended, or another user's
        if wanted.intersection(links):
            return "pid %s (%s, %s)" % (entry, user_name(uid), name)
    for uid in owners.values():
        return "a process of %s" % user_name(uid)
    return None


def addresses() -> "Dict[str, List[str]]":
    """Return the addresses of every interface, by its name, from netlink (rtnetlink(7))."""
    found: "Dict[str, List[str]]" = {}
    for kind, message in netlink.dump(0, 22, struct.pack("=BBBBi", 0, 0, 0, 0, 0)):  # RTM_GETADDR, any family
        if kind == 20:  # RTM_NEWADDR: struct ifaddrmsg, then attributes
            _take_address(message, found)
    return found


def loopback_is_up() -> bool:
    """Return whether ``lo`` is up: it also routes to the node's other addresses. True if that cannot be read."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFFLAGS, struct.pack("=16s16x", b"lo"))
        except OSError:
            return True
    return bool(struct.unpack_from("=16sH", answer)[1] & _IFF_UP)


def _take_address(message: bytes, found: "Dict[str, List[str]]") -> None:
    family, _, _, _, index = struct.unpack_from("=BBBBi", message)
    attributes = netlink.attributes(message[8:])
    raw = attributes.get(2, attributes.get(1))  # IFA_LOCAL: on point-to-point links IFA_ADDRESS is the peer's
    if raw is not None and family in (socket.AF_INET, socket.AF_INET6):
        text = socket.inet_ntop(family, raw)
        try:
            found.setdefault(socket.if_indextoname(index), []).append(text)
        except OSError:
            return  # the interface was removed meanwhile


class Answering:
    """Answers the handshake on listening sockets until ``stop``."""

    def __init__(self, loop: Loop, secret: str) -> None:
        self._loop = loop
        self._secret = secret.encode("utf-8")
        self._listeners: "List[socket.socket]" = []
        self._callers: "Dict[int, socket.socket]" = {}

    def add(self, listener: socket.socket) -> None:
        """Answer on this socket."""
        self._listeners.append(listener)
        self._loop.watch(listener.fileno(), IN, lambda: self._accept(listener))

    def leave(self, listener: socket.socket) -> None:
        """Stop answering on this socket and leave it open."""
        self._loop.unwatch(listener.fileno())
        self._listeners.remove(listener)

    def stop(self) -> None:
        """Close all sockets."""
        for opened in [*self._listeners, *self._callers.values()]:
            self._loop.unwatch(opened.fileno())
            opened.close()
        self._listeners = []
        self._callers = {}

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        caller.setblocking(False)
        self._callers[caller.fileno()] = caller
        self._loop.watch(caller.fileno(), IN, lambda: self._greet(caller))

    def _greet(self, caller: socket.socket) -> None:
        try:
            data = caller.recv(len(_HELLO) + _NONCE)
            if data.startswith(_HELLO) and len(data) == len(_HELLO) + _NONCE:
                caller.send(_mac(self._secret, data[len(_HELLO) :]))
                self._loop.watch(caller.fileno(), IN, partial(self._count, caller, [_BULK]))
                return
        except OSError:
            pass  # the caller has gone
        self._drop(caller)

    def _count(self, caller: socket.socket, left: "List[int]") -> None:
        """Read what follows the greeting; confirm it once all has arrived."""
        try:
            data = caller.recv(_BULK)
            left[0] -= len(data)
            if data and left[0] > 0:
                return
            if data:
                caller.send(_ARRIVED)
        except BlockingIOError:
            return
        except OSError:
            pass  # the caller has gone
        self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        self._loop.unwatch(caller.fileno())
        del self._callers[caller.fileno()]
        caller.close()


class ConnectAttempts:
    """Simultaneous connections to the answering sockets of other nodes; ``done`` gets one result for each.

    A connection that is not accepted within ``timeout_s`` is dropped: the peer's kernel accepts at once, also when the
    peer process is busy.
    """

    def __init__(
        self,
        loop: Loop,
        secret: str,
        targets: "List[Dict[str, Any]]",
        timeout_s: float,
        done: "Callable[[List[Dict[str, Any]]], None]",
    ) -> None:
        self._loop = loop
        self._secret = secret.encode("utf-8")
        self._done = done
        self._started = time.monotonic()
        self._reply_s = REPLY_FACTOR * timeout_s
        self._handshakes: "Dict[int, float]" = {}  # when something was sent last, for accepted connections
        self._unsent: "Dict[int, bytes]" = {}  # of the bulk, for connections on which the listener has replied
        self._results: "List[Dict[str, Any]]" = [
            {"node": t["node"], "address": t["address"], "port": t["port"], "result": None} for t in targets
        ]
        self._sockets: "Dict[int, socket.socket]" = {}
        self._interfaces = {ip: name for name, ips in addresses().items() for ip in ips}
        self._timer = loop.after(timeout_s, self._on_timeout)
        for number in range(len(targets)):
            self._connect(number)
        self._finish_if_done()

    def _connect(self, number: int) -> None:
        result = self._results[number]
        try:
            found = socket.getaddrinfo(result["address"], result["port"], 0, socket.SOCK_STREAM, 0, 0)
            family, kind, protocol, _, address = found[0]
            caller = socket.socket(family, kind, protocol)
        except OSError:
            self._settle(number, "unreachable")
            return
        caller.setblocking(False)
        self._sockets[number] = caller
        code = caller.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            self._loop.watch(caller.fileno(), OUT, lambda: self._connected(number))
        else:
            self._failed(number, code)

    def _connected(self, number: int) -> None:
        caller = self._sockets[number]
        code = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._failed(number, code)
            return
        result = self._results[number]
        result["local_address"] = caller.getsockname()[0]
        result["interface"] = self._interfaces.get(result["local_address"])
        nonce = os.urandom(_NONCE)
        try:
            caller.send(_HELLO + nonce)
        except OSError:
            self._settle(number, "stranger")
            return
        self._handshakes[number] = time.monotonic()
        self._loop.watch(caller.fileno(), IN, lambda: self._answered(number, nonce))

    def _answered(self, number: int, nonce: bytes) -> None:
        caller = self._sockets[number]
        try:
            answer = caller.recv(64)
        except OSError:
            answer = b""
        if not hmac.compare_digest(answer, _mac(self._secret, nonce)):
            self._settle(number, "stranger")
            return
        self._handshakes[number] = time.monotonic()
        self._unsent[number] = bytes(_BULK)
        self._loop.watch(caller.fileno(), IN | OUT, lambda: self._send_bulk(number))

    def _send_bulk(self, number: int) -> None:
        """Send what the socket takes; all has arrived when the listener says so."""
        caller = self._sockets[number]
        try:
            if self._unsent[number]:
                self._unsent[number] = self._unsent[number][caller.send(self._unsent[number]) :]
                if not self._unsent[number]:
                    self._loop.watch(caller.fileno(), IN, lambda: self._send_bulk(number))
                return
            self._settle(number, "ok" if caller.recv(64) == _ARRIVED else "stranger")
        except BlockingIOError:
            return
        except OSError:
            self._settle(number, "stranger")

    def _failed(self, number: int, code: int) -> None:
        if code == errno.ECONNREFUSED:
            self._settle(number, "refused")
        elif code in _UNREACHABLE:
            self._settle(number, "unreachable")
        else:
            self._settle(number, "dropped")

    def _settle(self, number: int, outcome: str) -> None:
        result = self._results[number]
        result["result"] = outcome
        result["ms"] = round((time.monotonic() - self._started) * 1000, 1)
        result.setdefault("local_address", None)
        result.setdefault("interface", None)
        caller = self._sockets.pop(number, None)
        if caller is not None:
            self._loop.unwatch(caller.fileno())
            caller.close()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if all(result["result"] for result in self._results):
            self._loop.cancel(self._timer)
            done, self._done = self._done, lambda _results: None
            done(self._results)

    def _on_timeout(self) -> None:
        self._timer = self._loop.after(0.0, self._settle_overdue)  # after what has arrived: this process may be late

    def _settle_overdue(self) -> None:
        """Settle the connections that have timed out; wait for those that were accepted and may still reply."""
        now = time.monotonic()
        for number in sorted(self._sockets):
            if number not in self._handshakes:
                self._settle(number, "dropped")
            elif now - self._handshakes[number] >= self._reply_s:
                self._settle(number, "small-only" if number in self._unsent else "stranger")
        if self._sockets:
            first = min(self._handshakes[number] for number in self._sockets)
            self._timer = self._loop.after(max(0.0, first + self._reply_s - now), self._on_timeout)


def _mac(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, _HELLO + nonce, hashlib.sha256).digest()
