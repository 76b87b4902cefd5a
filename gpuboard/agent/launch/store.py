"""The process that hosts the store ranks meet at, on the socket that gpuboard bound. Travels like the worker.

It tries torch's C extension alone (0.5 s and 144 MB against 1.75 s); the supervisor starts it anew with the whole of
torch if that fails in any way, a crash included.
"""

import datetime
import importlib.util
import signal
import socket
import sys
import types

MYPY = False
if MYPY:
    from typing import Any, Dict

    from gpuboard.agent.launch.worker_channel import Bond


def main(namespace: "Dict[str, Any]", bond: "Bond", config: "Dict[str, Any]") -> None:
    """Load, prove that a store works, say ``ready``, open the real one when told to, and live with the supervisor."""
    namespace.clear()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all processes of a step; only ranks heed them
        signal.signal(number, signal.SIG_IGN)
    store_class = _extension() if config["extension_only"] else _whole()
    _prove(store_class)
    bond.send({"t": "ready"})
    bond.receive()  # until the gate opens, the supervisor answers preflight's handshakes on this socket
    try:
        store = _open(store_class, config["address"], config["port"], config["fd"], config["timeout_s"])
    except Exception as error:
        bond.send({"t": "failed", "text": "%s: %s" % (type(error).__name__, error)})
        raise
    bond.send({"t": "open"})
    _live(bond, store)


def _live(bond: "Bond", _store: "Any") -> None:
    """Keep the store. Nothing more is said: end-of-file ends this process, and the store with it."""
    while True:
        bond.receive()


def _extension() -> "Any":
    """Load torch's C extension alone. Stand-ins for both packages: without the second one it aborts."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no torch")
    for name in ("torch", "torch.distributed"):
        module = types.ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = module
    extension = importlib.import_module("torch._C")
    extension._c10d_init()
    return extension._distributed_c10d.TCPStore


def _whole() -> "Any":
    import torch.distributed

    return torch.distributed.TCPStore  # type: ignore[attr-defined]  # its stubs do not say so


def _open(store_class: "Any", address: str, port: int, fd: int, timeout_s: float) -> "Any":
    return store_class(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=fd,
    )


def _prove(store_class: "Any") -> None:
    """Set and get in a store of its own, opened the same way, so that a torch which cannot do it shows here."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        port = listener.getsockname()[1]
        store = _open(store_class, "127.0.0.1", port, listener.detach(), 10.0)
        store.set("gpuboard", "works")
        if store.get("gpuboard") != b"works":
            raise RuntimeError("the store gave back something else than was set")
