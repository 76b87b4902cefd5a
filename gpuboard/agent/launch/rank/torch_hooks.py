"""What gpuboard adds to torch in a rank: a report when it joins the store, and a socket for torch's flight recorder.

This source is executed in the node's training interpreter (Python 3.8 or later), without other modules of gpuboard.
"""

import ctypes
import importlib.util
import os
import socket
import sys

MYPY = False
if MYPY:
    from typing import Any, Dict, Tuple

    from gpuboard.agent.launch.rank.worker_channel import WorkerChannel


class StoreWatch:
    """Reports to the supervisor when this rank has connected to the store.

    An import hook that replaces TCPStore in the module of torch's env:// rendezvous, whoever imports it and when, and
    removes itself; other code gets the real class.
    """

    def __init__(self, channel: "WorkerChannel", state: "Dict[str, Any]", diagnostics: str) -> None:
        self._channel = channel
        self._state = state
        self._diagnostics = diagnostics

    def find_spec(self, name: str, _path: "Any" = None, _target: "Any" = None) -> "Any":
        """Return the real spec of that module with a loader that also replaces TCPStore; None for others."""
        if name != "torch.distributed.rendezvous":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: "Any") -> None:
                load(module)
                self._replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _replace(self, rendezvous: "Any") -> None:
        _start_worker_server(self._diagnostics)
        real = getattr(rendezvous, "TCPStore", None)
        if real is None:  # a torch built without distributed
            return

        def connect(*args: "Any", **kwargs: "Any") -> "Any":
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                pass  # the script hosts a store of its own, in rank 0
            elif len(args) > 1:
                args = (_store_host(self._state["store"], args[0], args[1]), *args[1:])
            elif "host_name" in kwargs:
                kwargs["host_name"] = _store_host(self._state["store"], kwargs["host_name"], kwargs["port"])
            store = real(*args, **kwargs)
            size = args[2] if len(args) > 2 else kwargs.get("world_size")
            self._state["all_ranks"] = size in (None, self._state["world_size"])
            if not self._state["joined"]:
                self._state["joined"] = True
                self._channel.send({"t": "joined", "all_ranks": self._state["all_ranks"]})
            return store

        rendezvous.TCPStore = connect


def _start_worker_server(path: str) -> None:
    """Serve torch's flight recorder on a private socket, for the supervisor (since torch 2.5)."""
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return
    if not path:
        return
    # torch writes a warning about the socket to stderr, which belongs to the script.
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        server = _WorkerServer(path)
    except RuntimeError:
        return  # a container without that folder
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
    # Never destroyed: the destructor writes to stderr, and in a forked child it would wait for a missing thread.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def _store_host(store: "Tuple[str, int]", host: str, port: int) -> str:
    """Return the host to connect to: the store listens on one address, and a script may set MASTER_ADDR to another one
    of the same machine (its own, Debian's 127.0.1.1). TCPStore retries for 30 minutes where nothing listens."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        same = {info[4][0] for info in socket.getaddrinfo(store[0], port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found, same = set(), {store[0]}
    if port == store[1] and (
        found & same or (_is_local(store[0]) and any(_is_local(str(address)) for address in found))
    ):
        return store[0]
    text = "gpuboard: the script connects to %s:%s, but the store of this run is at %s:%d; leave MASTER_ADDR and "
    text += "MASTER_PORT as they are, and call init_process_group without init_method\n"
    sys.stderr.write(text % (host, port, *store))
    return host


def _is_local(address: str) -> bool:
    """Return whether an address is one of this machine: only those can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as bound:
        try:
            bound.bind((address, 0))
        except OSError:
            return False
    return True
