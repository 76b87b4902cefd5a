"""`gpuboard demo` as a process, its clean-up, and the same from an installed wheel."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.here import Here
from tests.nodes import Cluster

ROOT = Path(__file__).parents[2]
NOT_PYTHON = {"gpuboard/py.typed"}


def carriers(variable: str) -> list[int]:
    """Return the processes whose environment has ``variable``."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and variable.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def check_demo(text: str, *, trained: bool) -> str:
    """Check what the demo printed; return the lease's id."""
    match = re.search(r"^lease ([a-z0-9]+): sim01:(\d)-(\d)$", text, re.MULTILINE)
    assert match, text
    assert text.splitlines()[0].startswith("gpuboard demo: a SIMULATED cluster.")
    assert text.count("; SIMULATED") == 3
    assert len(re.findall(r"reserved +\S+ .* left: demo$", text, re.MULTILINE)) == 2
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([0-9.]+)", text)]
    if trained:
        assert len(losses) == 7
        assert losses[-1] < losses[0] / 10
        assert {"rank 0 of 2", "rank 1 of 2"} == set(re.findall(r"rank \d of 2", text))
    else:
        assert losses == []
        assert "PyTorch is not installed" in text
    assert "Everything is released; no process of the demo is left." in text
    return match[1]


@pytest.mark.torch
def test_demo_of_an_ordinary_user_trains_releases_everything_and_keeps_its_state_apart(nodes: Cluster) -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    login, home = nodes["login1"], nodes.home("alice")
    config = home / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('nodes = ["gpu[01-99]"]\n')  # the demo must not use the configured nodes
    done = login.run(["gpuboard", "demo"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lease = check_demo(done.stdout, trained=True)
    assert len(re.findall(r"/var/tmp/gpuboard\.SIM-\S+  owner alice", done.stdout)) == 2, "the machine's claims"
    assert list(login.path("/var/tmp").glob("gpuboard.*")) == []
    assert carriers(f"GPUBOARD_LEASE={lease}") == []
    assert [path.name for path in (home / ".local" / "state" / "gpuboard").iterdir()] == ["demo"]
    assert json.loads(login.run(["gpuboard", "runs", "--json"], check=True).stdout)["runs"] == []
    config.write_text("")
    assert json.loads(login.run(["gpuboard", "leases", "--json"], check=True).stdout)["leases"] == []


def read_until(fd: int, text: bytes, timeout_s: float = 60.0) -> bytes:
    """Read from a terminal until ``text`` appears or the writer has closed it; return everything read."""
    found = b""
    until = time.monotonic() + timeout_s
    while text not in found:
        assert time.monotonic() < until, found[-2000:]
        try:
            if select.select([fd], [], [], 0.2)[0]:
                found += os.read(fd, 65536)
        except OSError:  # EIO: the other end has closed
            break
    return found


@pytest.mark.parametrize("signalled", [None, signal.SIGTERM])
def test_demo_board_on_a_terminal_releases_everything(here: Here, signalled: signal.Signals | None) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    env = here.env | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    process = subprocess.Popen(here.command("demo", "--board"), stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        read_until(ours, b"sim07")
        if signalled is None:
            os.write(ours, b"q")
        else:
            process.send_signal(signalled)
        output = read_until(ours, b"no process of the demo is left")
        assert process.wait(60) == (128 + signalled if signalled else 0)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"everything is released" in output
    assert list(here.needs_claims().iterdir()) == []


def test_demo_takes_no_nodes(here: Here) -> None:
    done = here.run("demo", "--nodes", "gpu01")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpuboard: the demo simulates its own nodes; leave out --nodes\n"


def test_demo_board_needs_a_terminal(here: Here) -> None:
    done = here.run("demo", "--board")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot open the board: stdout is not a terminal" in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, built as an installer builds it."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [file] = folder.glob("*.whl")
    return file


def test_wheel_contains_every_module_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "gpuboard").rglob("*.py")}
    themes = {f"gpuboard/board/themes/{path.name}" for path in (ROOT / "themes").iterdir()}
    assert {name for name in names if name.startswith("gpuboard/")} == source | themes | NOT_PYTHON
    assert {name.split("/")[0] for name in names} == {"gpuboard", "gpuboard-0.1.0.dist-info"}


def test_installed_wheel_runs_the_demo_without_torch(wheel: Path, here: Here, tmp_path: Path) -> None:
    """The installation consists of the wheel's files and its dependencies, without torch."""
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    for library in ("msgspec", "pynvml.py", "ClusterShell", "asyncssh", "cryptography", "_cffi_backend*"):
        spec = find_spec(library.removesuffix(".py").removesuffix("*"))
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        target = origin.parent if origin.name == "__init__.py" else origin
        (place / target.name).symlink_to(target)
    code = f"import sys; sys.path.insert(0, {str(place)!r}); from gpuboard.__main__ import main; sys.exit(main())"
    env = here.env | {"PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "demo"], env=env, capture_output=True, text=True, timeout=120,
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    check_demo(done.stdout, trained=False)
    assert os.listdir(here.needs_claims()) == []
