"""Imports the agent on a node from memory, out of the bundle that came over the connection.

The loader's command line (gpuboard.transport.bundle) executes this file first and calls :func:`run`. On the client's
own machine the agent is imported from its files.
"""

import gc
import marshal
import sys

MYPY = False
if MYPY:  # typing costs start-up, and nothing here needs it at run time
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Callable, Dict, Optional, Tuple

# The kind of bytecode that this Python executes. importlib.util has the number, too, and takes 4 ms to import.
_MAGIC_NUMBER = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"")
BYTECODE = b"%s %s\n" % (_MAGIC_NUMBER, str(sys.implementation.cache_tag).encode())  # type: bytes

# New objects before a pass of the cycle collector: more than a start creates, whose passes take 2 of 35 ms.
_NEW_MOST = 20000


class Finder:
    """Imports modules from memory. Also their loader.

    ``unpack`` returns full module name -> source text, and is called when one is needed. ``codes``: the same names ->
    marshalled code, of BYTECODE's kind; b"": that module is compiled here, as all are without ``codes``.
    """

    def __init__(self, unpack: "Callable[[], Dict[str, str]]", codes: "Optional[Dict[str, bytes]]" = None) -> None:
        self._unpack = unpack
        self._unpacked = None  # type: Optional[Dict[str, str]]
        self._codes = codes or dict.fromkeys(self._sources(), b"")

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Optional[ModuleSpec]":
        """Return the spec of a module in the bundle, None for any other."""
        if name not in self._codes:
            return None
        kind = type(sys.__spec__)  # ModuleSpec; importlib.machinery takes 1 ms to import
        spec = kind(name, self, origin=self._file(name), is_package=self.is_package(name))  # type: ignore[arg-type]
        spec.has_location = True  # sets __file__, so that traceback finds the source by get_source
        return spec

    def create_module(self, spec: "ModuleSpec") -> None:
        """Let the import system create the module."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run a module."""
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> "CodeType":
        """Return a module's code."""
        marshalled, self._codes[name] = self._codes[name], b""  # a module is imported once
        if marshalled:
            code = marshal.loads(marshalled)  # type: CodeType
        else:
            code = compile(self._sources()[name], self._file(name), "exec", dont_inherit=True)
        return code

    def get_source(self, name: str) -> str:
        """Return a module's source text. Raises ImportError if it is not in the bundle."""
        try:
            return self._sources()[name]
        except KeyError:
            raise ImportError("%s is not in the bundle" % name, name=name)

    def is_package(self, name: str) -> bool:
        """Return whether ``name`` contains other modules of the bundle."""
        return any(other.startswith(name + ".") for other in self._codes)

    def _sources(self) -> "Dict[str, str]":
        if self._unpacked is None:
            self._unpacked = self._unpack()
        return self._unpacked

    def _file(self, name: str) -> str:
        return "<bundle>/%s%s" % (name.replace(".", "/"), "/__init__.py" if self.is_package(name) else ".py")


def packed(sources: "Dict[str, str]", later: "Tuple[str, ...]" = ()) -> bytes:
    """Return a Finder's codes as bytes, compiled by this Python; b"" for names that begin as in ``later``."""
    finder = Finder(lambda: sources)
    codes = {name: b"" if name.startswith(later) else marshal.dumps(finder.get_code(name)) for name in sources}
    return BYTECODE + marshal.dumps(codes)


def run(unpack: "Callable[[], Dict[str, str]]", codes: "Dict[str, bytes]") -> None:
    """Make the modules of a bundle importable (see Finder) and run the agent.

    ``codes``: of the same version of Python, else empty. They save a node half of the CPU time of an agent's start.
    """
    gc.set_threshold(_NEW_MOST, 10, 10)
    sys.meta_path.insert(0, Finder(unpack, codes))
    from gpuboard.agent.main import main  # late: imported from the bundle

    main()
