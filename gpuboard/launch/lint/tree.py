"""A script's syntax tree with what the rules need: full names, scopes, and what runs when it is imported (pure)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BROAD = {"Exception", "BaseException"}
_EXITS = {"sys.exit", "os._exit", "exit", "quit", "os.abort", "os.kill"}
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM", "TORCHELASTIC", "OMPI", "PMI_", "GROUP_")


class ScriptTree:
    """One parsed file."""

    def __init__(self, tree: ast.Module) -> None:
        self._aliases: dict[str, str] = {}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._functions: dict[ast.AST, ast.AST] = {}
        self._guarded: set[ast.AST] = set()  # inside `if __name__ == "__main__"`
        self.nodes: list[ast.AST] = []
        self.calls: list[tuple[ast.Call, str]] = []  # with the full name of what is called
        todo: list[ast.AST] = [tree]
        for node in todo:  # grows: breadth first, without recursion
            self.nodes.append(node)
            self._note_import(node)
            function = node if isinstance(node, _FUNCTIONS) else self._functions.get(node)
            guarded = node in self._guarded or _is_main_guard(node)
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
                if function is not None:
                    self._functions[child] = function
                if guarded:
                    self._guarded.add(child)
                todo.append(child)
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                self._note_context(node.targets[0], node.value)
        self.calls = [(node, self.name(node.func)) for node in self.nodes if isinstance(node, ast.Call)]

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                self._aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _note_context(self, target: ast.expr, value: ast.Call) -> None:
        """``context = multiprocessing.get_context("spawn")`` is used as multiprocessing is."""
        if isinstance(target, ast.Name) and self.name(value.func).endswith("multiprocessing.get_context"):
            self._aliases[target.id] = "multiprocessing"

    def name(self, node: ast.AST) -> str:
        """Return the full name of an expression: ``torch.cuda.set_device``; "" if it is not a dotted name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self._aliases.get(node.id, node.id), *reversed(parts)])

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node``, innermost first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function around ``node``; None at module level."""
        return self._functions.get(node)

    def at_import(self, node: ast.AST) -> bool:
        """Whether ``node`` is at module level, outside ``if __name__ == "__main__"``."""
        return self.function(node) is None and node not in self._guarded

    def runs_at_import(self, node: ast.AST) -> bool:
        """Whether importing the file executes ``node``, also in a function that it calls at module level."""
        return self.at_import(node) or self.function(node) in self._called_at_import

    def depends_on_launcher(self, node: ast.AST) -> bool:
        """Whether ``node`` is executed only in some environments: after a look at the launcher's variables."""
        child = node
        for parent in self.above(node):
            if isinstance(parent, ast.ExceptHandler):
                return True  # of a variable that is not set
            if isinstance(parent, (ast.If, ast.IfExp)) and self._asks_launcher(parent.test):
                return True
            for earlier in _before(parent, child):
                if isinstance(earlier, ast.If) and self._asks_launcher(earlier.test) and self._leaves(earlier.body):
                    return True
            child = parent
        return False

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions at module level, by name."""
        return {
            node.name: node
            for node in self.nodes
            if isinstance(node, Function)
            and not any(isinstance(one, (ast.ClassDef, *_FUNCTIONS)) for one in self.above(node))
        }

    @cached_property
    def uses(self) -> dict[str, list[ast.Name]]:
        """Where each name is used."""
        found: dict[str, list[ast.Name]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name):
                found.setdefault(node.id, []).append(node)
        return found

    @cached_property
    def sets_rank(self) -> set[ast.AST | None]:
        """The functions that set RANK in the environment."""
        return {
            self.function(node)
            for node in self.nodes
            if isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and constant(node.slice) == "RANK"
            and self.name(node.value) == "os.environ"
        }

    @cached_property
    def gpu_counts(self) -> set[str]:
        """The variables that are the number of GPUs."""
        assigned = [node for node in self.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        return {
            target.id
            for node in assigned
            for target in node.targets
            if isinstance(target, ast.Name)
            and isinstance(node.value, ast.Call)
            and self.name(node.value.func) == "torch.cuda.device_count"
        }

    def swallows(self, handlers: list[ast.ExceptHandler]) -> ast.ExceptHandler | None:
        """Return the handler of any exception that goes on without raising one or ending the process."""
        for handler in handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if not any(kind is None or self.name(kind) in _BROAD for kind in kinds):
                continue
            inside = list(ast.walk(handler))
            raises = any(isinstance(node, ast.Raise) for node in inside)
            exits = any(isinstance(node, ast.Call) and self.fails(node) for node in inside)
            return None if raises or exits else handler
        return None

    def fails(self, call: ast.Call) -> bool:
        """Whether a call ends the process with another exit code than 0."""
        if self.name(call.func) not in _EXITS or not call.args:
            return False
        return not (isinstance(call.args[0], ast.Constant) and call.args[0].value in (0, None))

    @cached_property
    def _called_at_import(self) -> set[ast.AST | None]:
        calls: dict[ast.AST | None, list[str]] = {}  # in a function; None: at module level
        for call, name in self.calls:
            where = self.function(call)
            if where is not None or self.at_import(call):
                calls.setdefault(where, []).append(name)
        found: set[ast.AST | None] = set()
        todo: list[ast.AST | None] = [None]
        while todo:
            for name in calls.get(todo.pop(), ()):
                called = self.functions.get(name)
                if called is not None and called not in found:
                    found.add(called)
                    todo.append(called)
        return found

    def _asks_launcher(self, test: ast.expr) -> bool:
        for node in ast.walk(test):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_LAUNCHER):
                return True
            if self.name(node).endswith(("os.environ", "os.getenv", "is_torchelastic_launched", "is_initialized")):
                return True
        return False

    def _leaves(self, body: list[ast.stmt]) -> bool:
        last = body[-1]
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
            return self.name(last.value.func) in _EXITS
        return isinstance(last, (ast.Return, ast.Raise))


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )


def _before(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(parent, field, None)
        if isinstance(block, list) and child in block:
            return block[: block.index(child)]
    return []


def unwrapped(node: ast.expr) -> ast.expr:
    """Return what an expression makes a number or a string of: ``x`` of ``str(int(x))`` and of ``f"{x}"``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"str", "int"} and node.args:
        return unwrapped(node.args[0])
    if isinstance(node, ast.JoinedStr) and len(node.values) == 1 and isinstance(node.values[0], ast.FormattedValue):
        return unwrapped(node.values[0].value)
    return node


def constant(node: ast.expr | None) -> object:
    """Return the value of a constant, also of one that is made a number or a string; None for other expressions."""
    found = None if node is None else unwrapped(node)
    return found.value if isinstance(found, ast.Constant) else None


def argument(call: ast.Call, name: str, at: int) -> ast.expr | None:
    """Return an argument by its keyword, else by its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[at] if len(call.args) > at else None
