"""The directions of imports hold: import-linter's contracts, the agent's standard library, what a start-up loads."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = sorted((ROOT / "gpuboard" / "agent").rglob("*.py"))
# Which module of the agent may open which door; torch is there because the ranks' own interpreters have it.
DOORS = {
    "nvml/reader.py": {"pynvml"},
    "nvml/activity.py": {"pynvml"},
    "rank/worker.py": {"torch"},
    "rank/recorder.py": {"torch"},
    "rank/store.py": {"torch"},
    "rank/torch_hooks.py": {"torch"},
}


def test_import_contracts_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", AGENT, ids=lambda path: "/".join(path.parts[-2:]))
def test_the_agent_imports_the_standard_library_and_itself(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | DOORS.get("/".join(path.parts[-2:]), set())
    assert [name for name in _imports(path) if name.split(".")[0] not in allowed and name != "gpuboard.agent"] == []


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        ("pynvml", {"agent/nvml/reader.py", "agent/nvml/activity.py"}),
        ("asyncssh", {f"transport/ssh/{name}.py" for name in ("asyncssh", "asyncssh_config")}),
        ("paramiko", {f"transport/ssh/{name}.py" for name in ("paramiko", "paramiko_login")}),
        ("ClusterShell", {"nodesets.py"}),
        ("textual", {"board/"}),
        ("rich", {"board/"}),
    ],
)
def test_each_library_has_one_door(library: str, doors: set[str]) -> None:
    package = ROOT / "gpuboard"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name.split(".")[0] == library for name in _imports(path))
    }
    assert {path for path in found if not any(path == door or path.startswith(door) for door in doors)} == set()


@pytest.mark.parametrize("command", ["--version", "config"])
def test_small_commands_load_no_heavy_library(command: str) -> None:
    code = (
        "import sys; from gpuboard.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'asyncio', 'asyncssh', 'torch', 'ClusterShell', 'pynvml', 'textual', 'click'} & set(sys.modules); "
        "sys.exit(code or (' '.join(sorted(heavy)) or None))"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_keeper_of_local_leases_needs_only_the_standard_library() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpuboard.keeper.daemon.main"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@functools.cache
def _imports(path: Path) -> list[str]:
    """Return the absolute names of the packages that a file imports, late imports too; type checkers' ones not."""
    found: list[str] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id in {"TYPE_CHECKING", "MYPY"}
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            found.append("gpuboard.agent" if module.startswith("gpuboard.agent") else module)
    return found
