"""Names as ssh itself resolves them: Include, Match, cached answers."""

from __future__ import annotations

import base64
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from asyncssh import SSHClientConnectionOptions
from asyncssh.config import SSHClientConfig

from gpuboard.transport.base import TransportError
from gpuboard.transport.command import run
from gpuboard.transport.ssh.asyncssh_config import Blocks, HostConfig
from gpuboard.transport.ssh.paramiko_login import OwnConfig
from gpuboard.transport.ssh.resolve import Resolver, jump_chain, local_user, split
from tests.calls import calls_of
from tests.waiting import alive, until

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (openssh-client)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ssh_config whose Includes end in blocks for other hosts, in files that a folder lists in another order."""
    (tmp_path / "d").mkdir()
    for name in ("9", "5", "1", "7"):
        (tmp_path / "d" / f"{name}.conf").write_text(f"Host gpu*\n  User u{name}\n  ProxyJump j{name}\n")
    (tmp_path / "keys").write_text("Host gpu*\n  IdentityFile /keys/%h\n")
    (tmp_path / "ends").write_text("Host elsewhere\n  User nobody\n  ProxyJump nowhere\n")
    (tmp_path / "config").write_text(
        f"Include {tmp_path}/ends\nInclude {tmp_path}/keys\n"
        "Host gpu01\n  HostName 10.0.0.1\n  Port 2222\n  HostKeyAlias %n\n"
        "Host plain\n  ProxyCommand nc -q 1 %h %p\n"
        f"Match host 10.* user u1\n  ServerAliveInterval 9\n"
        f"Host *\n  Include {tmp_path}/d/*.conf\nHost gpu*\n  ProxyJump last\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", ["gpu01", "gpu02", "elsewhere", "plain", "carol@gpu01:77"])
def test_includes_are_read_as_ssh_reads_them(folder: Path, name: str) -> None:
    user, host, port = split(name)
    flags = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    command = ["ssh", "-F", str(folder / "config"), *flags, "-G", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
    said = dict(line.split(" ", 1) for line in reversed(done.stdout.splitlines()) if " " in line)
    found = HostConfig(str(folder / "config"), ["/none"]).host(name)
    assert (found.user, str(found.port), ",".join(found.jumps)) == (
        said["user"], said["port"], said.get("proxyjump", "")
    )  # fmt: skip
    assert found.options["username"] == said["user"]
    assert found.options.get("keepalive_interval", 0) == int(said["serveraliveinterval"])
    if host == "gpu01":
        with found.configuration() as more:  # asyncssh takes the rest from it
            assert (found.name, more["options"].config.get("Hostname")) == ("gpu01", "10.0.0.1")
        assert (found.key_name, found.user) == ("gpu01", user or "u1")
        keys = Resolver(str(folder / "config")).get(name).all("identityfile")
        assert keys == ["/keys/10.0.0.1"]


def test_asyncssh_alone_takes_included_files_in_another_order(folder: Path) -> None:
    """When this fails, asyncssh sorts included files, and resolve.py is not needed for them."""
    users = set()
    for names in (("1", "2"), ("2", "1")):
        for file in (folder / "d").iterdir():
            file.unlink()
        for name in names:
            (folder / "d" / f"{name}.conf").write_text(f"Host gpu*\n  User u{name}\n")
            listed = [entry.name for entry in os.scandir(folder / "d")]
        config = SSHClientConfig.load(None, [str(folder / "config")], False, False, False, "me", (), "gpu02", ())
        users.add((config.get("User"), listed[0][0]))
    if all(first == "1" for _, first in users):
        pytest.skip("this file system lists a folder in the order of its names")
    assert ("u2", "2") in users


def test_files_that_asyncssh_cannot_read_are_not_given_to_it(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host gpu\n  HostName 10.0.0.9\n  HostKeyAlias other\n")
    config = tmp_path / "config"
    config.write_text(f"Host gpu\n  User y\n  ServerAliveInterval 1m\nInclude {tmp_path}/more\n")
    with pytest.raises(ValueError, match="Invalid ServerAliveInterval integer value: 1m"):
        SSHClientConfig.load(None, [str(config)], False, False, False, "me", (), "gpu", ())
    found = HostConfig(str(config), ["/none"]).host("gpu")
    with found.configuration() as more:
        assert more == {"config": None}
    assert (found.name, found.user, found.key_name) == ("10.0.0.9", "y", "other")
    assert found.options["keepalive_interval"] == 60
    assert found.options["host_key_alias"] == "other"


def test_keys_agent_and_addresses_are_those_of_an_included_file(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        words = ["-t", "ed25519", "-a", "1", "-N", "secret", "-f", str(tmp_path / name)]
        subprocess.run(["ssh-keygen", "-q", *words], check=True)
    public = base64.b64decode((tmp_path / "mine.pub").read_text().split()[1])
    (tmp_path / "mine.pub").unlink()
    (tmp_path / "more").write_text(
        f"Host gpu\n  HostName 10.0.0.9\n  IdentitiesOnly yes\n  IdentityAgent {tmp_path}/%h.sock\n"
        f"  AddressFamily inet\n  BindAddress 10.0.0.1\n  IdentityFile {tmp_path}/mine\n"
        f"Host off\n  HostName 10.0.0.8\n  IdentitiesOnly yes\n  IdentityAgent none\n  IdentityFile {tmp_path}/gone\n"
        f"Host elsewhere\n  HostName 10.0.0.7\n  IdentityFile {tmp_path}/other\n"
    )
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\nHost *\n  ServerAliveInterval 1m\n")
    hosts = HostConfig(str(tmp_path / "config"), ["/none"])
    found = {}
    for name in ("gpu", "off", "elsewhere"):
        host = hosts.host(name)
        with host.configuration() as more:
            options = SSHClientConnectionOptions(**more, **host.options)
        agent = options.agent_path if "agent_path" in host.options else None
        found[name] = (agent, options.agent_identities, options.family, options.local_addr)
    assert found == {
        "gpu": (f"{tmp_path}/10.0.0.9.sock", [public], socket.AF_INET, ("10.0.0.1", 0)),
        "off": ("", [b""], socket.AF_UNSPEC, None),
        "elsewhere": (None, None, socket.AF_UNSPEC, None),
    }


BLOCKS = """\
User first
Include {folder}/shared/*.conf
Host gpu01 gpu02
  Port 1001
Host=GPU03
  Port 1003
Host gpu0*,!gpu04
  Compression yes
Host "gpu04" # the old one
  Port 1004
  Include {folder}/more
Host !gpu05 gpu*
  ConnectTimeout 7
	HOST   gpu05  10.0.0.5 fe80::5
  Port 1005
  HostName %h.example
Match host gpu06
  Port 1006
# two\u2028Host *\x0cHost *\r\
  Compression no
Host *
  Port 1999
  ServerAliveInterval 9
"""


@pytest.mark.parametrize(
    "name", ["gpu01", "gpu02", "GPU03", "gpu03", "gpu04", "gpu05", "10.0.0.5", "gpu06", "fe80::5", "x"]
)
def test_a_host_has_the_same_options_by_the_blocks_that_concern_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "one.conf").write_text("TCPKeepAlive no\nHost gpu02\n  User second\nHost x\n  Port 1\n")
    (tmp_path / "more").write_text("Host gpu04\n  BindAddress 10.0.0.4\nHost gpu01\n  BindAddress 10.0.0.1\n")
    config = tmp_path / "config"
    config.write_text(BLOCKS.format(folder=tmp_path) + "".join(f"Host other{n}\n  Port {n}\n" for n in range(1, 200)))
    whole = SSHClientConfig.load(None, [str(config)], False, False, False, "me", (), name, ())
    with Blocks([str(config)]).of(name).files() as files:
        text = "".join(Path(file).read_text() for file in files)
        found = SSHClientConfig.load(None, files, False, False, False, "me", (), name, ())
    assert found.get_options(reload=False) == whole.get_options(reload=False)
    assert "Host other" not in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("line", ["Match final host gpu01.lab", "CanonicalizeHostname yes"])
def test_asyncssh_reads_it_again_where_the_final_name_decides(line: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"{line}\nUser late\nHost *\n  Port 99\n")
    with HostConfig(str(tmp_path / "config"), ["/none"]).host("gpu01").configuration() as more:
        options = SSHClientConnectionOptions(**more, host="gpu01")
        options.update(host="gpu01.lab", reload=True, canonical=True, final=True)  # as in a connection's start
    assert (options.port, options.username) == (99, "late")


def test_without_files_in_memory_asyncssh_reads_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("Host gpu01\n  Port 1001\n")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    hosts = HostConfig(str(tmp_path / "config"), ["/none"])
    assert (hosts.host("gpu01").port, hosts.host("gpu02").port) == (1001, 22)


def test_a_configuration_that_changes_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host gpu01\n  Port 1001\n")
    hosts = HostConfig(str(tmp_path / "config"), ["/none"])
    assert hosts.host("gpu01").port == 1001
    (tmp_path / "config").write_text("Host gpu01\n  Port 1002\n")
    until(lambda: hosts.host("gpu01").port == 1002)


def test_an_error_in_a_configuration_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host other\n  Port 1\n\nHost gpu01\n  Port many\n")
    hosts = HostConfig(str(tmp_path / "config"), ["/none"])
    with pytest.raises(ValueError, match=f"{tmp_path}/config line 5: Invalid Port integer value: many"):
        hosts.host("gpu01")
    assert hosts.host("other").port == 1
    with pytest.raises(FileNotFoundError):
        HostConfig(str(tmp_path / "missing"), ["/none"]).host("gpu01")


def test_ssh_is_not_run_for_plain_files(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a*\n  Port 99\n")
    with calls_of(run) as calls:
        assert HostConfig(str(tmp_path / "config"), ["/none"]).host("abc").port == 99
    assert calls == []


def test_answers_are_cached_until_a_file_changes(folder: Path) -> None:
    kept = folder / "state" / "answers.json"
    first = Resolver(str(folder / "config"), cache=kept)
    with calls_of(run) as calls:
        assert first.get("gpu01").user == "u1"
    assert len(calls) == 1
    first.save()
    assert kept.stat().st_mode & 0o777 == 0o600
    with calls_of(run) as calls:
        assert Resolver(str(folder / "config"), cache=kept).get("gpu01").user == "u1"
    assert calls == []
    (folder / "d" / "0.conf").write_text("Host gpu01\n  User new\n")
    assert Resolver(str(folder / "config"), cache=kept).get("gpu01").user == "new"
    kept.write_text("{nonsense")
    assert Resolver(str(folder / "config"), cache=kept).get("gpu01").user == "new"


def test_a_running_resolver_detects_changes(folder: Path) -> None:
    asked = Resolver(str(folder / "config"), check_s=0.0)
    assert asked.get("plain").port == 22
    with (folder / "config").open("a") as file:
        file.write("Host plain\n  Port 2200\n")
    assert asked.get("plain").port == 2200


def test_nothing_is_cached_where_a_command_decides(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    config = tmp_path / "config"
    config.write_text(f'Match exec "test -e {flag}"\n  Port 99\nHost *\n  Port 22\n')
    kept = tmp_path / "answers.json"
    asked = Resolver(str(config), cache=kept)
    assert asked.get("gpu01").port == 22
    flag.write_text("")
    assert asked.get("gpu01").port == 99
    asked.save()
    assert not kept.exists()


def test_errors_of_ssh_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\n  Fooo bar\n")
    with pytest.raises(TransportError, match=r"ssh_config: .*config: line 2: Bad configuration option: fooo"):
        Resolver(str(tmp_path / "config")).get("gpu01")
    with pytest.raises(TransportError, match=r"Can't open user config file .*none: No such file"):
        Resolver(str(tmp_path / "none")).get("gpu01")


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """An ssh_config with a command that hangs, which writes its pid to the file ``pid`` beside it."""
    (tmp_path / "config").write_text(f'Match exec "echo $$ >>{tmp_path}/pid; sleep 600; true"\n  Port 99\n')
    return tmp_path / "config"


def gone(config: Path) -> bool:
    pids = (config.parent / "pid").read_text().split()
    return bool(pids) and not any(map(alive, map(int, pids)))


def test_a_command_that_hangs_times_out_and_is_killed(hanging: Path) -> None:
    started = hanging.parent / "pid"
    for timeout_s in (0.4, 5.0, 30.0):  # until the command has started
        words = f"`ssh -G gpu01` did not respond within {timeout_s:.0f} s; does a `Match exec`"
        with pytest.raises(TransportError, match=words):
            Resolver(str(hanging), timeout_s=timeout_s).get("gpu01")
        if started.exists() and started.read_text():
            break
    until(lambda: gone(hanging), "the command has ended")


def test_a_command_that_hangs_is_killed_on_close(hanging: Path) -> None:
    resolver = Resolver(str(hanging), timeout_s=600.0)
    with ThreadPoolExecutor() as pool:
        query = pool.submit(resolver.get, "gpu01")
        until(lambda: (hanging.parent / "pid").exists() and (hanging.parent / "pid").read_text(), "it has started")
        resolver.close()
        until(lambda: gone(hanging), "the command has ended")
        assert isinstance(query.exception(60), TransportError)


@pytest.fixture
def no_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with a uid that has no passwd entry."""
    for name in ("LOGNAME", "USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    local_user.cache_clear()
    yield
    local_user.cache_clear()


@pytest.mark.parametrize("config", ["Port 99\n", "Match all\n"])  # asyncssh reads the first one itself
def test_the_default_user_is_that_of_the_uid(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "mallory")
    (tmp_path / "config").write_text(config)
    here = pwd.getpwuid(os.getuid()).pw_name
    host = HostConfig(str(tmp_path / "config"), ["/none"]).host("gpu01")
    assert (host.user, host.options["username"]) == (here, here)
    assert Resolver(str(tmp_path / "config")).get("gpu01").expand("%u %r") == f"{here} {here}"
    assert OwnConfig(str(tmp_path / "config")).get("gpu01").user == here


@pytest.mark.usefixtures("no_name")
def test_a_uid_without_a_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Port 99\n")
    for find in (HostConfig(str(tmp_path / "config"), []).host, OwnConfig(str(tmp_path / "config")).get):
        with pytest.raises(TransportError, match="uid 54321 has no user name on this machine; add one to"):
            find("gpu01")


@pytest.mark.usefixtures("no_name")
def test_a_uid_without_a_name_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "alice")
    (tmp_path / "config").write_text("Port 99\n")
    assert HostConfig(str(tmp_path / "config"), []).host("gpu01").user == "alice"


def test_a_cycle_of_jump_hosts_is_reported() -> None:
    with pytest.raises(TransportError, match="ProxyJump of a is a loop"):
        jump_chain("a", ("b",), {"b": ("c",), "c": ("b",)}.__getitem__)
    assert jump_chain("a", ("b", "x"), {"b": ("c",), "c": ()}.__getitem__) == ("c", "b", "x")
