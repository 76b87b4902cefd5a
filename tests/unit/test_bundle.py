"""The bundle and its loader, under the oldest supported interpreter and in every login shell."""

from __future__ import annotations

import ast
import json
import marshal
import shutil
import subprocess
import sys
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent import bundle_loader as bundled
from gpuboard.agent.launch.start import module_source
from gpuboard.transport import bundle
from gpuboard.transport.exit_errors import explain_exit
from tests.waiting import read_line

OLD = sorted(Path("/root/.pyenv/versions").glob("3.6.*/bin/python"))
PYTHONS = [sys.executable, *map(str, OLD[:1])]


def ask(command: list[str], data: bytes, **options: Any) -> tuple[bytes, int]:
    """Send ``data``, return the first frame and, after closing stdin, the exit code."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        child.stdin.write(data)
        child.stdin.flush()
        assert child.stdout.readline() == b"\n"
        line = child.stdout.readline()
    return line, child.wait(60)


def end(command: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Send ``data`` and end-of-file, return the result."""
    return subprocess.run(command, input=data, capture_output=True, timeout=60)


def start_line(role: str = "none") -> bytes:
    return json.dumps({"t": "start", "nonce": "ab" * 8, "role": role, "config": {}}).encode() + b"\n"


def test_the_command_line_has_no_character_that_a_shell_would_read() -> None:
    line = bundle.command_line("python3")
    assert not set(line) & set("!$\\`\n")
    assert line.count("'") == 2


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "tcsh", "fish"])
def test_every_login_shell_starts_the_agent(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    line, code = ask([shell, "-c", bundle.command_line(sys.executable)], bundle.bundle("launch") + start_line())
    assert line.startswith(b"@" + b"ab" * 8 + b'{"t":"event","kind":"stderr"')
    assert b"no role 'none'" in line
    assert code == 2


@pytest.mark.parametrize("python", PYTHONS)
def test_an_old_interpreter_runs_the_agent_in_a_folder_with_traps(python: str, tmp_path: Path) -> None:
    for name in ("os.py", "zlib.py", "json.py", "gpuboard.py", "pynvml.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the current folder')\n")
    line, _ = ask(
        ["sh", "-c", bundle.command_line(python)],
        bundle.bundle("node") + start_line(),
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
    )
    assert b"no role 'none'" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gpuboard.py", "json.py", "os.py", "pynvml.py", "zlib.py",
    ]  # fmt: skip


def test_bytes_that_trickle_in_are_read_whole_and_no_further() -> None:
    data = bundle.bundle("launch") + start_line()
    child = subprocess.Popen(
        ["sh", "-c", bundle.command_line(sys.executable)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    for at in range(0, len(data), 997):
        child.stdin.write(data[at : at + 997])
        child.stdin.flush()
    assert read_line(child) == b"\n"
    assert b"no role 'none'" in read_line(child)
    child.stdin.close()
    assert child.wait(60) == 2


def test_the_loader_ends_without_output_when_the_connection_ends_early() -> None:
    done = end(["sh", "-c", bundle.command_line(sys.executable)], bundle.bundle("node")[:5000])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_interpreter_that_is_too_old_is_reported() -> None:
    python2 = sorted(Path("/root/.pyenv/versions").glob("2.7.*/bin/python"))
    if not python2:
        pytest.skip("no Python 2 here")
    done = end(["sh", "-c", bundle.command_line(str(python2[0]))], bundle.bundle("node"))
    error = explain_exit(done.returncode, done.stderr, "python2")
    assert error.kind == "no-python"
    assert error.words.startswith("python 3.6 or later is needed, this is 2.7")
    assert "python" in error.remedy


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "fish"])
def test_a_missing_python_is_recognised_in_every_shell(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    done = end([shell, "-c", bundle.command_line("python3-that-is-not-there")], b"")
    error = explain_exit(done.returncode, done.stderr, "python3-that-is-not-there")
    assert error.kind == "no-python"
    assert error.words.startswith("python3-that-is-not-there cannot be started there")
    assert error.remedy == "install python3 (3.6 or later) or set `python` in the config"


def test_role_node_gets_pynvml_and_every_module_that_it_may_import() -> None:
    sent, whole = bundle.sources("node"), bundle.sources("launch")
    assert "pynvml" in sent
    assert "pynvml" not in whole
    assert len(sent) < len(whole) / 1.5
    named = {
        f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in whole else node.module
        for name, text in sent.items()
        if name != "gpuboard.agent.main"  # it imports the module of the role alone
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in whole
        for alias in node.names
    }
    assert named
    assert named <= sent.keys()
    assert bundle.bundle("node") is bundle.bundle("node")


def test_every_module_of_the_agent_is_sent() -> None:
    root = Path(bundled.__file__).parents[2]
    found = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in Path(bundled.__file__).parent.rglob("*.py")
    }
    assert found == bundle.sources("launch").keys() - {"gpuboard"}


def test_an_interpreter_with_odd_characters_in_its_path_is_quoted(tmp_path: Path) -> None:
    odd = tmp_path / "it's a path; echo"
    odd.symlink_to(sys.executable)
    line, _ = ask(["sh", "-c", bundle.command_line(str(odd))], bundle.bundle("launch") + start_line())
    assert b"no role 'none'" in line


