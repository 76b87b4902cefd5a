"""Who may talk to the board in a browser."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from gpuboard.board.web.auth import RequestGuard, check_public_url, new_token, token_of
from gpuboard.errors import GpuboardError, UsageError

TOKEN = "t" * 43


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        *((host, True) for host in ("127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000")),
        *((host, False) for host in ("127.0.0.1:8001", "127.0.0.1", "[::1]", "", None, "127.0.0.1:8000:8000")),
        *((host, False) for host in ("evil.example.org:8000", "127.0.0.1.evil.example.org:8000")),
        *((f"localhost:{port}", False) for port in ("", "²", "08000", "9" * 5000)),
    ],
)
def test_only_loopback_names_with_our_port_are_our_host(host: str | None, ours: bool) -> None:
    assert RequestGuard(TOKEN, 8000).is_our_host(host) is ours


def test_a_host_without_a_port_means_port_80() -> None:
    assert RequestGuard(TOKEN, 80).is_our_host("localhost")
    assert RequestGuard(TOKEN, 80).is_our_host("[::1]")


def test_a_socket_is_forwarded_from_any_port_but_not_from_any_name() -> None:
    guard = RequestGuard(TOKEN, None)
    assert guard.is_our_host("localhost:9123")
    assert not guard.is_our_host("evil.example.org:9123")
    assert not guard.is_our_host("localhost:" + "9" * 5000)
    assert not guard.is_our_host("localhost:٨٠٠٠")


def test_behind_a_proxy_its_name_is_ours_too() -> None:
    guard = RequestGuard(TOKEN, 8000, "https://gpu.example.org")
    assert guard.is_our_host("gpu.example.org")
    assert guard.is_our_host("127.0.0.1:8000")
    assert not guard.is_our_host("gpu.example.org:8000")
    assert guard.is_our_origin("https://gpu.example.org", "127.0.0.1:8000")
    assert guard.secure
    assert not RequestGuard(TOKEN, 8000).secure


@pytest.mark.parametrize(
    ("origin", "ours"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.0.0.1:8001", False),
        ("http://localhost:8000", False),  # the page and its websocket have one name
        ("https://127.0.0.1:8000", False),
        ("http://evil.example.org", False),
        ("null", False),
        ("-", False),
        ("", False),
        (None, False),
    ],
)
def test_only_our_own_page_may_open_a_websocket(origin: str | None, ours: bool) -> None:
    assert RequestGuard(TOKEN, 8000).is_our_origin(origin, "127.0.0.1:8000") is ours


def test_path_and_cookie_come_from_the_token_and_do_not_reveal_it() -> None:
    guard, again, other = RequestGuard(TOKEN, 8000), RequestGuard(TOKEN, 8000), RequestGuard("u" * 43, 8000)
    assert (guard.path, guard.cookie) == (again.path, again.cookie)
    assert len({guard.path.strip("/"), guard.cookie, other.path.strip("/"), other.cookie, TOKEN}) == 5


@pytest.mark.parametrize("value", ["", "t", "T" * 43, "t" * 44, "ü", "\udcff"])
def test_a_wrong_token_or_cookie_is_not_known(value: str) -> None:
    guard = RequestGuard(TOKEN, 8000)
    assert not guard.knows_token(value)
    assert not guard.knows_cookie(value)
    assert not guard.knows_cookie(None)
    assert not guard.knows_cookie(TOKEN)  # what is in the URL is not what is in the cookie
    assert not guard.knows_token(guard.cookie)
    assert guard.knows_token(TOKEN)
    assert guard.knows_cookie(guard.cookie)


@pytest.mark.parametrize(
    "url",
    ["gpu.example.org", "ftp://x", "https://", "https://u:p@x", "https://x/board", "https://x?y", "https://x#y", ""],
)
def test_a_public_url_is_scheme_and_host_alone(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url"):
        check_public_url(url)


def test_a_public_url_is_taken_without_its_slash() -> None:
    assert check_public_url("https://GPU.example.org/") == "https://gpu.example.org"


def test_a_token_file_is_made_private_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_of(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(file) == token
    assert len(token) >= 43
    assert token != new_token()


def test_a_token_file_that_cannot_be_written_is_not_left_empty(tmp_path: Path) -> None:
    file = tmp_path / "token"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # like a full disk
    try:
        with pytest.raises(GpuboardError, match=f"cannot write {file}: File too large"):
            token_of(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    token_of(file)
    file.chmod(mode)
    with pytest.raises(GpuboardError, match=f"belong to you and be private .*chmod 600 {file}"):
        token_of(file)


@pytest.mark.parametrize("text", ["", "short", "two words of a length that is long enough", "x" * 30 + "é"])
def test_a_weak_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(GpuboardError, match="at least 24"):
        token_of(file)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    token_of(tmp_path / "real")
    link.symlink_to(tmp_path / "real")
    os.mkfifo(pipe, 0o600)
    for file in (link, tmp_path, tmp_path / "no" / "folder", pipe):
        with pytest.raises(GpuboardError, match=str(file)) as refused:
            token_of(file)
        assert "chmod" not in str(refused.value)  # of a folder it would take more than the token away


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file of another user")
def test_another_users_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token_of(file)
    os.chown(file, 65534, 65534)
    with pytest.raises(GpuboardError, match="must belong to you"):
        token_of(file)
