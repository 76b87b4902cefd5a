"""The bundle sent to a node: the agent and pynvml, and the command line that unpacks and starts them."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from gpuboard.agent import bundle_loader
from gpuboard.transport.bundle_cache import KeptBundle
from gpuboard.transport.exit_errors import STDIN_READ

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

# Sent first to a shell that is to start a program. A start-up file that reads standard input consumes part of it, which
# the program detects. A shell that a start-up file starts in the program's place runs it as a command and exits.
GUARD = b"exit %d\n" % STDIN_READ

# One line in single quotes without ! $ \ backquote or newline, so that sh, csh and fish parse it alike; statements that
# Python 2 can compile, so that an old interpreter prints its version. Reads GUARD, 8 digits and that many bytes from
# fd 0, unbuffered: the rest is for the agent. The current folder must not be on the path (-c puts it there). Code of
# another kind of Python (bundle_loader.BYTECODE) is not used.
_LOADER = (
    "import sys;sys.path[:]=[p for p in sys.path if p];"
    'sys.version_info>=(3,6) or sys.exit("gpuboard: python 3.6 or later is needed, this is "+sys.version.split()[0]);'
    "import os,zlib,marshal;"
    "r=lambda n,b:[b.extend(os.read(0,n-len(b)) or sys.exit(0)) for _ in iter(lambda:len(b)<n,False)] and b;"
    f"h=bytes(r({len(GUARD) + 8},bytearray()));"
    f'h[:{len(GUARD) - 1}]==b"{GUARD.decode().strip()}" and h[{len(GUARD)}:].isdigit() or sys.exit({STDIN_READ});'
    f"d=bytes(r(int(h[{len(GUARD)}:]),bytearray()));n=int(d[:8])+8;"
    'c=zlib.decompress(d[8:n]);m=getattr(sys.modules.get("_frozen_importlib_external"),"MAGIC_NUMBER",b"");'
    'm+=(" %s"%sys.implementation.cache_tag).encode()+bytes([10]);'
    's=lambda:(lambda p:dict(zip(p[::2],p[1::2])))(zlib.decompress(d[n:]).decode("utf-8").split(chr(0)));'
    'k=marshal.loads(c[len(m):]) if c.startswith(m) else {};b="gpuboard.agent.bundle_loader";g={"__name__":b};'
    'exec(marshal.loads(k[b]) if k else compile(s()[b],"<bundle>/gpuboard/agent/bundle_loader.py","exec"),g);'
    'g["run"](s,k)'
)
_NOT_FOR_NODE = ("gpuboard.agent.launch", "gpuboard.agent.runs")  # half of the agent; a node's role is started most
# Modules of a node's role that its first reading rarely needs; they are not compiled for it.
_LATER = (
    "gpuboard.agent.claims.protocol",
    "gpuboard.agent.command_runner",
    "gpuboard.agent.signals",
    "gpuboard.agent.simulate",
    "gpuboard.agent.slurm_gpus",
    "gpuboard.agent.smi",
)
_BARE_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")


def command_line(python: str) -> str:
    """Return the shell command that runs the loader under ``python``, in the syntax of any login shell."""
    word = python if _BARE_WORD.fullmatch(python) else "'" + python.replace("'", "'\"'\"'") + "'"
    return f"exec {word} -E -s -S -c '{_LOADER}'"


@functools.cache
def bundle(role: str) -> bytes:
    """Return what the loader reads: GUARD, 8 digits, then that many bytes.

    These are 8 digits, that many bytes of zlib, and zlib to the end. The first has code (bundle_loader.packed) or
    nothing, the second the names and sources of all modules (``sources``) in turn, separated by NUL: a node unpacks it
    only for what it has no code of. For role ``node`` the modules that it always needs are compiled, where that can be
    stored for later processes.
    """
    kept = KeptBundle("node" if role == "node" else "launch", _files())
    found = kept.load()
    if found is None:
        found = _made(role, compiled=role == "node" and kept.usable)
        kept.store(found)
    return GUARD + b"%08d" % len(found) + found


def _made(role: str, *, compiled: bool) -> bytes:
    modules = sources(role)
    parts = list(chain.from_iterable(modules.items()))
    if any("\0" in text for text in parts):
        raise ValueError("a module of the agent has a NUL in its source")
    code = bundle_loader.packed(modules, later=_LATER) if compiled else b""
    packed = zlib.compress(code)  # level 9 takes three times as long for 1 % less
    return b"%08d" % len(packed) + packed + zlib.compress("\0".join(parts).encode())


def _files() -> list[str]:
    """Return the files that a bundle is made from; none where they are not files, as in a zip archive."""
    package, pynvml = os.path.dirname(bundle_loader.__file__), _pynvml_file()
    if pynvml is None or not os.path.isdir(package):
        return []
    modules = (os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names)
    makers = (__file__, os.path.join(os.path.dirname(__file__), "pynvml_source.py"))
    return [*makers, pynvml, *sorted(path for path in modules if path.endswith(".py"))]


def sources(role: str) -> dict[str, str]:
    """Return the modules to send for ``role``: name -> source text. ``node`` needs pynvml and nothing of a launch."""
    found = {"gpuboard": "", **_agent_sources()}  # an empty package: the real one imports more than an agent needs
    if role == "node":
        found = {name: text for name, text in found.items() if not name.startswith(_NOT_FOR_NODE)}
        found["pynvml"] = _pynvml_source(found.values())
    return found


@functools.cache
def _agent_sources() -> dict[str, str]:
    from importlib import resources  # 5 ms: only where no bundle is kept

    found = dict(_sources_in("gpuboard.agent", resources.files("gpuboard.agent")))
    return dict(sorted(found.items()))


def _sources_in(package: str, folder: Traversable) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        stem, dot, suffix = entry.name.rpartition(".")
        if dot and suffix == "py":
            yield package if stem == "__init__" else f"{package}.{stem}", entry.read_text(encoding="utf-8")
        elif not dot and entry.name != "__pycache__":  # which another user may have made unreadable
            yield from _sources_in(f"{package}.{entry.name}", entry)


def _pynvml_source(users: Iterable[str]) -> str:
    """Return what modules with the sources ``users`` need of pynvml. Raises FileNotFoundError where it is missing."""
    file = _pynvml_file()
    if file is None:
        raise FileNotFoundError("pynvml is not installed here; install nvidia-ml-py")
    from gpuboard.transport.pynvml_source import used_part  # 3 ms: only where no bundle is kept

    with open(file, encoding="utf-8") as source:
        return used_part(source.read(), users)


def _pynvml_file() -> str | None:
    spec = importlib.util.find_spec("pynvml")  # finds it without importing it
    return None if spec is None else spec.origin
