"""Imports the agent on a node from memory, out of the bundle that came over the connection.

The loader's command line (gpuboard.transport.bundle) executes this file first and calls :func:`run`. On the client's
own machine the agent is imported from its files.
"""

import marshal
import sys
from importlib.machinery import ModuleSpec

MYPY = False
if MYPY:  # typing costs start-up, and nothing here needs it at run time
    from types import CodeType, ModuleType
    from typing import Dict, List, Optional

# The kind of bytecode that this Python executes. importlib.util has the number, too, and takes 4 ms to import.
_MAGIC_NUMBER = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"")
BYTECODE = b"%s %s\n" % (_MAGIC_NUMBER, str(sys.implementation.cache_tag).encode())  # type: bytes


class Finder:
    """Imports modules from ``sources``: full module name -> source text. Also their loader.

    ``compiled``: module name -> marshalled code, of BYTECODE's kind, of those that need not be compiled here.
    """

    def __init__(self, sources: "Dict[str, str]", compiled: "Optional[Dict[str, bytes]]" = None) -> None:
        self._sources = sources
        self._compiled = compiled or {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Optional[ModuleSpec]":
        """Return the spec of a module in the bundle, None for any other."""
        if name not in self._sources:
            return None
        spec = ModuleSpec(name, self, origin=self._file(name), is_package=self.is_package(name))  # type: ignore[arg-type]
        spec.has_location = True  # sets __file__, so that traceback finds the source by get_source
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create the module."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run a module."""
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> "CodeType":
        """Return a module's code."""
        if name in self._compiled:
            code = marshal.loads(self._compiled.pop(name))  # type: CodeType  # a module is imported once
        else:
            code = compile(self._sources[name], self._file(name), "exec", dont_inherit=True)
        return code

    def get_source(self, name: str) -> str:
        """Return a module's source text. Raises ImportError if it is not in the bundle."""
        try:
            return self._sources[name]
        except KeyError:
            raise ImportError("%s is not in the bundle" % name, name=name)

    def is_package(self, name: str) -> bool:
        """Return whether ``name`` contains other modules of the bundle."""
        return any(other.startswith(name + ".") for other in self._sources)

    def _file(self, name: str) -> str:
        return "<bundle>/%s%s" % (name.replace(".", "/"), "/__init__.py" if self.is_package(name) else ".py")


def packed(sources: "Dict[str, str]", names: "List[str]") -> bytes:
    """Return what ``run`` takes as ``code``: the modules ``names`` of ``sources``, compiled by this Python."""
    finder = Finder(sources)
    return BYTECODE + marshal.dumps({name: marshal.dumps(finder.get_code(name)) for name in names})


def run(parts: "List[str]", code: bytes = b"") -> None:
    """Make the modules in ``parts`` (name, source, name, source, …) importable and run the agent.

    ``code`` (``packed``) is used where it was compiled by the same version of Python: that saves a node half of the
    CPU time of an agent's start.
    """
    compiled = marshal.loads(code[len(BYTECODE) :]) if code.startswith(BYTECODE) else None
    sys.meta_path.insert(0, Finder({parts[i]: parts[i + 1] for i in range(0, len(parts), 2)}, compiled))
    from gpuboard.agent.main import main  # late: imported from the bundle

    main()
