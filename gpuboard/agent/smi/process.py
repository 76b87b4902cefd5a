"""Fallback of the NVML process: where NVML cannot be loaded, it runs nvidia-smi instead.

It sends its parent the messages of nvml/reader.py, with source ``nvidia-smi``. A run that exceeds its deadline is
killed. One that cannot be killed (a call into the driver does not return) is waited for, so that two never run at once.
"""

import os
import subprocess
import time

from gpuboard.agent import proc
from gpuboard.agent.event_loop import IN, poll
from gpuboard.agent.nvml import terms
from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import xml as smi_xml

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Tuple

    Send = Callable[[Tuple[Any, ...]], None]

FOLDERS = ("/usr/bin", "/usr/local/bin", "/bin", "/opt/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")
RUN_S = 30.0  # deadline of a run; without the persistence daemon each GPU may take 1 s
NVML_S = 600.0  # retry NVML after this long
_LATE = "it did not end within %.0f s" % RUN_S
_BEAT_S = 1.0  # how often the progress mark changes, by which the parent sees a wait from a hang
_CHUNK = 65536


def find() -> "Optional[str]":
    """Return the path of nvidia-smi: on PATH, or where drivers, containers and clusters install it."""
    for folder in os.environ.get("PATH", "").split(os.pathsep) + list(FOLDERS):
        path = os.path.join(folder, "nvidia-smi")
        if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def serve(fd_in: int, beat: "Callable[[], None]", send: "Send", nvml_error: str) -> None:
    """Run nvidia-smi and send its readings, now and for every byte on ``fd_in``, until that ends or nvidia-smi fails.

    ``nvml_error``: why NVML failed; sent as the error where there is no nvidia-smi either.
    """
    path = find()
    if path is None:
        send(("init", nvml_error, None, None, 0, "nvml"))
        return
    nvidia_smi = _NvidiaSmi(path, beat)
    until = time.monotonic() + NVML_S
    send(("slow", "nvidia-smi"))
    while True:
        began = time.monotonic()
        try:
            listing = nvidia_smi.listing()
        except smi.Bad as bad:
            send(("init", "%s; nvidia-smi: %s" % (nvml_error, bad), None, None, 0, "nvidia-smi"))
            nvidia_smi.wait()
            return
        if nvidia_smi.has_changed(listing):
            send(("init", None, listing.driver, listing.cuda, listing.count, "nvidia-smi"))
            send(("static", {gpu.index: _placed(gpu.facts) for gpu in listing.gpus}))
        values = {gpu.index: gpu.values for gpu in listing.gpus}
        send(("pass", values, {}, time.monotonic() - began))
        proc.be_gentle()
        if not os.read(fd_in, 1):
            return
        if time.monotonic() > until:
            send(("again",))  # only a new process can load the library of an updated driver
            os.read(fd_in, 1)
            return


class _NvidiaSmi:
    """Runs nvidia-smi; keeps what is known of it between runs."""

    def __init__(self, path: str, beat: "Callable[[], None]") -> None:
        self.path = path
        self.beat = beat
        self.fields = list(smi.FIELDS)  # those that this driver's nvidia-smi is not known to lack
        self.known: "Dict[str, int]" = {}  # UUID → index
        self.sent: "Tuple[Any, ...]" = ()
        self.process: "Optional[subprocess.Popen[bytes]]" = None  # the last run
        self.until = 0.0  # its deadline

    def listing(self) -> smi.Listing:
        """Return the listing of one run. Raises Bad."""
        try:
            listing = smi_xml.read_xml(*self.run("-q", "-x"))
        except smi.Bad as bad:
            if isinstance(bad, _Ended):
                raise
            try:
                listing = self.csv()
            except smi.Bad:
                raise bad
        self.known = dict(self.known, **listing.number(self.known))
        return listing

    def csv(self) -> smi.Listing:
        """Return the listing from CSV queries, without the fields that this driver lacks. Raises Bad."""
        while True:
            rows, messages = self.run("--query-gpu=" + ",".join(self.fields), "--format=csv,noheader,nounits")
            unknown = smi.not_a_field((rows + messages).decode("utf-8", "replace"))
            if unknown not in self.fields:
                break
            self.fields.remove(unknown)
        apps, _ = self.run("--query-compute-apps=" + ",".join(smi.APPS), "--format=csv,noheader,nounits")
        return smi.read_csv(messages + b"\n" + rows, apps, tuple(self.fields))

    def has_changed(self, listing: smi.Listing) -> bool:
        """Return whether the driver or any GPU's facts differ from the last listing."""
        sent = (listing.driver, listing.count, {gpu.index: gpu.facts for gpu in listing.gpus})
        changed, self.sent = sent != self.sent, sent
        return changed

    def run(self, *options: str) -> "Tuple[bytes, bytes]":
        """Return its standard output and error. Raises Bad when it cannot be started or does not end in time."""
        self.wait(self.until)
        own = os.getpid()
        try:
            process = self.process = subprocess.Popen(
                [self.path] + list(options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(os.environ, LC_ALL="C"),
                preexec_fn=lambda: _end_with(own),  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            raise smi.Bad("%s cannot be started: %s" % (self.path, error.strerror))
        self.until = time.monotonic() + RUN_S
        assert process.stdout is not None
        assert process.stderr is not None
        read: "Dict[int, List[bytes]]" = {process.stdout.fileno(): [], process.stderr.fileno(): []}
        size = 0
        waiting = list(read)
        while waiting:
            self.beat()
            for fd in poll(dict.fromkeys(waiting, IN), _BEAT_S):
                data = os.read(fd, _CHUNK)
                read[fd].append(data)
                size += len(data)
                if not data:
                    waiting.remove(fd)
            if waiting and (time.monotonic() > self.until or size > 2 * smi.LIMIT):
                process.kill()
                raise _Ended(_LATE if size <= smi.LIMIT else "its output does not end")
        process.stdout.close()
        process.stderr.close()
        self.reap()  # one that takes longer to exit is waited for before the next run: its output is complete
        out, err = (b"".join(parts) for parts in read.values())
        return out, err

    def wait(self, until: float = float("inf")) -> None:
        """Wait for the end of the last run; kill it at ``until`` and raise Bad."""
        while not self.reap():
            if time.monotonic() > until:
                assert self.process is not None
                self.process.kill()
                raise _Ended(_LATE)

    def reap(self) -> bool:
        """Wait shortly for the end of the last run; return whether it has ended."""
        self.beat()
        try:
            return self.process is None or self.process.wait(_BEAT_S) is not None
        except subprocess.TimeoutExpired:
            return False


class _Ended(smi.Bad):
    """The run was killed: no other query is tried."""


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; end now if it has ended already."""
    import ctypes  # already loaded: the NVML process has tried NVML

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        os._exit(1)


def _placed(facts: "Dict[str, Any]") -> "Dict[str, Any]":
    """Return a GPU's facts with the NUMA node and CPUs of its PCI slot."""
    numa, cpus = proc.pci_slot(terms.pci_key(facts.get("pci_bus_id", "")))
    return dict(facts, links={}, pci={}, numa_node=numa, cpus=cpus) if "error" not in facts else facts
