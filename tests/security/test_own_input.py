"""One's own input, however large, odd or wrong: a usage error within a second and 100 MB, on every command and place.

Processes, measured: exit code 2, words that say what is wrong where, no traceback, bounded time and memory. Most are
forks (tests/security/forked.py); bytes and what is read before any import are given to whole processes too.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.here import Here
from tests.integration.test_bad_input import MAP, check_no_gpu_given
from tests.nvml import Gpu
from tests.security.forked import Forked

PEAK = 100_000_000  # bytes; Python with our imports takes half of it
SECONDS = 3.0  # of CPU time: 0.2 to 0.9 where nothing else runs, more where caches are shared

Bytes = str | bytes


class Row(NamedTuple):
    """A command line, split at blanks (``{}`` is the test's folder), the words of its error, and the environment."""

    line: str
    words: str
    env: dict[str, Bytes] = {}  # noqa: RUF012
    more: Sequence[Bytes] = ()  # arguments that hold blanks, or are long


MANY = ",".join(f"gpu{number}[1-9]" for number in range(3000))
RANGES = "@".join(f"gpu{number}:0-4095" for number in range(6000))
VAST = "gpu[0-60000]m[0-60000]"
FILES = ("/dev/zero", "{}/fifo", "{}/held", "{}", "{}/sparse")
NUMBERS: tuple[Bytes, ...] = ("²", "٣", "1_000", "+1", " 1 ", "9" * 5000, "", b"\xff")
TARGET = "--device cpu train.py"

ROWS = {
    # nodesets, wherever one may stand
    **{f"product-{n}": Row(line, "too many") for n, line in enumerate([
        f"status --nodes {VAST}",
        f"allocate --n 1 --nodes {VAST}",
        f"allocate --n 1 --exclude {VAST}",
        f"launch --n 1 --exclude {VAST} train.py",
        f"run --n 1 --exclude {VAST} -- true",
        f"leases --nodes gpu[0-9999],{VAST}",
        "status --nodes gpu9[1-9999999]",
        "status --nodes gpu99999999[9-10]",
        "status --nodes gpu[0-1000][0-1000]",
        "status --nodes a[0-9]b[0-9]c[0-9]d[0-9]e[0-9]",
        "status --nodes gpu[0-9999] --nodes b[0-9999] --nodes c[0-9999] --nodes d[0-9999] --nodes e[0-9999]",
    ])},
    "product-excluded": Row("allocate --n 1 --exclude gpu[0-9999] --exclude b[0-9999]", "more than 16384"),
    "product-environment": Row("status", "too many", {"GPUBOARD_NODES": VAST}),
    "product-config": Row("status --config {}/vast.toml", "too many"),
    "product-padded": Row("status --nodes gpu[000000000-100000000]", "too many"),
    "product-under": Row("status --nodes gpu[0-9_9_9_9_9_9_9]", "gpu[0-9_9_9_9_9_9_9]"),
    "product-step": Row("status --nodes gpu[0-100000000/1]", "too many"),
    "parts": Row("status --nodes=gpu[01-1601-1601-1601-1601]x", "gpu[01-1601-1601-1601-1601]x"),
    "digits": Row("status", "nodeset", {}, ["--nodes", f"a,gpu{'9' * 5000}"]),
    "long": Row("status", "nodeset", {}, ["--nodes", (MANY * 4)[:120_000]]),
    "arabic": Row("status --nodes gpu[٠-٣]", "which no node's name can have"),
    "groups-vast": Row("status --nodes @vast", "too many"),
    "groups-circle": Row("status --nodes @left", "group"),
    "groups-wide": Row("status --nodes @g00", "group"),
    "groups-many": Row("status --nodes @g[0-9999]", "group"),
    # GPUs
    "gpus": Row("allocate", "GPUs", {}, ["--gpus", RANGES[:120_000]]),
    "gpus-run": Row("run", "GPUs", {}, ["--gpus", RANGES[:120_000], "--", "true"]),
    "gpus-repeated": Row("allocate", "GPUs", {}, [w for n in range(2000) for w in ("--gpus", f"gpu{n}:0-4095")]),
    "exclude-ranges": Row("allocate --n 1", "GPUs", {}, ["--exclude", RANGES[:120_000]]),
    # files that somebody names
    **{f"{kind}-{n}": Row(line.replace("FILE", file), words, {k: v.replace("FILE", file) for k, v in env.items()})
       for n, file in enumerate(FILES)
       for kind, line, words, env in (
           ("config", "status --config FILE", "cannot be read", {}),
           ("config-allocate", "allocate --n 1 --config FILE", "cannot be read", {}),
           ("config-variable", "status", "cannot be read", {"GPUBOARD_CONFIG": "FILE"}),
           ("rank-map", f"launch --rank-map FILE {TARGET}", "cannot read the rank map", {}),
           ("inventory", "status", "GPUBOARD_INVENTORY", {"GPUBOARD_INVENTORY": "FILE"}),
           ("hostfile", "status --nodes hostfile:FILE", "cannot be read", {}),
           ("ssh-config", "status --nodes ssh_config:gpu*", "ssh_config", {"GPUBOARD_SSH_CONFIG": "FILE"}),
           ("ssh-config-used", "status --nodes gpu01", "ssh_config", {"GPUBOARD_SSH_CONFIG": "FILE"}),
           ("known-hosts", "status --nodes gpu01", "known_hosts", {"GPUBOARD_KNOWN_HOSTS": "FILE"}),
       )},
    "config-deep": Row("status --config {}/deep.toml", "deep.toml"),
    "config-dotted": Row("status --config {}/dotted.toml", "dotted.toml"),
    "config-number": Row("status --config {}/number.toml", "number.toml"),
    "config-hex": Row("status --config {}/hex.toml", "hex.toml"),
    "config-nul": Row("status --nodes gpu01 --config {}/nul.toml", "ssh_config"),
    "config-nul-hostfile": Row("status --config {}/nulfile.toml", "nodes"),
    "config-nul-claims": Row("status --config {}/nulclaims.toml", "claims_dir"),
    "config-control": Row("status --nodes gpu01 --config {}/control.toml", "ssh_config"),
    "rank-map-deep": Row(f"launch --rank-map {{}}/deep.json {TARGET}", "deep.json"),
    "rank-map-large": Row(f"launch --rank-map {{}}/large.json {TARGET}", "more than 16384 ranks or nodes"),
    "rank-map-wrong": Row(f"launch --rank-map {{}}/wrong.json {TARGET}", "more"),
    "inventory-deep": Row("status", "GPUBOARD_INVENTORY", {"GPUBOARD_INVENTORY": "{}/deep.json"}),
    "inventory-nul": Row("status", "GPUBOARD_INVENTORY", {"GPUBOARD_INVENTORY": "{}/nul.json"}),
    "hostfile-blanks": Row("status --nodes hostfile:{}/blanks", "blanks"),
    "hostfile-lines": Row("status --nodes hostfile:{}/lines", "lines"),
    # patterns
    "glob": Row(f"status --nodes ssh_config:{'*a' * 30}c", "ssh_config:", {"GPUBOARD_SSH_CONFIG": "{}/aliases"}),
    "glob-include": Row("status --nodes ssh_config:*", "Include", {"GPUBOARD_SSH_CONFIG": "{}/itself"}),
    # numbers, durations, sizes
    "duration": Row("allocate --n 1", "not a duration", {}, ["--for", "9" * 120_000]),
    "duration-wait": Row("allocate --n 1", "not a duration", {}, ["--wait", "9" * 120_000]),
    "duration-renew": Row("renew k3f9", "not a duration", {}, ["--for", "9" * 120_000 + "s"]),
    "duration-watch": Row("status", "not a", {}, ["--watch", "1" * 120_000]),
    "duration-variable": Row("status", "not a duration", {"GPUBOARD_INTERVAL": "9" * 120_000}),
    "size": Row("allocate --n 1", "not a size", {}, ["--gpu-mem", "9" * 400 + "GiB"]),
    "number-n": Row("allocate", "whole number", {}, ["--n", "9" * 5000]),
    "number-holder": Row("allocate --n 1 --holder 99999999999999999999", "whole number"),
    "number-arabic": Row("allocate --n ٣", "whole number"),
    "number-under": Row("serve --web --port 8_000", "--port"),
    "number-port": Row("serve --web", "--port", {}, ["--port", " 8000 "]),
    "number-port-sign": Row("serve --web --port +8000", "--port"),
    "number-rank": Row("logs last --rank ²", "--rank"),
    "number-lifeline": Row("launch --n 1 --life-line 99999999999999999999 train.py", "--life-line"),
    **{f"number-variable-{n}": Row("status", "GPUBOARD_MAX_CONNECTIONS", {"GPUBOARD_MAX_CONNECTIONS": text})
       for n, text in enumerate(NUMBERS)},
    # other words
    "url": Row("serve --web --public-url http://[", "--public-url"),
    "url-port": Row("serve --web --public-url http://a:b", "--public-url"),
    "bytes-nodes": Row("status --nodes", "which no node's name can have", {}, [b"gpu\xff"]),
    "bytes-option": Row("allocate --n 1", "no such option", {}, [b"--\xff"]),
    "bytes-command": Row("", "is not a command", {}, [b"\xff\x1b[31m"]),
    "bytes-json": Row("allocate --n 1 --json --nodes", "name", {}, [b"gpu\xff"]),
    "bytes-config": Row("status --config", "no such config file", {}, [b"/\xff"]),
    "bytes-hostfile": Row("status --nodes", "cannot be read", {}, [b"hostfile:/\xff"]),
    "bytes-status-file": Row("run --n 0 --status-file {}/out", "whole number", {}, [b"\xff"]),
    "status-file": Row("run --n 0 --status-file {}/fifo -- true", "--status-file"),
    "bytes-rank-map": Row("launch --device cpu --rank-map", "cannot read the rank map", {}, [b"/\xff", "train.py"]),
    "line-config": Row("status --config", "no such config file", {}, ["/a\nb\x1b[31m"]),
    "line-rank-map": Row("launch --device cpu --rank-map", "cannot read the rank", {}, ["/a\nb\x1b[31m", "train.py"]),
    "line-hostfile": Row("status --nodes", "", {}, ["hostfile:/a\nb\x1b[31m"]),
    "line-option": Row("status", "no such", {}, ["--a\nb\x1b[31m"]),
    "line-command": Row("", "is not a command", {}, ["a\nb\x1b[31m"]),
    "line-run": Row("logs", "run", {}, ["a\nb\x1b[31m"]),
    "line-lease": Row("renew --for 1h", "lease", {}, ["a\nb\x1b[31m"]),
    "line-env": Row("launch --n 1", "--env", {}, ["--env", "a\nb\x1b[31m=1", "train.py"]),
    "line-target": Row("launch --n 1", "", {}, ["a\n:b\x1b[31m"]),
    "long-option": Row("status", "no such", {}, ["--" + "a" * 120_000]),
    "long-command": Row("", "is not a command", {}, ["a" * 120_000]),
    "long-model": Row("allocate --n 1", "--model", {}, ["--model", "[" + "a*" * 60_000]),
}  # fmt: skip
ANOTHER_CODE = {"line-lease": 5}
WHOLE = ("product-1", "config-0", "config-allocate-1", "number-variable-7", "bytes-command")


def files(folder: Path) -> list[int]:
    """Make every file that a row names; return descriptors that keep a FIFO's writing end open."""
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "held")
    with open(folder / "sparse", "wb") as file:
        file.truncate(10 << 30)
    for name, text in {
        "vast.toml": f'nodes = ["{VAST}"]',
        "deep.toml": "nodes = " + "[" * 100_000,
        "dotted.toml": ".".join(["a"] * 60_000) + " = 1",
        "number.toml": "max_connections = " + "9" * 5000,
        "hex.toml": "max_connections = 0x" + "f" * 50_000,
        "nul.toml": r'ssh_config = "/a\u0000b"',
        "nulfile.toml": r'nodes = ["hostfile:/a\u0000b"]',
        "nulclaims.toml": r'claims_dir = "/a\u0000b"',
        "control.toml": r'ssh_config = "/a\u001b[31m\nb"',
        "deep.json": '{"a":' * 100_000,
        "nul.json": r'[{"name": "a\u0000b", "host": "a\u0000b"}]',
        "large.json": large_rank_map(20_000),
        "wrong.json": large_rank_map(16_000),
        "blanks": "gpu01 slots" + " " * 900_000 + "x",
        "lines": "a\n" * 500_000,
        "aliases": f"Host {'a' * 60}b\nHost {' '.join('a' * 50 + str(n) for n in range(200))}\n",
        "itself": f"Host a\nInclude {folder}/itself\nInclude {folder}/itself\nInclude {folder}/itself\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    groups = folder / ".config" / "clustershell"
    groups.mkdir(parents=True)
    (groups / "groups.conf").write_text("[Main]\ndefault: own\nautodir: $CFGDIR/groups.d\n")
    (groups / "groups.d").mkdir()
    wide = "".join(f'  g{n:02d}: "@g{n + 1:02d},@g{n + 1:02d},x{n}"\n' for n in range(60))
    (groups / "groups.d" / "own.yaml").write_text(
        f'own:\n  vast: "{VAST}"\n  left: "@right,a"\n  right: "@left,b"\n{wide}  g60: a\n'
    )
    return [os.open(folder / "held", os.O_RDWR)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """This machine with every file that a row names: no row changes one."""
    found = Here(tmp_path_factory.mktemp("place"))
    found.gpus([Gpu(), Gpu()])
    held = files(found.folder)
    yield found
    for fd in held:
        os.close(fd)


def large_rank_map(n: int) -> str:
    """Return a rank map in which every rank is on a node that is not listed, and every node is listed once."""
    nodes = ",".join(
        f'{{"name":"n{i}","address":"n{i}","node_rank":{i},"local_world_size":1,"cuda_visible_devices":"0"}}'
        for i in range(n)
    )
    ranks = ",".join(f'{{"rank":{i},"node":"m{i}","local_rank":0,"index":0,"uuid":"GPU-{i}"}}' for i in range(n))
    head = f'"schema":1,"lease":null,"master_addr":"n0","master_port":0,"world_size":{n}'
    return f'{{{head},"nodes":[{nodes}],"ranks":[{ranks}]}}'


@pytest.fixture(scope="module")
def forked(place: Here) -> Iterator[Forked]:
    found = Forked(place)
    yield found
    found.close()


def command(place: Here, name: str) -> tuple[list[Bytes], dict[str, Bytes]]:
    """Return the arguments and the environment of one row of the table."""
    row = ROWS[name]
    line = row.line.replace("{}", str(place.folder)).split()
    env = {k: v.replace("{}", str(place.folder)) if isinstance(v, str) else v for k, v in row.env.items()}
    return [*line, *row.more], env


def test_a_pipe_is_read_as_a_file_is(here: Here) -> None:
    (here.folder / "map").write_text(json.dumps(MAP))
    here.config('nodes = ["gpu[01-02]"]\n')
    launch = shlex.join(here.command("launch", "--dry-run", "--json", "--device", "cpu", "--rank-map"))
    for words in ("<(sleep 0.3; cat map) train.py", "/dev/stdin train.py < map", "/dev/stdin train.py < <(cat map)"):
        done = subprocess.run(
            ["bash", "-c", f"cd {here.folder}; touch train.py; {launch} {words}"],
            env=here.env | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rank_map"]["world_size"] == 2


def test_a_config_in_a_pipe_is_read_once(here: Here) -> None:
    command = shlex.join(here.command("allocate", "--n", "1", "--dry-run"))
    for words in (f"GPUBOARD_CONFIG=<(cat conf) {command}", f"cat conf | GPUBOARD_CONFIG=/dev/stdin {command}"):
        done = subprocess.run(
            ["bash", "-c", f"cd {here.folder}; echo 'interval = 1' > conf; {words}"],
            env=here.env | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, "interval: must be a string" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("name", ROWS)
def test_errors_in_the_users_input_are_reported_at_once(place: Here, forked: Forked, name: str) -> None:
    row = ROWS[name]
    done = forked.measured(*command(place, name))
    assert done.returncode == ANOTHER_CODE.get(name, 2), done.stderr[-2000:]
    assert "this is a bug" not in done.stderr
    assert "Traceback" not in done.stderr
    assert row.words in done.stderr
    assert done.stderr.isprintable() or {c for c in done.stderr if not c.isprintable()} == {"\n"}
    assert len(done.stderr) < 10_000
    assert done.peak < PEAK
    assert done.seconds < SECONDS
    if row.line.startswith("allocate") and "--json" not in row.line:
        check_no_gpu_given(row.line, done)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_process_reports_the_same(place: Here, forked: Forked, name: str) -> None:
    args, env = command(place, name)
    done = place.run(*map(os.fsdecode, args), **{key: os.fsdecode(value) for key, value in env.items()})
    assert (done.returncode, done.stdout, done.stderr) == forked.measured(args, env)[:3]
