"""Modules that `allocate` on the local node must not import, as its start-up time is promised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from gpuboard.__main__ import _names_other_nodes

FORBIDDEN = {"textual", "torch", "asyncio", "asyncssh", "paramiko", "click", "ClusterShell", "platformdirs", "pynvml"}
FORBIDDEN |= {"rich", "sqlite3", "logging", "subprocess", "concurrent", "multiprocessing", "email", "urllib.request"}
FORBIDDEN |= {"random", "difflib", "shutil"}


def imported(folder: Path, *args: str) -> set[str]:
    """Return every module that the process imported, from -X importtime."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GPUBOARD_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpuboard", *args],
        env=env | {"HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    found = set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", done.stderr, re.MULTILINE))
    assert {"gpuboard.leases.claims.allocator", "gpuboard.cluster.fleet", "gpuboard.leases.claims.client"} <= found, (
        done.stderr[-2000:]
    )
    return found


def test_allocate_on_this_machine_loads_no_heavy_library(tmp_path: Path) -> None:
    found = imported(tmp_path, "allocate", "--n", "1", "--dry-run", "--format", "shell")
    assert FORBIDDEN & {name.partition(".")[0] for name in found} == set()


def test_local_agent_is_prestarted_only_where_it_will_be_used(tmp_path: Path) -> None:
    name = os.uname().nodename.partition(".")[0]
    env = {"HOME": str(tmp_path)}

    def others(*argv: str, **more: str) -> bool:
        return _names_other_nodes(list(argv), {**env, **more})

    assert not others("allocate", "--n", "1")
    assert not others("allocate", "--nodes", name)
    assert others("allocate", "--nodes", "elsewhere[1-3]")
    assert others("allocate", "--nodes=elsewhere")
    assert others("allocate", GPUBOARD_NODES="elsewhere")
    assert not others("allocate", GPUBOARD_NODES="elsewhere", GPUBOARD_LEASE="abcdef")
    config = tmp_path / ".config" / "gpuboard" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('interval = "2s"\nnodes = ["elsewhere"]\n')
    assert others("allocate")
    config.write_text(f'nodes = ["{name}", "elsewhere"]\n')
    assert not others("allocate")


def test_ssh_starts_without_libraries_that_no_server_requires(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("gcc", "cc", "ld", "ldconfig"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {ran}\n")
        (tmp_path / name).chmod(0o755)
    code = (
        "import ctypes.util\n"
        "from gpuboard.config import Settings\n"
        "from gpuboard.transport.connector import ssh_transport\n"
        "before = ctypes.util.find_library\n"
        "ssh_transport(Settings()).close()\n"
        "assert ctypes.util.find_library is before\n"
        "import sys\n"
        "assert 'asyncssh.crypto.x509' not in sys.modules and 'cryptography.x509' not in sys.modules\n"
        "import cryptography.x509\n"
    )
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60, cwd=Path(__file__).parents[2])
    assert not ran.exists()
    search = "import ctypes.util; ctypes.util.find_library('no-such-library')"
    subprocess.run([sys.executable, "-c", search], env=env, check=True, timeout=60)
    assert "gcc" in ran.read_text(), "a search for a library runs a compiler"
