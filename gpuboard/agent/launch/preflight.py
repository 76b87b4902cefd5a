"""Facts of a node for the preflight checks (docs/launch-protocol.md, call ``check``)."""

import errno
import json
import os
import resource
import socket
import subprocess
import threading

from gpuboard.agent import proc
from gpuboard.agent.launch import CallRefused, evidence, network, start

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional

# Run by the training interpreter. It finds torch without importing it (1.75 s): it executes version.py only, and reads
# NCCL's version from the folder name of its package.
_HEAD = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]  # files of the folder, such as a json.py, must not replace Python's modules here
"""
_COLLECT = r"""
import glob, hashlib, json, os, re
kind, name = sys.argv[1:3]
facts = {"python": sys.executable, "python_version": "%d.%d.%d" % sys.version_info[:3], "torch": None,
         "torch_error": None, "torch_cuda": None, "nccl": None, "target_sha256": None}
spec = next(specs("torch", sys.path), None)
if spec is not None and spec.origin:
    folder = os.path.dirname(spec.origin)
    space = {}
    version = os.path.join(folder, "version.py")
    try:
        with open(version) as file:
            exec(file.read(), space)
        space["__version__"]
    except Exception as error:
        facts["torch_error"] = "%s: %s: %s" % (version, type(error).__name__, error)
    facts["torch"] = space.get("__version__") and str(space["__version__"])
    facts["torch_cuda"] = space.get("cuda")
    for found in glob.glob(os.path.join(os.path.dirname(folder), "nvidia_nccl_cu*.dist-info")):
        facts["nccl"] = re.sub(r".*-(.*)\.dist-info", r"\1", found)
def find(module):
    found = list(specs(module, [os.getcwd()] + sys.path))
    return found[-1] if len(found) > module.count(".") else None
def read():
    if kind == "script":
        if os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
            raise OSError(0, "a folder without __main__.py")
        with open(os.path.join(name, "__main__.py") if os.path.isdir(name) else name, "rb") as file:
            return file.read()
    module = name.partition(":")[0]
    spec = find(module)
    if spec is not None and spec.submodule_search_locations and kind == "module":
        module += ".__main__"
        spec = find(module)
    if spec is None:
        raise OSError(0, "no module named " + module)
    return spec.loader.get_data(spec.origin)
try:
    facts["target_sha256"] = hashlib.sha256(read()).hexdigest()
except OSError as error:
    facts["target_error"] = error.strerror
except Exception:
    pass  # it has no file: the rank imports it in its own way
