"""The folders of this user's runs on this node: states, pieces of files, whether a run's head lives."""

import base64
import errno
import json
import os
import re
import stat
import zlib

from gpuboard.agent import proc
from gpuboard.agent.claims.files import shared_with_others
from gpuboard.agent.launch import CallRefused

MYPY = False
if MYPY:
    from typing import Any, Dict, List, Optional

PAGE = 1024 * 1024  # bytes of one answer, compressed or not: a protocol line may have 4 MiB
_STATE_LIMIT = 16 * 1024 * 1024  # bytes of one state.json; a run of 4,096 ranks has 1 MiB
_LEAST = 4096  # bytes that each file of a `read` may give, however many there are
_FILES = 8192  # of one `read`: two per rank
_RUN = re.compile(r"[a-z0-9]+")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def base() -> str:
    """Return the folder of all runs, by the rules of gpuboard.paths."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = os.environ.get("HOME", "")
        if not home.startswith("/"):
            import pwd  # late: HOME is set as a rule

            try:
                home = pwd.getpwuid(os.geteuid()).pw_dir
            except KeyError:
                home = "/nonexistent"
        state = home + "/.local/state"
    return state + "/gpuboard/runs"


def folder(run: "Any") -> str:
    """Return the folder of one run. Raises CallRefused."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise CallRefused("invalid", "%r is not a run id" % (run,))
    path = "%s/%s" % (base(), run)
    if not os.path.isdir(path):
        raise CallRefused("no-run", "no run %s in %s" % (run, base()))
    return path


def pack(data: bytes) -> str:
    """Return bytes for an answer."""
    return base64.b64encode(zlib.compress(data, 1)).decode("ascii")


def listed(after: "Optional[str]") -> "Dict[str, Any]":
    """Return the runs whose id is greater than ``after``, as many as one answer takes, in order of their ids."""
    try:
        names = sorted(name for name in os.listdir(base()) if _RUN.fullmatch(name) and name > (after or ""))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        names = []
    found: "List[Dict[str, Any]]" = []
    size = 0
    for name in names:
        entry = state(name)
        if entry is not None:
            size += len(entry["state"] or "")
            if found and size > PAGE:
                return {"folder": base(), "runs": found, "more": True}
            found.append(entry)
    return {"folder": base(), "runs": found, "more": False}


def state(run: str) -> "Optional[Dict[str, Any]]":
    """Return the state of a run as its head wrote it, and whether the head lives; None before the first time."""
    path = "%s/%s/state.json" % (base(), run)
    try:
        data = _whole(path)
        lives = head_alive(data, path)
        if lives is False:
            data = _whole(path)  # what the head wrote before its end
        written = os.stat(path).st_mtime
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        return {"run": run, "state": None, "error": "cannot read %s: %s" % (path, error.strerror), "alive": None}
    return {"run": run, "state": pack(data), "error": None, "alive": lives, "written": written}


def head_alive(data: bytes, path: str) -> "Optional[bool]":
    """Return whether the head that wrote ``data``, in ``path``, runs on this node; None if it is not known."""
    try:
        return alive(json.loads(data.decode("utf-8"))["head"], path)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None


def sizes(run: "Any", names: "Any") -> "Dict[str, int]":
    """Return the sizes of files of a run; those that do not exist are left out. Raises CallRefused."""
    path = folder(run)
    found = {}
    for name in _checked(names):
        try:
            found[name] = os.stat("%s/%s" % (path, name), follow_symlinks=False).st_size
        except FileNotFoundError:
            continue  # it is created at the first output
    return found


def pieces(run: "Any", offsets: "Any") -> "Dict[str, str]":
    """Return what files of a run contain from the given offsets on, ``PAGE`` bytes in all; files without are left out.

    Raises CallRefused.
    """
    path = folder(run)
    found: "Dict[str, str]" = {}
    size = 0
    for name in _checked(offsets):
        offset = offsets[name]
        if not isinstance(offset, int) or offset < 0:
            raise CallRefused("invalid", "%r is not an offset" % (offset,))
        data = _piece("%s/%s" % (path, name), offset, max(_LEAST, PAGE // len(offsets)))
        if data:
            found[name] = pack(data)
            size += len(found[name])
        if size > PAGE:
            break  # the rest follows with the next call
    return found


def _checked(names: "Any") -> "List[str]":
    """Return file names, each directly in a run's folder. Raises CallRefused."""
    if not isinstance(names, (dict, list)) or len(names) > _FILES:
        raise CallRefused("invalid", "at most %d files can be read at once" % _FILES)
    for name in names:
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise CallRefused("invalid", "%r is not a file of a run" % (name,))
    return list(names)


def _whole(path: str) -> bytes:
    data = _piece(path, 0, _STATE_LIMIT + 1)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if len(data) > _STATE_LIMIT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return data


def _piece(path: str, offset: int, most: int) -> "Optional[bytes]":
    """Return at most ``most`` bytes; None where there is no file. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return os.pread(fd, most, offset)
    finally:
        os.close(fd)


def alive(head: "Dict[str, Any]", folder: str) -> "Optional[bool]":
    """Return whether the head runs; None if it is on another host, or that is not known.

    ``head``: that of the run's state.json. Raises KeyError, TypeError and ValueError for an invalid one.

    A host's name may change, so it decides only where nothing better was written: ``namespace`` identifies the
    processes of one boot that are seen here, and ``machine`` a head of an earlier boot. Images of one disk can have
    equal machine ids, so that ``folder``, the run's, has to be on a file system of this machine alone; "": it is not.
    """
    here = head["host"] == os.uname().nodename
    if head["boot_id"] != proc.boot_id():
        machine = head.get("machine")
        own = bool(machine and machine == proc.machine_id() and folder) and not shared_with_others(folder)
        return False if here or own else None
    process = proc.read_process(int(head["pid"]))
    if process is not None and process.state not in "ZX" and process.start == int(head["start"]):
        return True
    namespace = head.get("namespace")
    seen = namespace == proc.pid_namespace() if namespace else here
    return False if seen else None  # else it may be in another container
