"""Nodes from hostfiles, ssh_config, Slurm and ClusterShell's groups: what they contain, and what is refused."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuboard.cluster.inventory.nodes import Node, expand_names, inventory
from gpuboard.cluster.inventory.sources import look_up
from gpuboard.config import Settings, load
from gpuboard.errors import ConfigError, GpuboardError, UsageError
from gpuboard.model.schedule import Gres, Schedule, SchedulerNode, Seen

HERE = os.uname().nodename.partition(".")[0]


def hosts(tmp_path: Path, text: str) -> list[tuple[str, str | None]]:
    """Return name and ssh host of the nodes of a hostfile."""
    file = tmp_path / "hosts"
    file.write_text(text)
    return [(node.name, node.host) for node in inventory(Settings(), [f"hostfile:{file}"])]


@pytest.mark.parametrize(
    "text",
    [
        "gpu01\ngpu02\n",
        "gpu01 slots=4 max_slots=8\ngpu02 slots=2",
        "# the cluster\n\ngpu01 slots = 4  # four\n  gpu02\tmax-slots=8 // eight\r\n",
        "gpu01\ngpu01\ngpu02\ngpu01\n",  # a slot a line
        "gpu01:4\ngpu02:2 binding=user:0,1 ifname=eth0\n",
        "\ufeffgpu01 slots=4\r\ngpu02 slots=2\r\n",  # as editors on Windows write it
        "gpu01 cpu=2 sockets=1 cores_per_socket=8 cpu_set=0-7\ngpu02 count=1",
    ],
)
def test_hostfiles_of_open_mpi_deepspeed_and_mpich_name_the_same_nodes(tmp_path: Path, text: str) -> None:
    assert hosts(tmp_path, text) == [("gpu01", "gpu01"), ("gpu02", "gpu02")]


def test_a_hostfile_may_name_users_and_this_machine(tmp_path: Path) -> None:
    text = f"alice@gpu01 slots=4\ngpu02 username=bob\n{HERE} slots=2\n10.1.2.3\n{getpass.getuser()}@localhost\n"
    assert hosts(tmp_path, text) == [
        ("gpu01", "alice@gpu01"), ("gpu02", "bob@gpu02"), (HERE, None), ("10.1.2.3", "10.1.2.3"), ("localhost", None),
    ]  # fmt: skip
    assert hosts(tmp_path, f"somebody-else@{HERE}") == [(HERE, f"somebody-else@{HERE}")]
    assert [Node("a", "alice@a").address, Node("a", "a").address, Node("a", None).address] == ["a", "a", "a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu01\n+n0\n", ":2: '+n0' is relative to mpirun's list of hosts; write the host's name"),
        ("+e:2", ":1: '+e:2' is relative to"),
        ("gpu01\n\n^gpu02\n", ":3: '^gpu02' excludes a host for mpirun only; remove that host's lines"),
        ("gpu01 slots", ":1: 'slots' cannot be read; a line is: gpu01 slots=4 max_slots=8"),
        ("gpu01 slot=4", ":1: 'slot=4' cannot be read"),
        ("gpu01 slots=four", ":1: 'slots=four' cannot be read"),
        ("gpu01 4 all.q@gpu01 UNDEFINED", ":1: '4' cannot be read"),
        ("rank 0=gpu01 slot=0", ":1: '0=gpu01' cannot be read"),
        ("gpu[01-04]", ":1: 'gpu[01-04]' cannot be a node's name: letters"),
        ("-oProxyCommand=x", ":1: '-oProxyCommand=x' cannot be a node's name"),
        ("2001:db8::1", ":1: '2001:db8::1' cannot be a node's name"),
        ("gpu01:x", ":1: 'gpu01:x' cannot be a node's name"),
        ("gpu01\x1b[2J", r":1: 'gpu01\x1b[2J' cannot be a node's name"),
        ("@gpu01", ":1: '@gpu01' has no user before its @"),
        ("-l@gpu01", ":1: '-l' cannot be a user's name"),
        ("a@b@gpu01", ":1: 'a@b' cannot be a user's name"),
        ("gpu01\nalice@gpu01", ":2: gpu01 is named for different users: without a user and alice"),
        ("# none\n\n", ": no host in this hostfile; a line is: gpu01 slots=4"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        hosts(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/hosts{words}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hostfile:", "hostfile: names no file; write hostfile:PATH"),
        ("hostfile:/no/such/file", "/no/such/file: cannot be read: No such file or directory"),
        ("hostfile:/usr", "/usr: cannot be read: Is a directory"),
        ("hostfile:/dev/zero", "/dev/zero: cannot be read: not a regular file"),
        ("ssh_config:", "ssh_config: names no hosts; write ssh_config:gpu* for those of your ssh config"),
        ("ssh_config:*", "/no/config: cannot be read: No such file or directory"),
        ("slurm:", "'slurm:': no Slurm found on this host"),
        ("slurm:gpu", "'slurm:gpu': no Slurm found on this host"),
        ("gpu01,hostfile:x", "'gpu01,hostfile:x': hostfile: must be an entry of its own in nodes, or a --nodes of"),
        ("gpu[1-9]!slurm:gpu", "slurm: must be an entry of its own"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_usage_error(source: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        inventory(Settings(ssh_config="/no/config"), [source])
    assert words in str(caught.value)


def test_a_hostfile_that_is_not_text_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"gpu01\n\xff\n")
    with pytest.raises(UsageError, match="cannot be read: it is not UTF-8"):
        inventory(Settings(), [f"hostfile:{file}"])


def test_sources_nodesets_and_the_configuration_are_combined(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("gpu03\nalice@gpu01\n")
    configured = Settings(nodes=["gpu[01-02]", f"hostfile:{file}"])
    assert [(node.name, node.host) for node in inventory(configured)] == [
        ("gpu01", "alice@gpu01"), ("gpu02", "gpu02"), ("gpu03", "gpu03"),
    ]  # fmt: skip
    assert [node.name for node in inventory(Settings(), ["gpu9", f"hostfile:{file}", "gpu[1-3]!gpu2"])] == [
        "gpu9", "gpu03", "gpu01", "gpu1", "gpu3",
    ]  # fmt: skip
    assert inventory(configured, [f"hostfile:{file}"]) == [Node("gpu03", "gpu03"), Node("gpu01", "alice@gpu01")]
    with pytest.raises(UsageError, match="no node 'gpu03' among the configured nodes: gpu02"):
        inventory(Settings(nodes=["gpu02"]), [f"hostfile:{file}"])
    with pytest.raises(UsageError, match="is not allowed here; write a nodeset"):
        expand_names([f"hostfile:{file}"])


def test_a_hostfile_in_a_config_file_needs_an_absolute_path(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('nodes = ["hostfile:hosts"]\n')
    with pytest.raises(ConfigError, match=r"config\.toml: nodes: 'hostfile:hosts' must be an absolute path"):
        load({}, {}, config)
    for path in ("/srv/hosts", "~/hosts"):
        config.write_text(f'nodes = ["hostfile:{path}"]\n')
        assert load({}, {}, config).settings.nodes == [f"hostfile:{path}"]
    assert load({"GPUBOARD_NODES": "hostfile:hosts", "HOME": "/"}, {}).settings.nodes == ["hostfile:hosts"]


@settings(deadline=None)
@given(st.text(max_size=200))
@example("gpu01 slots=\x00")
@example("@")
@example(":4")
def test_no_text_makes_a_hostfile_raise_anything_but_usage_errors(text: str) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpuboard-hosts-{os.getpid()}"
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        nodes = inventory(Settings(), [f"hostfile:{path}"])
    except (UsageError, UnicodeEncodeError):
        return
    finally:
        path.unlink()
    assert [expand_names([node.name]) for node in nodes] == [[node.name] for node in nodes]


# ---- ssh_config


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function from a pattern to the names it finds in ~/.ssh/config, which the test writes."""
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda patterns: [node.name for node in inventory(Settings(), [f"ssh_config:{patterns}"])]


