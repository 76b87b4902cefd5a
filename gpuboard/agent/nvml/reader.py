"""NVML through nvidia-ml-py, in a separate process: with activity.py the only importer of pynvml. Sets nothing.

The parent (monitor.py) never loads NVML: a call can hang for minutes, and then this process is killed or abandoned.
Two pipes connect them: messages are marshal with a 4-byte length (both ends are the same Python), and a byte from the
parent requests one pass. Before it touches GPU k it writes k into shared memory, so that the parent knows which GPU
hangs.

Messages: ``("init", error, driver, cuda, count, source)``, ``("static", {index: facts})``, ``("pass", {index: values},
xids, took_s)``; facts and values have the keys of gpuboard/model/gpu.py, processes as ``(pid, type, memory)``, beside
them ``sm_percents`` by pid. ``xids`` are the errors since the previous pass, ``{index: [(code, at)]}``; a GPU whose
driver does not report them is missing.
``("again",)``: start a new process, the GPUs are other ones.
Where NVML cannot be started, gpuboard/agent/smi/process.py sends these messages; it adds ``("slow", source)``: passes
are slow.
"""

import ctypes
import marshal
import os
import struct
import time

import pynvml  # always by full names: only what these name is sent (gpuboard/transport/bundle.py)

from gpuboard.agent import proc
from gpuboard.agent.nvml import terms
from gpuboard.agent.nvml.terms import NO_GPU, RATES, XIDS

MYPY = False
if MYPY:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

    from gpuboard.agent.nvml.activity import ActivityMeter

    Processes = List[Tuple[int, str, Optional[int]]]

_AFFINITY_WORDS = 16  # 1024 CPUs
_SCOPE_NODE = 0
_GPU, _NPU = 0, 1  # NVLink remote device types; anything else that is active leads to a switch
_LISTS = ("throttle", "mig")  # omitted when empty; an empty list of processes is information
_WITHHELD = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
# a GPU or MIG device without graphics has no list of graphics processes; other failures hide it
_NONE_AT_ALL = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)
_XIDS_A_PASS = 32  # a failing GPU may report very many
_SAMPLES_S = 2.0  # older samples of processes are not "now"
_SAMPLES_SHARE = 0.005  # of a core, at most, for those of all GPUs
_SAMPLES_LATEST_S = 5.0  # between two calls for those of one GPU, however long they take
_MIG_S = 5.0  # between two questions for the MIG mode of a GPU that has shown no sign of it


def serve(fd_in: int, fd_out: int, mark: "Any", skip: "Set[int]", only: "Optional[int]") -> None:
    """Start NVML, send the facts and one pass, then a pass for every byte that arrives; end with ``fd_in``.

    ``mark`` is four shared bytes: the GPU being read (or XIDS, RATES) and a counter of progress; from the parent,
    whether to measure rates, and the GPU whose throughput is measured too (or NO_GPU). GPUs in ``skip`` are never
    touched; with ``only``, no other GPU is. With XIDS in ``skip`` it does not listen for errors, with RATES it measures
    no rates.
    """
    try:
        reader = _Reader(mark)
    except pynvml.NVMLError as error:
        from gpuboard.agent.smi import process as smi_child  # late: only where there is no NVML

        def beat() -> None:
            mark[1] = (mark[1] + 1) % 256

        nvml_error = terms.words(error.value, str(error))
        smi_child.serve(fd_in, beat, lambda message: _send(fd_out, message), nvml_error)
        return
    _send(fd_out, ("init", None, reader.driver, reader.cuda, reader.count, "nvml"))
    wanted = [k for k in range(reader.count) if k not in skip and only in (None, k)]
    reader.open(wanted)
    facts = {k: reader.facts(k) for k in wanted}
    reader.connections(facts)
    _send(fd_out, ("static", facts))
    layout = {k: devices for k, devices in reader.layout.items() if "failed" not in facts[k]}  # else read again
    first = True
    xids: "Optional[_Xids]" = None
    activity: "Optional[ActivityMeter]" = None
    while True:
        values = {k: reader.values(k) for k in wanted}
        if reader.layout != layout:  # MIG devices were created or removed: their facts change too
            layout = dict(reader.layout)
            for k in reader.handles:
                try:
                    facts[k]["mig"] = reader.mig_facts(k)
                    facts[k].pop("failed", None)
                except pynvml.NVMLError as error:
                    layout.pop(k, None)  # again in the next pass; without its devices, a GPU in MIG mode looks free
                    values[k].update(_failure(error))
            _send(fd_out, ("static", facts))
        if mark[2] and RATES not in skip:
            if activity is None:
                from gpuboard.agent.nvml.activity import ActivityMeter  # late: never in the first pass

                activity = ActivityMeter(mark, reader.handles)
            activity.add({k: v for k, v in values.items() if "error" not in v and reader.layout[k] is None}, mark[3])
        mark[0] = XIDS
        new_xids = xids.new() if xids else {}
        mark[0] = NO_GPU
        _send(fd_out, ("pass", values, new_xids, 0.0))
        if first:  # the first reading is out: the rest is not urgent
            first = False
            proc.be_gentle()
            if only is None and XIDS not in skip:
                xids = _Xids(reader)
                mark[0] = NO_GPU
        if not os.read(fd_in, 1):
            return
        if only is None and reader.renumbered():
            _send(fd_out, ("again",))
            os.read(fd_in, 1)
            return


