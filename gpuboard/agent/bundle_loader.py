"""Imports the agent on a node from memory, out of the bundle that came over the connection.

The loader's command line (gpuboard.transport.bundle) executes this file first and calls :func:`run`. On the client's
own machine the agent is imported from its files.
"""

import sys
from importlib.machinery import ModuleSpec

MYPY = False
if MYPY:  # typing costs start-up, and nothing here needs it at run time
    from types import ModuleType
    from typing import Dict, List, Optional


class Finder:
    """Imports modules from ``sources``: full module name -> source text. Also their loader."""

    def __init__(self, sources: "Dict[str, str]") -> None:
        self._sources = sources

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
        """Run a module's source."""
        name = module.__name__
        exec(compile(self._sources[name], self._file(name), "exec", dont_inherit=True), module.__dict__)

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


def run(parts: "List[str]") -> None:
    """Make the modules in ``parts`` (name, source, name, source, …) importable and run the agent."""
    sys.meta_path.insert(0, Finder({parts[i]: parts[i + 1] for i in range(0, len(parts), 2)}))
    from gpuboard.agent.main import main  # late: imported from the bundle

    main()
