"""The bundle sent to a node: the agent and pynvml, and the command line that unpacks and starts them."""

from __future__ import annotations

import functools
import importlib.util
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path

from gpuboard.agent import bundle_loader
from gpuboard.transport.bundle_cache import KeptBundle
from gpuboard.transport.exit_errors import STDIN_READ

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


def _files() -> list[Path]:
    """Return the files that a bundle is made from; none where they are not files, as in a zip archive."""
    folder, pynvml = resources.files("gpuboard.agent"), _pynvml_file()
    if not isinstance(folder, Path) or pynvml is None:
        return []
    return [Path(__file__), pynvml, *sorted(folder.rglob("*.py"))]


def sources(role: str) -> dict[str, str]:
    """Return the modules to send for ``role``: name -> source text. ``node`` needs pynvml and nothing of a launch."""
    found = {"gpuboard": "", **_agent_sources()}  # an empty package: the real one imports more than an agent needs
    if role == "node":
        found = {name: text for name, text in found.items() if not name.startswith(_NOT_FOR_NODE)}
        found["pynvml"] = pynvml_source(found.values())
    return found


@functools.cache
def _agent_sources() -> dict[str, str]:
    found = dict(_sources_in("gpuboard.agent", resources.files("gpuboard.agent")))
    return dict(sorted(found.items()))


def _sources_in(package: str, folder: Traversable) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        stem, dot, suffix = entry.name.rpartition(".")
        if dot and suffix == "py":
            yield package if stem == "__init__" else f"{package}.{stem}", entry.read_text(encoding="utf-8")
        elif not dot and entry.name != "__pycache__":  # which another user may have made unreadable
            yield from _sources_in(f"{package}.{entry.name}", entry)


# pynvml is a list of some 600 functions and structures at top level, each named after one of NVML's, and of constants.
_DEFINITION = re.compile(r"^(?:@.*\n(?:#.*\n)*)*(?:def|class) (?:c_)?(nvml\w+)", re.MULTILINE)
_NAME = re.compile(r"nvml\w+")  # without c_ of the structures: a pattern that begins with a letter is found faster
_NEXT = re.compile(r"^(?=\S)", re.MULTILINE)
_STATEMENT = re.compile(r"[A-Za-z_@#]|$")
_OPEN_DECORATOR = re.compile(r"^@.*(?:\n(?:[\s)#].*)?)*\Z", re.MULTILINE)  # of the definition that follows
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_IMPORT = re.compile(r"^from [\w.]+ import (\w+)\n", re.MULTILINE)
# pynvml finds its errors by their prefix.
_NUMBER = re.compile(r"^(NVML_(?!ERROR_)\w+)[ \t]*=[ \t]*(?:0x)?[0-9A-Fa-f]+[ \t]*(?:#.*)?\n", re.MULTILINE)
_CONSTANT = re.compile(r"NVML_\w+")
_USED = re.compile(r"pynvml\.(\w+)")
# What pynvml takes from modules whose import costs a node 7 ms: (module, name in it, another, in place of the import)
_SPARED = (
    ("threading", "threading.Lock", "_thread.allocate_lock", "import _thread\n"),
    ("string", "string.capwords", "_capwords",
     "def _capwords(text, mark):\n    return mark.join(word.capitalize() for word in text.split(mark))\n"),
)  # fmt: skip


def pynvml_source(users: Iterable[str]) -> str:
    """Return pynvml's source for modules with the sources ``users``, without what they do not use: a fifth of it.

    Compiling all of it takes a node 60 ms of CPU, a third of an agent's start, and 18 MB (5 MB for this part).
    Raises FileNotFoundError where pynvml is not installed.
    """
    file = _pynvml_file()
    if file is None:
        raise FileNotFoundError("pynvml is not installed here; install nvidia-ml-py")
    used = {name for text in users for name in _USED.findall(text)}
    return reduced(file.read_text(encoding="utf-8"), used)


def _pynvml_file() -> Path | None:
    spec = importlib.util.find_spec("pynvml")  # finds it without importing it
    return None if spec is None or spec.origin is None else Path(spec.origin)


def reduced(source: str, used: Iterable[str]) -> str:
    """Return ``source`` without the definitions, numbers and imports that neither ``used`` nor the rest of it needs.

    A definition is kept in any case if its end is not certain, as after a single mark of a string of several lines.
    """
    used = set(used)
    found = list(_DEFINITION.finditer(source))
    starts = [*(match.start() for match in found), len(source)]
    parts = [source[: starts[0]]]  # in the order of the source; every second one is a definition
    places: defaultdict[str, list[int]] = defaultdict(list)  # name -> its definitions in parts
    for match, after in zip(found, starts[1:], strict=True):
        text = source[match.start() : after]
        following = _NEXT.search(text, match.end() - match.start())
        end = following.start() if following else len(text)
        certain = _STATEMENT.match(text, end) and not any(text.count(mark, 0, end) % 2 for mark in ('"""', "'''"))
        if not certain or _OPEN_DECORATOR.search(parts[-1]):
            parts[-1] += text
        else:
            places[match[1]].append(len(parts))
            parts += [text[:end], text[end:]]
    kept: set[int] = set()
    between = _COMMENT.sub("", "".join(parts[::2]))
    names = [*(name.removeprefix("c_") for name in used), *_NAME.findall(between)]
    while names:
        for place in places.pop(names.pop(), ()):
            kept.add(place)
            names += _NAME.findall(parts[place])
    whole = "".join(part for at, part in enumerate(parts) if at % 2 == 0 or at in kept)
    constants = used.union(_CONSTANT.findall(_NUMBER.sub("", whole)))
    whole = _NUMBER.sub(lambda number: number[0] if number[1] in constants else "", whole)
    whole = _IMPORT.sub(lambda line: line[0] if line[1] in used or whole.count(line[1]) > 1 else "", whole)
    for module, name, spared, instead in _SPARED:
        line = f"\nimport {module}\n"
        if line in whole and set(re.findall(rf"\b{module}\.\w+", whole)) == {name}:
            whole = whole.replace(line, f"\n{instead}").replace(name, spared)
    return whole
