"""stderr of OpenSSH 7.4 to 10 → kind, message and remedy."""

from __future__ import annotations

import pytest

from gpuboard.transport.ssh.errors import InteractionRequired
from gpuboard.transport.ssh.openssh_errors import explain_login, explain_ssh
from gpuboard.transport.ssh.resolve import Resolved
from gpuboard.transport.ssh.single_flight import Dropped

HOST = Resolved("gpu01", {"hostname": ["10.0.0.1"], "user": ["alice"], "port": ["2222"]})
PROXIED = Resolved("gpu01", {"hostname": ["10.0.0.1"], "user": ["alice"], "proxycommand": ["nc \x1b[31m %h %p"]})
KEY = "debug1: Server host key: ssh-ed25519 SHA256:abc\r\n"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused\r", "refused", "ssh: connection refused"),
        ("ssh: connect to host gpu01 port 22: No route to host", "unreachable", "ssh: no route to the host"),
        ("ssh: connect to host ::1 port 22: Network is unreachable", "unreachable", "ssh: the network is unreachable"),
        ("ssh: connect to host a port 22: Connection timed out", "timeout", "ssh: no answer in 5 s"),
        ("ssh: connect to host a port 22: Invalid argument", "unreachable", "ssh: invalid argument"),
        ("debug1: x\nConnection timed out during banner exchange", "timeout", "ssh: no answer in 5 s"),
        ("Connection to 10.0.0.1 port 22 timed out", "timeout", "ssh: no answer in 5 s"),
        ("ssh: Could not resolve hostname gpu01: Name or service not known", "resolve",
         "ssh: the name 'gpu01' cannot be resolved"),
        (KEY + "No ED25519 host key is known for gpu01 and you have requested strict checking.\r\n"
         "Host key verification failed.\r\n", "host-key",
         "ssh: the host key of gpu01 is unknown (ssh-ed25519 SHA256:abc)"),
        (KEY + "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\r\nHost key verification failed.\r\n", "host-key",
         "ssh: the host key of gpu01 has CHANGED (ssh-ed25519 SHA256:abc): a new installation, or an attack"),
        (KEY + "@ WARNING: REVOKED HOST KEY DETECTED! @\r\nHost key verification failed.\r\n", "host-key",
         "ssh: the host key of gpu01 is revoked"),
        ("alice@10.0.0.1: Permission denied (publickey).", "auth",
         "ssh: alice@gpu01 was refused: no key was accepted"),
        ("Permission denied (publickey,gssapi-with-mic,password).", "auth",
         "ssh: alice@gpu01 was refused: the server asks for a password or a code"),
        ('Load key "/home/a/.ssh/id_old": Permission denied\r\nalice@10.0.0.1: Permission denied (publickey,password).',
         "auth", "ssh: alice@gpu01 was refused: the server asks for a password or a code"),
        ('Load key "/home/a/.ssh/id_old": Permission denied\r\nConnection closed by 10.0.0.1 port 22', "lost",
         "ssh: connection closed by 10.0.0.1 port 22, while logging in"),
        ("Permission denied, please try again.", "auth", "ssh: alice@gpu01 was refused: no key was accepted"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\r\nDisconnected from 10.0.0.1",
         "auth", "ssh: alice@gpu01 was refused: too many keys were tried"),
        ("kex_exchange_identification: Connection closed by remote host\r\nConnection closed by 10.0.0.1 port 22",
         "lost",
         "ssh: connection closed by remote host, while logging in"),
        ("ssh_exchange_identification: read: Connection reset by peer", "lost",
         "ssh: read: Connection reset by peer, while logging in"),
        ("Connection closed by 10.0.0.1 port 22", "lost",
         "ssh: connection closed by 10.0.0.1 port 22, while logging in"),
        ("channel 0: open failed: connect failed: Connection refused\r\nstdio forwarding failed", "unreachable",
         "ssh: gpu01 cannot be reached through hop: connect failed: Connection refused"),
        ("Unable to negotiate with 10.0.0.1 port 22: no matching cipher found. Their offer: 3des-cbc", "lost",
         "ssh: Unable to negotiate with 10.0.0.1 port 22: no matching cipher found. Their offer: 3des-cbc"),
        ("/home/a/.ssh/config: line 3: Bad configuration option: foo\r\nx: terminating, 1 bad configuration options",
         "resolve", "ssh_config: /home/a/.ssh/config: line 3: Bad configuration option: foo"),
        ("Bad owner or permissions on /home/a/.ssh/config", "resolve",
         "ssh_config: Bad owner or permissions on /home/a/.ssh/config"),
        ("some \x1b[31mother\x1b[0m words", "lost", "ssh: some [31mother[0m words"),
        ("", "lost", "ssh: disconnected while logging in"),
    ],
)  # fmt: skip
def test_failed_logins_are_explained(text: str, kind: str, words: str) -> None:
    found = explain_login(text, HOST, hop="hop", timeout_s=5.0)
    assert (found.kind, found.words) == (kind, words)
    assert isinstance(found, Dropped) == words.endswith(", while logging in")
    assert isinstance(found, InteractionRequired) == ("password" in words)


