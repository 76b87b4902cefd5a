"""paramiko's own reading of ssh_config without an ssh program; single-flight logins, and retries of dropped ones."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from gpuboard.transport.base import TransportError
from gpuboard.transport.ssh.paramiko_login import OwnConfig
from gpuboard.transport.ssh.single_flight import Dropped, SingleFlight, retry_dropped
from tests.waiting import until


def test_ssh_config_is_read_without_ssh(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host gpu*\n  HostName %h.example\n  Port 2222\n  ProxyJump one,two\n  IdentityFile ~/.ssh/mine\n"
        "  UserKnownHostsFile ~/a ~/b\nHost *\n  User bob\n  ProxyCommand none\n  ServerAliveInterval 7\n"
    )
    found = OwnConfig(str(config)).get("gpu01")
    assert (found.hostname, found.port, found.user, found.jumps) == ("gpu01.example", 2222, "bob", ("one", "two"))
    assert (found.key_name, found.proxy_command, found.count("serveraliveinterval")) == ("gpu01.example", None, 7)
    home = str(Path.home())
    assert found.all("identityfile") == [f"{home}/.ssh/mine"]
    assert (found.known_hosts() or [])[:2] == [f"{home}/a", f"{home}/b"]
    other = OwnConfig(str(config)).get("carol@gpu02:99")
    assert (other.user, other.port, other.name) == ("carol", 99, "gpu02")


def test_what_paramiko_cannot_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host gpu01\n  Port 99\n")
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\n")
    with pytest.raises(TransportError, match="has an Include, which paramiko does not read; install ssh"):
        OwnConfig(str(tmp_path / "config")).get("gpu01")
    with pytest.raises(TransportError, match=r"ssh_config: .*/none: .*No such file"):
        OwnConfig(str(tmp_path / "none")).get("gpu01")
    (tmp_path / "bad").write_text("???\n")
    with pytest.raises(TransportError, match="Unparsable line"):
        OwnConfig(str(tmp_path / "bad")).get("gpu01")


def test_one_thread_works_and_the_others_share_its_failure() -> None:
    flights, started, go, tries = SingleFlight(), threading.Event(), threading.Event(), []

    def make() -> str:
        tries.append(1)
        started.set()
        assert go.wait(60)
        raise TransportError("timeout", "no answer")

    found: list[str] = []

    def log_in() -> None:
        try:
            flights.run("jump", lambda: None, make)
        except TransportError as error:
            found.append(error.words)

    first = threading.Thread(target=log_in)
    first.start()
    assert started.wait(60)
    rest = [threading.Thread(target=log_in) for _ in range(5)]
    for thread in rest:
        thread.start()

    def waiting() -> int:
        frames = sys._current_frames()
        inner = [frames[thread.ident] for thread in rest if thread.ident in frames]
        return sum(one.f_code is SingleFlight.run.__code__ and "seen" in one.f_locals for one in inner)

    until(lambda: waiting() == 5, "the others wait")
    go.set()
    for thread in (first, *rest):
        thread.join(60)
    assert (len(tries), found) == (1, ["no answer"] * 6)
    log_in()  # a later call tries again
    assert len(tries) == 2


def test_a_dropped_login_is_retried_until_the_timeout() -> None:
    tries: list[int] = []

    def attempt() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise Dropped("lost", "busy")
        return 7

    assert retry_dropped(attempt, 60.0, threading.Event()) == 7
    tries.clear()
    with pytest.raises(Dropped):
        retry_dropped(attempt, 0.1, threading.Event())
    assert len(tries) == 1
    closed = threading.Event()
    closed.set()
    with pytest.raises(Dropped):
        retry_dropped(attempt, 10.0, closed)
