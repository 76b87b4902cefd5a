"""The process that hosts the ranks' store (TCPStore) on the socket that gpuboard bound; executed like the worker.

It loads torch's C extension only (0.5 s and 144 MB against 1.75 s). If that fails in any way, a crash included, the
supervisor starts the process again with all of torch.
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

    from gpuboard.agent.launch.rank.worker_channel import WorkerChannel


def main(namespace: "Dict[str, Any]", channel: "WorkerChannel", config: "Dict[str, Any]") -> None:
    """Load torch, test a store, report ``ready``, open the real store at ``open``; end with the supervisor."""
    namespace.clear()
    # Slurm sends these to all processes of a step; they are for the ranks.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    store_class = _extension_only() if config["extension_only"] else _all_of_torch()
    _test_store(store_class)
    channel.send({"t": "ready"})
    channel.receive()  # until then the supervisor serves preflight's handshakes on this socket
    try:
        store = _open(store_class, config["address"], config["port"], config["fd"], config["timeout_s"])
    except Exception as error:
        channel.send({"t": "failed", "text": "%s: %s" % (type(error).__name__, error)})
        raise
    channel.send({"t": "open"})
    _serve(channel, store)


def _serve(channel: "WorkerChannel", _store: "Any") -> None:
    """Keep the store open until end-of-file, which ends this process."""
    while True:
        channel.receive()


def _extension_only() -> "Any":
    """Load torch's C extension only, with empty modules for both packages: without the second one it aborts."""
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


def _all_of_torch() -> "Any":
    import torch.distributed

    return torch.distributed.TCPStore  # type: ignore[attr-defined]  # missing in its stubs


def _open(store_class: "Any", address: str, port: int, fd: int, timeout_s: float) -> "Any":
    return store_class(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=fd,
    )


def _test_store(store_class: "Any") -> None:
    """Set and get a key in a temporary store that is opened in the same way; raise if this torch cannot do it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        port = listener.getsockname()[1]
        store = _open(store_class, "127.0.0.1", port, listener.detach(), 10.0)
        store.set("gpuboard", "works")
        if store.get("gpuboard") != b"works":
            raise RuntimeError("the store returned another value than was set")