def test_the_source_of_a_module_is_found_in_files_and_in_the_bundle() -> None:
    assert module_source("gpuboard.agent.protocol") == bundle.sources("launch")["gpuboard.agent.protocol"]
    finder = bundled.Finder(lambda: {"a": "", "a.b": "x = 1\n"})
    assert (finder.get_source("a.b"), finder.is_package("a"), finder.is_package("a.b")) == ("x = 1\n", True, False)
    with pytest.raises(ImportError, match=r"a\.c is not in the bundle"):
        finder.get_source("a.c")


LOADER = "gpuboard.agent.bundle_loader"


def modules(main: str) -> dict[str, str]:
    """Return the sources of an agent with this gpuboard.agent.main."""
    loader = bundle.sources("launch")[LOADER]
    return {"gpuboard": "", "gpuboard.agent": "", LOADER: loader, "gpuboard.agent.main": main}


def run_main(main: str, code: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a bundle with this source of gpuboard.agent.main, and ``code``."""
    packed, text = zlib.compress(code), "\0".join(chain.from_iterable(modules(main).items())).encode()
    content = b"%08d" % len(packed) + packed + zlib.compress(text)
    sent = bundle.GUARD + b"%08d" % len(content) + content
    return end(["sh", "-c", bundle.command_line(sys.executable)], sent)


def test_compiled_modules_are_used_by_the_same_python_alone() -> None:
    source = "def main():\n    print('source')\n"
    code = bundled.packed(modules(source.replace("source", "code")))
    assert run_main(source, code).stdout == b"code\n"
    assert run_main(source, b"").stdout == b"source\n"
    of_another = bundled.BYTECODE.replace(b"cpython-3", b"cpython-4")
    assert of_another != bundled.BYTECODE
    assert run_main(source, code.replace(bundled.BYTECODE, of_another)).stdout == b"source\n"


def test_the_source_of_a_module_that_is_not_compiled_is_unpacked() -> None:
    code = bundled.packed(modules("def main(): print('code')\n"), later=("gpuboard.agent.main",))
    assert run_main("def main(): print('source')\n", code).stdout == b"source\n"


def test_a_bundle_for_a_node_has_compiled_modules_and_still_every_source() -> None:
    length = len(bundle.GUARD) + 8

    def content(role: str) -> tuple[bytes, dict[str, str]]:
        data = bundle.bundle(role)[length:]
        middle = 8 + int(data[:8])
        parts = zlib.decompress(data[middle:]).decode().split("\0")
        return zlib.decompress(data[8:middle]), dict(zip(parts[::2], parts[1::2], strict=True))

    code, sources = content("node")
    assert sources == bundle.sources("node")
    assert code.startswith(bundled.BYTECODE)
    codes = marshal.loads(code[len(bundled.BYTECODE) :])
    assert codes.keys() == sources.keys()
    compiled = {name for name, marshalled in codes.items() if marshalled}
    assert {"pynvml", "gpuboard.agent.node", "gpuboard.agent.nvml.reader"} <= compiled < sources.keys()
    assert content("launch") == (b"", bundle.sources("launch"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_traceback_out_of_the_bundle_shows_the_source_line(compiled: bool) -> None:
    source = (
        "def main():\n"
        "    import traceback\n"
        "    try:\n"
        "        raise OSError('here')\n"
        "    except OSError:\n"
        "        traceback.print_exc()\n"
    )
    done = run_main(source, bundled.packed(modules(source)) if compiled else b"")
    assert b'File "<bundle>/gpuboard/agent/main.py", line 4, in main' in done.stderr
    assert b"    raise OSError('here')" in done.stderr


@pytest.mark.parametrize(
    ("code", "stderr", "kind", "words"),
    [
        (127, b"sh: 1: exec: python3: not found\n", "no-python",
         "python3 cannot be started there (sh: 1: exec: python3: not found)"),
        (126, b"", "no-python", "python3 cannot be started there"),
        (1, b"python3: Command not found.\n", "no-python",
         "python3 cannot be started there (python3: Command not found.)"),
        (1, b"/usr/bin/python3: Permission denied.\n", "no-python",
         "python3 cannot be started there (/usr/bin/python3: Permission denied.)"),
        (1, b"python3: Permission denied.\n", "no-python",
         "python3 cannot be started there (python3: Permission denied.)"),
        (1, b"Traceback\nImportError: module not found\n", "exited",
         "the agent ended with exit code 1: ImportError: module not found"),
        (1, b"/home/a/.bashrc: line 3: module: command not found\n", "exited",
         "the agent ended with exit code 1: /home/a/.bashrc: line 3: module: command not found"),
        (-9, b"", "exited", "the agent was killed by signal 9"),
        (0, b"", "exited", "the agent ended with exit code 0"),
        (None, b"bad \x1b[31mthing\xff\n", "exited", "the agent ended: bad [31mthing\N{REPLACEMENT CHARACTER}"),
    ],
)  # fmt: skip
def test_exits_are_explained(code: int | None, stderr: bytes, kind: str, words: str) -> None:
    error = explain_exit(code, stderr, "python3")
    assert (error.kind, error.words) == (kind, words)
