"""Whether a target changes what an import of torch does: torch must then not be imported ahead of it.

This source is executed in the rank, before the target.
"""

import ast
import os
import sys

MYPY = False
if MYPY:
    from typing import Dict, Iterator, List, Set, Tuple, Union

    from gpuboard.agent.launch.rank import module_search, traceback_text

    Import = Union[ast.Import, ast.ImportFrom]

_FILES = 200  # of the user's own code that are read
_READS = ("get", "copy", "items", "keys", "values")  # methods of os.environ
_READERS = ("dict", "len", "list", "print", "repr", "sorted", "str")
_WRITERS = ("putenv", "unsetenv", "load_dotenv")
_OF_TORCH = ("torch", "numpy", "typing_extensions")  # packages that an import of torch loads
_NOT_LOADED = {"test"}  # of Python; a frequent name of users' files


def changes_import(kind: str, name: str) -> bool:
    """Return whether an import of torch may differ after the target has begun."""
    return changes_environment(kind, name) or bool(shadowed(_folder(kind, name)))


def shadowed(folder: str) -> "Set[str]":
    """Return the modules of Python or torch in whose place files of the target's folder are imported."""
    try:
        entries = os.listdir(folder)
    except OSError:  # a zip archive
        return set()
    inside = {entry for entry in entries if os.path.exists(os.path.join(folder, entry, "__init__.py"))}
    found = inside | {entry[:-3] for entry in entries if entry.endswith(".py")}
    return found.intersection((*getattr(sys, "stdlib_module_names", ()), *_OF_TORCH)) - _NOT_LOADED


def _folder(kind: str, name: str) -> str:
    """Return the folder that comes first in ``sys.path``."""
    if kind != "script":
        return os.getcwd()
    return name if os.path.isdir(name) else os.path.dirname(os.path.realpath(name))


def changes_environment(kind: str, name: str) -> bool:
    """Return whether a target may change the environment before it imports torch.

    Followed are the imports of the user's own modules, not those of installed packages.
    """
    search = [_folder(kind, name), *(entry for entry in sys.path[1:] if not traceback_text.is_library(entry + "/"))]
    if kind == "script":
        files = [os.path.join(name, "__main__.py") if os.path.isdir(name) else name]
    else:
        files = _files(name.partition(":")[0], search, run=kind == "module")
    seen: "Dict[str, None]" = {}
    for file in files:
        changed, imported = _walk(file, search, seen)
        if changed or imported:
            return changed
    return False


def _walk(file: str, search: "List[str]", seen: "Dict[str, None]") -> "Tuple[bool, bool]":
    """Follow one file in the order of its statements, up to its import of torch.

    Returns whether the environment may be changed before that, and whether torch is imported.
    """
    if file in seen or len(seen) >= _FILES:
        return False, False
    seen[file] = None
    try:
        with open(file, "rb") as file_object:
            source = file_object.read()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return False, False  # the target fails on it in its own way
    uses = any(word.encode("ascii") in source for word in ("environ", *_WRITERS))
    for statement in tree.body:
        if uses and _changes(statement):
            return True, False
        for node in ast.walk(statement):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for module, places in _imports(node, file, search):
                if module.partition(".")[0] == "torch" and places is search:
                    if node is statement:  # executed for certain
                        return False, True
                    continue
                for imported in _files(module, places):
                    changed, has_torch = _walk(imported, search, seen)
                    if changed or (has_torch and node is statement):
                        return changed, has_torch
    return False, False


def _changes(statement: ast.stmt) -> bool:
    """Return whether a statement uses the environment in a way that is not known to only read it."""
    above = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(statement):
        if isinstance(node, ast.ImportFrom) and any(a.asname and a.name.startswith("environ") for a in node.names):
            return True
        if not isinstance(node, (ast.Attribute, ast.Name)):
            continue
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        if name in _WRITERS or (name in ("environ", "environb") and not _only_read(node, above)):
            return True
    return False


def _only_read(node: ast.expr, above: "Dict[ast.AST, ast.AST]") -> bool:
    user = above.get(node)
    if isinstance(user, ast.Subscript):
        return isinstance(user.ctx, ast.Load)
    if isinstance(user, ast.Attribute):
        return user.attr in _READS
    if isinstance(user, ast.Call):
        return isinstance(user.func, ast.Name) and user.func.id in _READERS
    if isinstance(user, ast.keyword):
        return user.arg in (None, "env")  # dict(**os.environ), subprocess.run(…, env=os.environ)
    return isinstance(user, (ast.Compare, ast.Dict, ast.For, ast.comprehension))


def _imports(node: "Import", file: str, search: "List[str]") -> "Iterator[Tuple[str, List[str]]]":
    """Yield the modules that an import statement may load, each with the folders in which it is looked for."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, search) for alias in node.names)
        return
    if node.level:
        folder = os.path.abspath(file)
        for _ in range(node.level):
            folder = os.path.dirname(folder)
        search = [folder]
    if node.module:
        yield node.module, search
    yield from ((".".join(filter(None, (node.module, alias.name))), search) for alias in node.names)


def _files(module: str, search: "List[str]", run: bool = False) -> "List[str]":
    """Return the files that an import of ``module`` executes, packages first; only those of the user's own code.

    ``run``: as ``python -m`` does.
    """
    found = list(module_search.specs(module, search))
    if run and found and found[-1].submodule_search_locations and len(found) > module.count("."):
        found = list(module_search.specs(module + ".__main__", search))
    return [
        one.origin for one in found if one.has_location and one.origin and not traceback_text.is_library(one.origin)
    ]