class _Reader:
    """NVML, started. Raises NVMLError if that fails."""

    def __init__(self, mark: "Any") -> None:
        self.mark = mark
        self.handles: "Dict[int, Any]" = {}
        self.failed: "Dict[int, Any]" = {}  # index -> what its handle raised
        self.uuids: "Dict[int, str]" = {}
        self.pci: "Dict[int, str]" = {}
        self.chosen: "Dict[str, Any]" = {}
        self.shared: "Set[int]" = set()  # GPUs whose only memory is the host's
        self.clocks: "Dict[int, Optional[int]]" = {}  # highest SM clock, MHz: it never changes, and takes 2 ms to read
        self.samples: "Dict[int, Tuple[float, Dict[int, int]]]" = {}  # when they are read next, SM percentages by pid
        self.fanless: "Set[int]" = set()  # GPUs without a fan: to ask them takes as long as most readings together
        self.layout: "Dict[int, Optional[List[str]]]" = {}  # the MIG devices of each GPU, None: MIG is off
        self.mig_due: "Dict[int, float]" = {}  # when the MIG mode is asked for next (monotonic)
        pynvml.nvmlInit()
        self.driver = terms.text(_ask(pynvml.nvmlSystemGetDriverVersion))
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        self.cuda = None if cuda is None else "%d.%d" % (cuda // 1000, cuda % 1000 // 10)
        self.count = int(pynvml.nvmlDeviceGetCount())
        self.lists = _process_calls(self.driver or "")

    def at(self, index: int) -> None:
        self.mark[0] = index
        self.mark[1] = (self.mark[1] + 1) % 256

    def open(self, indexes: "List[int]") -> None:
        """Get handles, UUIDs and PCI addresses, to which the facts of other GPUs refer."""
        for k in indexes:
            self.at(k)
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(k)
                self.uuids[k] = terms.text(pynvml.nvmlDeviceGetUUID(handle)) or ""
                pci = _need(pynvml.nvmlDeviceGetPciInfo, handle)  # None: a Jetson's GPU is on no bus
                self.pci[k] = "" if pci is None else (terms.text(pci.busId) or "").upper()
                self.handles[k] = handle
                if terms.shares_memory(_name(handle)):
                    self.shared.add(k)
            except pynvml.NVMLError as error:
                self.failed[k] = error

    def facts(self, k: int) -> "Dict[str, Any]":
        """Return the GpuStatic of GPU ``k`` without connections, as far as known; its failure if it has no handle.

        ``failed`` is set where a call has failed: the facts read after it are not known.
        """
        if k not in self.handles:
            return _failure(self.failed[k])
        self.at(k)
        handle = self.handles[k]
        facts = {"index": k, "uuid": self.uuids[k], "name": _name(handle), "pci_bus_id": self.pci[k]}
        facts.update(links={}, pci={})
        try:
            facts["minor"] = _ask(pynvml.nvmlDeviceGetMinorNumber, handle)
            facts["pcie_generation_max"] = _ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
            facts["pcie_width_max"] = _ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
            facts["numa_node"] = _numa_node(handle, self.pci[k])
            facts["cpus"] = terms.cpu_list(_ask(pynvml.nvmlDeviceGetCpuAffinity, handle, _AFFINITY_WORDS))
            if k in self.shared:
                facts["memory_shared"] = True
            else:
                facts["memory_total"], _, facts["memory_reserved"] = self._memory(handle)
            facts["mig"] = self.mig_facts(k)
        except pynvml.NVMLError:  # its readings carry the error
            facts["failed"] = True
            if _in_mig_mode(handle):  # then it cannot be had, whatever its devices are
                facts["mig"] = []
        return facts

    def renumbered(self) -> bool:
        """Return whether the GPUs are no longer those that were opened: handles and indexes are not identities."""
        try:
            if pynvml.nvmlDeviceGetCount() != self.count:
                return True
        except pynvml.NVMLError:
            pass
        for k, handle in self.handles.items():
            self.at(k)
            try:
                if terms.text(pynvml.nvmlDeviceGetUUID(handle)) != self.uuids[k]:
                    return True
            except pynvml.NVMLError:
                continue
        return False

    def connections(self, facts: "Dict[int, Dict[str, Any]]") -> None:
        """Fill in ``links`` and ``pci``. Behind a switch a pair counts the links of the GPU with fewer."""
        good = [k for k in facts if "error" not in facts[k]]
        by_pci = {terms.pci_key(self.pci[k]): k for k in good if self.pci[k]}
        switched: "Dict[int, int]" = {}
        for k in good:
            self.at(k)
            try:
                direct, switched[k] = self._nvlinks(self.handles[k], by_pci)
            except pynvml.NVMLError:
                direct, switched[k] = {}, 0
            for peer, count in direct.items():
                facts[k]["links"][self.uuids[peer]] = count
        for k in good:
            for peer in good:
                if peer != k and min(switched[k], switched[peer]):
                    facts[k]["links"][self.uuids[peer]] = min(switched[k], switched[peer])
        for place, k in enumerate(good):
            for peer in good[place + 1 :]:
                self.at(k)
                try:
                    common = pynvml.nvmlDeviceGetTopologyCommonAncestor(self.handles[k], self.handles[peer])
                except pynvml.NVMLError:
                    continue
                level = terms.LEVELS.get(common)
                if level is not None:
                    facts[k]["pci"][self.uuids[peer]] = level
                    facts[peer]["pci"][self.uuids[k]] = level

    def _nvlinks(self, handle: "Any", by_pci: "Dict[Tuple[int, ...], int]") -> "Tuple[Dict[int, int], int]":
        direct: "Dict[int, int]" = {}
        switched = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except pynvml.NVMLError:
                break  # after the last real link: INVALID_ARGUMENT or NOT_SUPPORTED
            kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            remote = _ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            peer = None if remote is None else by_pci.get(terms.pci_key(terms.text(remote.busId) or ""))
            if peer is not None:
                direct[peer] = direct.get(peer, 0) + 1
            elif kind not in (_GPU, _NPU):  # a switch; on some systems FFFFFFFF:FF:FF.0 of unknown type
                switched += 1
        return direct, switched

    def values(self, k: int) -> "Dict[str, Any]":
        """Return the GpuReading of GPU ``k`` as far as readable; ``error`` where the GPU as a whole fails."""
        if k not in self.handles:
            return _failure(self.failed[k])
        self.at(k)
        handle = self.handles[k]
        values: "Dict[str, Any]" = {}
        try:
            values["remap_pending"], values["remap_failed"] = _remap(handle)  # first: a broken GPU often fails later
            values["recovery_action"] = _recovery(handle)
            values["memory_used"] = None if k in self.shared else self._memory(handle)[1]
            values["compute_mode"] = _need(pynvml.nvmlDeviceGetComputeMode, handle)
            if values["compute_mode"] is None and k in self.shared:
                values["compute_mode"] = 0  # a Jetson has no compute modes
            values["processes"] = self._processes(handle)
            if values["processes"]:
                values["sm_percents"] = self._sm_percents(k)
            utilization = _sense(pynvml.nvmlDeviceGetUtilizationRates, handle)
            values["utilization"] = None if utilization is None else utilization.gpu
            values["temperature"] = _sense(
                self._first_or_raise,
                "temperature",
                lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
                lambda: pynvml.nvmlDeviceGetTemperatureV(handle, 0),
            )
            state = _sense(pynvml.nvmlDeviceGetPerformanceState, handle)
            values["sensors"] = self._sensors(k, state)
            values["power"] = terms.watts(_ask(pynvml.nvmlDeviceGetPowerUsage, handle))
            values["power_limit"] = terms.watts(_ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle))
            reasons = _ask(
                self._first_or_raise,
                "throttle",
                lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
                lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            )
            values["throttle"] = terms.throttle(reasons or 0)
            values["pcie_generation"] = _ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
            values["pcie_width"] = _ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
            values["ecc_uncorrected"] = _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0)
            if self._may_be_mig(k, utilization):
                values["mig"] = self._mig_values(k)
                self.mig_due[k] = time.monotonic() + _MIG_S  # where that has failed, each pass tries again
        except pynvml.NVMLError as error:
            values.update(_failure(error))
        return {key: value for key, value in values.items() if value is not None and (value or key not in _LISTS)}

    def _sensors(self, k: int, state: "Optional[int]") -> "Dict[str, int]":
        """Return the Sensors that the driver reports, given the performance state (32: unknown)."""
        handle = self.handles[k]
        if self.clocks.get(k) is None:
            self.clocks[k] = _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
        encoder = _ask(pynvml.nvmlDeviceGetEncoderUtilization, handle)
        decoder = _ask(pynvml.nvmlDeviceGetDecoderUtilization, handle)
        found = {
            "performance_state": state if state is not None and state < 32 else None,
            "sm_clock": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "sm_clock_max": self.clocks[k],
            "memory_clock": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "fan": None if k in self.fanless else self._fan(k),
            "encoder": None if encoder is None else encoder[0],
            "decoder": None if decoder is None else decoder[0],
        }
        return {name: int(value) for name, value in found.items() if value is not None}

    def _sm_percents(self, k: int) -> "Dict[int, int]":
        """Return the percentage of SM time by pid. A real driver takes 2 ms of CPU a GPU, so not always the newest."""
        began = time.monotonic()
        due, known = self.samples.get(k, (began, {}))
        if began >= due:
            known = _sm_percents(self.handles[k])
            cost_s = time.monotonic() - began
            self.samples[k] = began + min(_SAMPLES_LATEST_S, len(self.handles) * cost_s / _SAMPLES_SHARE), known
        return known

    def _fan(self, k: int) -> "Optional[int]":
        try:
            return int(pynvml.nvmlDeviceGetFanSpeed(self.handles[k]))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                self.fanless.add(k)
            _unless_lost(error)
            return None

    def mig_facts(self, k: int) -> "Optional[List[Dict[str, Any]]]":
        """Return the MigStatic list of GPU ``k``; None where MIG is off. Raises NVMLError where that is unknown."""
        found = []
        devices = self._mig_devices(k)
        for device, uuid in devices or []:
            found.append(
                {
                    "uuid": uuid,
                    "profile": _name(device).rsplit("MIG ", 1)[-1],
                    "memory_total": self._memory(device)[0],
                    "gpu_instance": _ask(pynvml.nvmlDeviceGetGpuInstanceId, device),
                    "compute_instance": _ask(pynvml.nvmlDeviceGetComputeInstanceId, device),
                }
            )
        return None if devices is None else found

    def _may_be_mig(self, k: int, utilization: "Any") -> bool:
        """Return whether to ask for the MIG mode, which takes a real driver as long as most readings together.

        In MIG mode NVML reports no utilization (its documentation of nvmlDeviceGetUtilizationRates).
        """
        off = utilization is not None and self.layout.get(k, ()) is None
        return not off or time.monotonic() >= self.mig_due.get(k, 0.0)

    def _mig_values(self, k: int) -> "List[Dict[str, Any]]":
        found = []
        for device, uuid in self._mig_devices(k) or []:
            values: "Dict[str, Any]" = {"uuid": uuid}
            try:
                values["memory_used"] = self._memory(device)[1]
                values["processes"] = self._processes(device)
            except pynvml.NVMLError as error:
                values["error"] = terms.words(error.value, str(error))
            found.append(values)
        return found

    def _mig_devices(self, k: int) -> "Optional[List[Tuple[Any, str]]]":
        """Return the handles and UUIDs of the MIG devices of GPU ``k``; None where MIG is off.

        Raises NVMLError where that is unknown: without its devices, a GPU in MIG mode looks free.
        """
        handle = self.handles[k]
        mode = _need(pynvml.nvmlDeviceGetMigMode, handle)
        self.layout[k] = None
        if mode is None or mode[0] != 1:
            return None
        found = []
        for number in range(_need(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            try:
                device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
                continue  # numbers may have gaps
            found.append((device, terms.text(pynvml.nvmlDeviceGetUUID(device)) or ""))
        self.layout[k] = [uuid for _, uuid in found]
        return found

    def _memory(self, handle: "Any") -> "Tuple[Optional[int], Optional[int], Optional[int]]":
        """Return total, used without reserved, and reserved bytes.

        v1, for drivers without v2, counts reserved memory as used and does not report it separately.
        """
        try:
            memory = self._first_or_raise(
                "memory",
                lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
                lambda: pynvml.nvmlDeviceGetMemoryInfo(handle),
            )
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
            return None, None, None
        reserved = getattr(memory, "reserved", None)
        return int(memory.total), int(memory.used), None if reserved is None else int(reserved)

    def _processes(self, handle: "Any") -> "Optional[Processes]":
        """Return compute, MPS and graphics processes, each pid once; None where a list is not permitted."""
        found: "Dict[int, Tuple[int, str, Optional[int]]]" = {}
        for kind, calls in self.lists:
            try:
                records = self._first_or_raise(kind, *[lambda call=call: call(handle) for call in calls])
            except pynvml.NVMLError as error:
                _unless_lost(error)
                if kind == "mps" or (kind == "graphics" and error.value in _NONE_AT_ALL):
                    continue
                if error.value in _WITHHELD:
                    return None
                raise
            for record in records:
                pid, memory = int(record.pid), record.usedGpuMemory
                if pid in found:
                    memory = max(memory or 0, found[pid][2] or 0) or None
                    found[pid] = (pid, found[pid][1], memory)
                else:
                    found[pid] = (pid, "graphics" if kind == "graphics" else "compute", memory)
        return list(found.values())

    def _first_or_raise(self, what: str, *calls: "Callable[[], Any]") -> "Any":
        """Return the result of the first call that this driver supports, and remember which one that is."""
        start = self.chosen.get(what, 0)
        for number in range(start, len(calls)):
            try:
                answer = calls[number]()
            except pynvml.NVMLLibraryMismatchError:  # not an NVMLError: an unversioned call on an older driver
                continue
            except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
                continue
            self.chosen[what] = number
            return answer
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


class _Xids:
    """XID errors that NVML reports from now on. Listening changes nothing on a GPU."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.watched: "List[int]" = []
        reader.mark[0] = XIDS
        try:
            self.events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:  # an old driver
            return
        for k, handle in reader.handles.items():
            reader.at(k)
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self.events)
            except pynvml.NVMLError:
                continue
            self.watched.append(k)

    def new(self) -> "Dict[int, List[Tuple[int, float]]]":
        """Return codes and times (epoch seconds) of the errors since the last call, by index, oldest first."""
        found: "Dict[int, List[Tuple[int, float]]]" = {k: [] for k in self.watched}
        for _ in range(_XIDS_A_PASS if self.watched else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self.events, 0)
            except pynvml.NVMLError_Timeout:
                break  # nothing more
            except pynvml.NVMLError:  # not supported, or it fails: stop listening
                self.watched = []
                return {}
            at = _address(event.device)
            for k in self.watched:
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError and _address(self.reader.handles[k]) == at:
                    found[k].append((int(event.eventData), time.time()))
        return found


def _address(handle: "Any") -> "Optional[int]":
    """Return the address behind a handle: two handles to one GPU compare unequal."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _process_calls(driver: str) -> "List[Tuple[str, List[Callable[[Any], Any]]]]":
    """Return ``(kind, calls)`` of the process lists; a driver supports one of the calls.

    Drivers 535.43 to 535.86 answer _v3 with a longer record than all others (garbage pids, the second process is
    lost); their _v2 is correct.
    """
    parts = driver.split(".")
    release = tuple(int(part) for part in parts[:2]) if all(part.isdigit() for part in parts[:2]) else ()
    correct = 1 if (535, 43) <= release <= (535, 86) else 0
    return [
        (kind, calls[correct:])
        for kind, calls in (
            (
                "compute",
                [pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2],
            ),
            (
                "mps",
                [pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v2],
            ),
            (
                "graphics",
                [pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2],
            ),
        )
    ]


def _name(handle: "Any") -> str:
    """Return a GPU's name, "" for any failure: that of a lost GPU shows in the calls that decide its state."""
    try:
        return terms.text(pynvml.nvmlDeviceGetName(handle)) or ""
    except pynvml.NVMLError:
        return ""


def _need(call: "Callable[..., Any]", *args: "Any") -> "Any":
    """Return the result, None where this GPU or user has none. Raises NVMLError for any other failure."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value not in _WITHHELD:
            raise
        return None


def _ask(call: "Callable[..., Any]", *args: "Any") -> "Any":
    """Return the result, None for a failure: the state does not need it. Raises NVMLError when the GPU is lost."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        return _unless_lost(error)


def _sense(call: "Callable[..., Any]", *args: "Any") -> "Any":
    """Like ``_ask``, but raise an Unknown Error too: a GPU whose sensors return it is failing."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_UNKNOWN:
            raise
        return _unless_lost(error)


def _in_mig_mode(handle: "Any") -> bool:
    """Return whether a GPU is known to be in MIG mode."""
    try:
        mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    except pynvml.NVMLError:
        return False
    return mode is not None and bool(mode[0] == 1)


def _unless_lost(error: "Any") -> None:
    if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
        raise error


def _failure(error: "Any") -> "Dict[str, Any]":
    return {"error": terms.words(error.value, str(error)), "lost": error.value == pynvml.NVML_ERROR_GPU_IS_LOST}


def _numa_node(handle: "Any", address: str) -> "Optional[int]":
    """Return the NUMA node of the GPU's PCI slot (not nvmlDeviceGetNumaNodeId: that is the GPU's own memory)."""
    node, cpus = proc.pci_slot(terms.pci_key(address))
    if cpus is None:  # not in sysfs, in some containers
        return terms.lowest(_ask(pynvml.nvmlDeviceGetMemoryAffinity, handle, 1, _SCOPE_NODE))
    return node


def _remap(handle: "Any") -> "Tuple[Optional[bool], Optional[bool]]":
    """Return (a row remap is pending until a reset, one has failed); before Ampere: pending page retirement."""
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        return bool(rows[2]), bool(rows[3])
    pending = _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return None if pending is None else bool(pending), None


def _sm_percents(handle: "Any") -> "Dict[int, int]":
    """Return the percentage of SM time by pid, from the newest recent samples; without the processes that have none."""
    since_us = int((time.time() - _SAMPLES_S) * 1e6)
    samples = _ask(pynvml.nvmlDeviceGetProcessUtilization, handle, since_us) or ()
    newest = {int(sample.pid): sample for sample in sorted(samples, key=lambda sample: int(sample.timeStamp))}
    return {pid: int(sample.smUtil) for pid, sample in newest.items() if sample.smUtil <= 100}


def _recovery(handle: "Any") -> "Optional[str]":
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return terms.recovery(int(values[0].value.uiVal))


def _send(fd_out: int, message: "Tuple[Any, ...]") -> None:
    data = marshal.dumps(message, 2)
    data = struct.pack("=I", len(data)) + data
    while data:
        data = data[os.write(fd_out, data) :]