CONFIG = """
# a comment with Host gpu98
Host *
    ServerAliveInterval 15
Host gpu01 gpu02 "gpu03" big1   # Host gpu99
    User alice
host=login
Host gpu1? !gpu13 gpu13 GPU-x
    HostName %h.example.org
Match exec "test -e /x"
    Port 23
Include lab/*.conf ~/more
    HostName gpu77
"""


def test_aliases_of_ssh_config_and_its_includes_are_nodes(tmp_path: Path, ssh: Callable[[str], list[str]]) -> None:
    folder = tmp_path / ".ssh"
    (folder / "config").write_text(CONFIG)
    (folder / "lab").mkdir()
    (folder / "lab" / "b.conf").write_text("HOST gpu20\n  Port 2222\n")
    (folder / "lab" / "a.conf").write_text("Host gpu10 *.lab\n  Include nested\n")
    (folder / "nested").write_text("Host x.lab gpu10 gpu11\n")  # read for gpu10 and *.lab alone
    (tmp_path / "more").write_text("Host gpu02 gpu30\n")
    assert ssh("gpu*") == ["gpu01", "gpu02", "gpu03", "gpu10", "gpu20", "gpu30"]
    assert ssh("gpu0?,big*,!gpu02") == ["gpu01", "gpu03", "big1"]
    assert ssh("*.lab") == ["x.lab"]
    assert ssh("login") == ["login"]
    with pytest.raises(UsageError, match=r"ssh_config:gpu9\*: no matching Host alias in ~/.ssh/config"):
        ssh("gpu9*")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('Host gpu01\nHost "gpu02', "/.ssh/config:2: a quote is not closed"),
        ("Include config", "Include is nested deeper than 16 files; is there a cycle"),
        ("Host gpu01/x", "in ~/.ssh/config: 'gpu01/x' cannot be a node's name"),
    ],
)
def test_an_ssh_config_that_cannot_be_read_is_named(
    tmp_path: Path, ssh: Callable[[str], list[str]], text: str, words: str
) -> None:
    (tmp_path / ".ssh" / "config").write_text(text)
    with pytest.raises(UsageError) as caught:
        ssh("*")
    assert words in str(caught.value).replace(f"{tmp_path}/", "/")