print(json.dumps(facts))
"""
_SCRIPT_S = 10.0  # timeout: a cold interpreter on a network file system is slow, a container more so
_RESOLVE_S = 1.0  # timeout of name resolution
_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NPROC_COUNTED = 65536  # a limit above is not reached; counting a user's threads takes 10 µs each


def gather(config: "Dict[str, Any]", environ: "Dict[str, str]") -> "Dict[str, Any]":
    """Return the facts. Raises CallRefused with ``cwd``, ``python``, ``wrap``, ``program`` or ``target``."""
    if not os.path.isdir(config["cwd"]):
        raise CallRefused("cwd", "no folder %s on this node" % config["cwd"])
    if not os.access(config["cwd"], os.X_OK):
        raise CallRefused("cwd", "no permission to enter %s on this node" % config["cwd"])
    if config["target"]["kind"] == "builtin":  # its source is the supervisor's
        config = dict(config, target={"kind": "script", "name": os.devnull})
    collect = _program_facts if config["target"]["kind"] == "program" else _run_script
    facts = collect(config, environ)
    if "target_error" in facts:
        raise CallRefused(
            "target", "cannot read %s in %s: %s" % (config["target"]["name"], config["cwd"], facts["target_error"])
        )
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    facts.update(
        {
            "cwd_exists": True,
            "shm_free": shm.f_bavail * shm.f_frsize if shm else None,
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
            "nofile": _limit(resource.RLIMIT_NOFILE),
            "tasks": _tasks(),
            "addresses": network.addresses(),
            "loopback": network.loopback_is_up(),
            "socket_ifname": {name: environ[name] for name in _IFNAMES if environ.get(name)},
            "hostname": socket.gethostname(),
            "resolves": _resolve([socket.gethostname(), config["master_addr"]]),
        }
    )
    return facts


def _program_facts(config: "Dict[str, Any]", environ: "Dict[str, str]") -> "Dict[str, Any]":
    """Return the facts for a program: Python and torch are not needed, but a store needs them."""
    path = start.program(config, environ)
    try:
        facts = _run_script(dict(config, target={"kind": "script", "name": path}), environ)
    except CallRefused:
        return {"python": ""}
    facts.pop("target_error", None)  # a path inside a container
    return facts


def script() -> str:
    """Return the source that collects the facts of Python, torch and the target."""
    return _HEAD + start.module_source("gpuboard.agent.launch.rank.module_search") + _COLLECT


def _run_script(config: "Dict[str, Any]", environ: "Dict[str, str]") -> "Dict[str, Any]":
    target = config["target"]
    line = start.command(config, environ, ["-c", script(), target["kind"], target["name"]])
    try:
        done = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=config["cwd"],
            env=environ,
            timeout=_SCRIPT_S,
            check=False,
        )
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        kind = "wrap" if config["wrap"] else "python"
        raise CallRefused(kind, "cannot start %s: %s" % (line[0], error)) from error
    except subprocess.TimeoutExpired as error:
        raise CallRefused("python", "%s did not respond within %d s" % (line[0], _SCRIPT_S)) from error
    try:
        facts = json.loads(done.stdout.decode("utf-8", "replace").splitlines()[-1])
        assert isinstance(facts, dict)
    except (ValueError, IndexError, AssertionError) as error:
        errors = done.stderr.decode("utf-8", "replace").strip()[-500:] or "it wrote no error"
        raise CallRefused("python", "%s ended with exit code %d: %s" % (line[0], done.returncode, errors)) from error
    return facts


def _limit(kind: int) -> "Optional[int]":
    """Return a soft limit in its unit (bytes, files), None for unlimited."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _tasks() -> "Optional[Dict[str, Any]]":
    """Return the limit that leaves room for the fewest processes and threads; None if there is none.

    pids.max of a cgroup counts all tasks in it (kernel: Documentation/admin-guide/cgroup-v2.rst), RLIMIT_NPROC all of
    this user on the node (setrlimit(2)); root is exempt from the latter.
    """
    found = []
    for folder in evidence.cgroups("pids"):
        try:
            with open(folder + "/pids.max") as file:
                limit = int(file.read())  # ValueError: "max"
            with open(folder + "/pids.current") as file:
                found.append((limit - int(file.read()), limit, folder + "/pids.max"))
        except (OSError, ValueError):
            continue
    nproc = _limit(resource.RLIMIT_NPROC)
    if nproc is not None and nproc <= _NPROC_COUNTED and os.geteuid() != 0:
        used = 0
        for pid in proc.own_pids():
            try:
                used += len(os.listdir("/proc/%d/task" % pid))
            except OSError:
                continue  # it has ended
        found.append((nproc - used, nproc, "ulimit -u"))
    if not found:
        return None
    free, limit, source = min(found)
    return {"free": max(0, free), "limit": limit, "source": source}


def _resolve(names: "List[str]") -> "Dict[str, List[str]]":
    """Return the addresses that names resolve to on this node; none on errors and after _RESOLVE_S."""
    found: "Dict[str, List[str]]" = {}

    def resolve(name: str) -> None:
        try:
            found[name] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
        except OSError:
            found[name] = []

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in set(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_RESOLVE_S)
    return {name: found.get(name, []) for name in names}