def test_a_proxy_command_without_a_connection_is_shown() -> None:
    text = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535"
    found = explain_login(text, PROXIED, hop="", timeout_s=5.0)
    assert isinstance(found, Dropped)
    assert found.words == "ssh: the ProxyCommand of gpu01 ended without a connection (nc [31m 10.0.0.1 22)"


@pytest.mark.parametrize(
    ("code", "stderr", "seen", "kind", "words"),
    [
        (127, "debug1: Exit status 127\nbash: line 1: python3: command not found\n", (False, True, True), "no-python",
         "python3 cannot be started there (bash: line 1: python3: command not found)"),
        (3, "oops\ndebug1: Exit status 3\nTransferred: sent 1, received 2 bytes, in 0.1 seconds\n", (True, True, True),
         "exited",
         "the agent ended with exit code 3: oops"),
        (255, "", (True, True, True), "exited", "the agent was killed by a signal"),
        (255, "debug1: x\n", (False, True, True), "exited", "the agent was killed by a signal"),
        (255, "", (False, False, False), "lost", "ssh: disconnected while logging in"),
        (255, "", (True, True, False), "lost", "the connection was lost: ssh gave no reason"),
        (255, "Timeout, server 10.0.0.1 not responding.\r\n", (True, True, False), "lost",
         "the connection was lost: Timeout, server 10.0.0.1 not responding."),
        (255, "client_loop: send disconnect: Broken pipe\r\n", (True, True, True), "lost",
         "the connection was lost: client_loop: send disconnect: Broken pipe"),
        (255, "Permission denied (publickey).\r\n", (False, False, False), "auth",
         "ssh: alice@gpu01 was refused: no key was accepted"),
        (255, "debug1: x\n", (False, True, False), "lost", "the connection was lost: ssh gave no reason"),
        (255, "Timeout, server gpu01 not responding.\r\n", (False, True, False), "lost",
         "the connection was lost: Timeout, server gpu01 not responding."),
        (255, "mux_client_request_session: read from master failed: Broken pipe\r\n"
         "Failed to connect to new control master\r\n", (False, True, False), "lost",
         "the connection was lost: Failed to connect to new control master"),
        (255, "mux_client_request_session: read from master failed: Broken pipe\r\n", (False, True, True), "lost",
         "the connection was lost: mux_client_request_session: read from master failed: Broken pipe"),
        (255, "Permission denied (publickey).\r\n", (False, True, False), "auth",
         "ssh: alice@gpu01 was refused: no key was accepted"),
        (-9, "", (True, True, True), "exited", "the agent was killed by signal 9"),
    ],
)  # fmt: skip
def test_ended_sessions_are_explained(
    code: int, stderr: str, seen: tuple[bool, bool, bool], kind: str, words: str
) -> None:
    connected, stood, stands = seen
    found = explain_ssh(
        stderr.encode(),
        code,
        HOST,
        hop="",
        python="python3",
        timeout_s=5.0,
        connected=connected,
        was_alive=stood,
        alive=stands,
    )
    assert (found.kind, found.words.strip()) == (kind, words)