# ---- Slurm


def slurm(*nodes: SchedulerNode, error: str | None = None) -> Callable[[], Seen]:
    schedule = Schedule(1.0, "lab", {node.name: node for node in nodes})
    return lambda: Seen(schedule if nodes else None, 1.0, error)


def slurm_node(name: str, *partitions: str, gpus: int = 8) -> SchedulerNode:
    given = (Gres("h100", gpus),) if gpus else ()
    return SchedulerNode(name, name, name, "idle", gpus=given, partitions=partitions)


FOUR = slurm(
    slurm_node("gpu02", "gpu", "all"), slurm_node("gpu01", "gpu", "all"), slurm_node("big1", "big", "all"),
    slurm_node("cpu1", "cpu", "all", gpus=0),
)  # fmt: skip


def test_slurms_nodes_with_gpus_by_partition() -> None:
    def names(source: str) -> list[str]:
        return [entry.name for entry in look_up(source, "", FOUR)]

    assert names("slurm:") == ["gpu02", "gpu01", "big1"]
    assert names("slurm:gpu") == ["gpu02", "gpu01"]
    assert names("slurm:gpu,big") == names("slurm:all") == ["gpu02", "gpu01", "big1"]
    with pytest.raises(
        UsageError, match="'slurm:gup': no partition 'gup' has nodes; Slurm's partitions: all, big, cpu, gpu"
    ):
        names("slurm:gup")
    with pytest.raises(UsageError, match="'slurm:cpu': Slurm has no such node with GPUs"):
        names("slurm:cpu")


def test_without_named_or_configured_nodes_slurms_are_used() -> None:
    assert [node.name for node in inventory(Settings(), schedule=FOUR)] == ["gpu02", "gpu01", "big1"]
    assert inventory(Settings(), schedule=slurm(slurm_node("cpu1", gpus=0))) == [Node(HERE, None)]
    with pytest.raises(GpuboardError, match="could not get the nodes from Slurm: no route to slurmctld; list nodes"):
        inventory(Settings(), schedule=slurm(error="no route to slurmctld"))
    with pytest.raises(UsageError, match="in Slurm: '-x' cannot be a node's name"):
        inventory(Settings(), schedule=slurm(slurm_node("-x")))


def test_slurm_is_not_queried_for_named_nodes() -> None:
    def never() -> Seen:
        raise AssertionError("Slurm was asked")

    assert inventory(Settings(nodes=["gpu01"]), schedule=never) == [Node("gpu01", "gpu01")]
    assert inventory(Settings(), ["gpu01"], never) == [Node("gpu01", "gpu01")]


# ---- ClusterShell's groups


def test_groups_of_clustershell_are_nodesets(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "clustershell"
    (folder / "groups.d").mkdir(parents=True)
    (folder / "groups.conf").write_text("[Main]\ndefault: lab\nautodir: $CFGDIR/groups.d\n")
    (folder / "groups.d" / "lab.yaml").write_text("lab: {rack3: 'gpu[09-11]', big: big1}\nsite: {old: '@lab:big,x'}\n")
    code = (
        "import sys; from gpuboard.cluster.inventory.nodes import expand_names\n"
        "for text in sys.argv[1:]: print(*expand_names([text]))"
    )
    words = ["@rack3", "@*", "@rack3!gpu10", "@rack3,gpu01", "@site:old"]
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, env=env)
    assert (done.stdout.splitlines(), done.stderr) == (
        ["gpu09 gpu10 gpu11", "big1 gpu09 gpu10 gpu11", "gpu09 gpu11", "gpu01 gpu09 gpu10 gpu11", "big1 x"],
        "",
    )
