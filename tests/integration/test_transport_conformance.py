"""Every transport against real sshds on the test nodes: the same routes, messages and ends.

Exceptions are listed in docs/transports.md, and here.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hosts import Host, inside
from tests.integration.test_ladder import give_smi
from tests.integration.transport_driver import line
from tests.integration.transport_lab import Lab, agents, each_transport, lab, logins, own, uuids
from tests.nodes import Cluster, eight, old_python
from tests.sshd import make_key
from tests.waiting import Stopwatch, read_line, until

__all__ = ["lab"]
pytestmark = [pytest.mark.nodes, each_transport]

ECHO = "echo ready; exec cat"
DROPPING = """
import socket
server = socket.create_server(("", 2200))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""


def reached(lab: Lab, *names: str) -> dict[str, str]:
    """Return the host that a channel to each name leads to."""
    with lab.channels(*names, command="uname -n; exec cat") as driven:
        for _ in names:
            driven.event("connected")
        return {name: driven.received(number, 6)["text"].strip() for number, name in enumerate(names)}


def test_a_chain_of_jump_hosts_is_followed_and_shared(lab: Lab, nodes: Cluster) -> None:
    # login1 → gpu01 → gpu02 → gpu03, and no other route
    nodes["gpu02"].firewall("add rule inet t in ip saddr != 10.88.0.11 tcp dport 22 drop")
    nodes["gpu03"].firewall("add rule inet t in ip saddr != 10.88.0.12 tcp dport 22 drop")
    lab.config("Host far*\n  HostName gpu03\n  ProxyJump gpu01,alice@gpu02:22\n")
    before = [logins(nodes[name]) for name in ("gpu01", "gpu02", "gpu03")]
    assert reached(lab, "far1", "far2") == {"far1": "gpu03", "far2": "gpu03"}
    after = [logins(nodes[name]) for name in ("gpu01", "gpu02", "gpu03")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 2]


def test_failures_behind_a_jump_host_are_reported(lab: Lab, nodes: Cluster) -> None:
    lab.config(
        "Host nobody\n  HostName gpu03\n  Port 99\n  ProxyJump gpu01\n"
        "Host stuck\n  HostName gpu03\n  ProxyJump gpu02\n"
        "Host astray*\n  HostName gpu03\n  ProxyJump stranger\n"
        "Host stranger\n  HostName gpu01\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n"
        "Host circle\n  ProxyJump circle2\nHost circle2\n  ProxyJump circle\n"
    )
    nodes["gpu02"].firewall("add rule inet t in tcp dport 22 drop")
    names = ("nobody", "stuck", "gpu03", "astray1", "astray2", "circle")
    seen = lab.status(*names, GPUBOARD_CONNECT_TIMEOUT="8s")
    errors = {name: node["error"] or "" for name, node in seen.items()}
    assert errors["nobody"].startswith("ssh: nobody cannot be reached through gpu01: ")
    assert errors["stuck"].startswith("ssh: no answer in 8 s; ")
    assert errors["gpu03"] == ""
    for name in ("astray1", "astray2"):
        assert errors[name].startswith("ssh: the host key of stranger is unknown (ssh-ed25519 SHA256:")
        assert "`ssh stranger`" in errors[name]
    assert errors["circle"].startswith("ssh: ProxyJump of circle is a loop; ")
    assert "ssh_config" in errors["circle"]


def test_ipv6_on_another_port(lab: Lab, nodes: Cluster) -> None:
    gpu03 = nodes["gpu03"]
    gpu03.sshd("Port 2222")
    sockets, listens = Path(f"/proc/{gpu03.pid}/net/tcp6"), f"{0:032}:08AE {0:032}:0000 0A "
    until(lambda: listens in sockets.read_text(), "sshd listens on the last one, 2222")
    gpu03.firewall("add rule inet t in tcp dport 22 drop", "add rule inet t in ip protocol tcp tcp dport 2222 drop")
    with (lab.ssh / "known_hosts").open("a") as file:
        file.write(f"[fd88::13]:2222 {(nodes.root / 'keys' / 'gpu03.pub').read_text()}")
    six = "  HostName fd88::13\n  Port 2222\n"
    lab.config(f"Host six\n{six}Host behind\n{six}  ProxyJump gpu01\n")
    with ExitStack() as addresses:
        for host, address in ((gpu03, "fd88::13"), (lab.here, "fd88::21"), (nodes["gpu01"], "fd88::11")):
            inside(host.pid, f"-6 addr add {address}/64 dev eth0 nodad")
            addresses.callback(inside, host.pid, f"-6 addr del {address}/64 dev eth0")
        assert reached(lab, "six", "behind") == {"six": "gpu03", "behind": "gpu03"}


def test_ssh_config_is_read_as_ssh_reads_it_but_for_its_interactive_settings(lab: Lab) -> None:
    for name in ("30-more", "20-other", "10-first"):  # only the files' names decide which one counts
        lab.config(f"Host any\n  HostName gpu0{name[0]}\nHost nothing\n  HostName gpu03\n", f"conf.d/{name}")
    lab.config(
        "Include conf.d/*\nHost node? !node2\n  HostName gpu02\nHost node*\n  HostName gpu03\n"
        'Match originalhost "exact" user alice\n  HostName gpu02\n'
        'Match originalhost asked exec "test %n = asked"\n  HostName gpu01\n'
        "Host proxied\n  HostName 192.0.2.1\n  HostKeyAlias gpu01\n"
        '  ProxyCommand ssh -W "gpu01:%p" -l %r login2; exit 0\n'  # in a shell
        "Host gpu03\n  RemoteCommand echo wrong; exec bash\n  RequestTTY force\n  LocalForward 9999 localhost:1\n"
        "  RemoteForward 22 localhost:1\n  ExitOnForwardFailure yes\n  PermitLocalCommand yes\n"
        "  LocalCommand touch ~/was-here\n  LogLevel QUIET\n  SessionType none\n  StdinNull yes\n"
        "  ForkAfterAuthentication yes\n  ForwardX11 yes\n  BatchMode no\n  VisualHostKey yes\n"
    )
    assert reached(lab, "any", "node1", "node2", "exact", "asked", "proxied", "gpu03") == {
        "any": "gpu01", "node1": "gpu02", "node2": "gpu03", "exact": "gpu02", "asked": "gpu01", "proxied": "gpu01",
        "gpu03": "gpu03",
    }  # fmt: skip
    assert not (lab.ssh.parent / "was-here").exists()


def test_ssh_agent_is_used_and_not_forwarded(lab: Lab, nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    lab.config("Host *\n  ForwardAgent yes\n  IdentityFile ~/.ssh/moved\n")
    (lab.ssh / "id_ed25519").rename(lab.ssh / "elsewhere")
    env = {"SSH_AUTH_SOCK": "/tmp/agent.sock"}
    with lab.here.popen(["ssh-agent", "-D", "-a", "/tmp/agent.sock"]):
        until(lambda: lab.here.path("/tmp/agent.sock").exists(), "an agent")
        add = ["ssh-add", "/srv/home/alice/.ssh/elsewhere"]
        until(lambda: not lab.here.run(add, env=env).returncode, "the agent has the key")
        # ssh itself, as configured, forwards it: the next test is meaningful
        plain = lab.here.run(["ssh", "gpu01", "echo $SSH_AUTH_SOCK; ls -d /tmp/ssh-*"], env=env, check=True)
        assert plain.stdout.count("/tmp/ssh-") == 2
        until(lambda: not list(gpu01.path("/tmp").glob("ssh-*")), "sshd has put that away")
        with lab.channels("gpu01", command=f'echo "sock=$SSH_AUTH_SOCK."; {ECHO}', env=env) as driven:
            driven.event("connected")
            assert driven.received(0, 12)["text"] == "sock=.\nready\n"
            assert list(gpu01.path("/tmp").glob("ssh-*")) == []
        lab.here.run(["pkill", "ssh-agent"])


def test_what_cannot_be_used_as_a_key_is_skipped_and_passwords_are_never_requested(lab: Lab, nodes: Cluster) -> None:
    own(make_key(lab.ssh / "locked"))
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "words", "-f", lab.ssh / "locked"], check=True)
    own(lab.ssh / "locked")
    lab.config("not a key\n", "junk")
    (lab.ssh / "junk").chmod(0o600)
    lab.config(
        "Host gpu01\n  IdentityFile ~/.ssh/locked\n  IdentityFile ~/.ssh/junk\n  IdentityFile ~/.ssh/id_ed25519.pub\n"
        "Host alone\n  HostName gpu01\n  IdentityFile ~/.ssh/locked\n",
        key_for="* !alone",
    )
    nodes["gpu02"].sshd("AuthenticationMethods publickey,password\nPasswordAuthentication yes")
    nodes["gpu03"].sshd("AuthenticationMethods password\nPasswordAuthentication yes")
    seen = lab.status("gpu01", "alone", "gpu02", "gpu03")
    errors = {name: (node["error"] or "").partition("; ")[0] for name, node in seen.items()}
    assert errors == {
        "gpu01": "",
        "alone": "ssh: alice@alone was refused: no key was accepted",
        "gpu02": "ssh: alice@gpu02 was refused: the server asks for a password or a code",
        "gpu03": "ssh: alice@gpu03 was refused: the server asks for a password or a code",
    }


def test_a_shell_that_starts_nothing_and_a_crashing_python_are_reported(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu02"].sshd("ForceCommand echo For transfers only")
    python = lab.ssh.parent / "crashes"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    python.chmod(0o755)
    nodes["gpu03"].use_python(f"/srv/home/alice/{python.name}")
    with login_shell(nodes["gpu01"], "nologin"):
        seen = lab.status("gpu01", "gpu02", "gpu03", check=False)
    assert "killed by" in seen.pop("gpu03")["error"]
    ended = {
        "gpu01": "the agent ended with exit code 1: This account is currently not available.",
        "gpu02": "the agent ended with exit code 0: For transfers only",
    }
    remedy = "the agent did not start: does `python3 --version` work on {} without a terminal?"
    assert {name: node["error"] for name, node in seen.items()} == {
        name: f"{words}; {remedy.format(name)}" for name, words in ended.items()
    }


def test_three_sessions_at_once_on_one_node(lab: Lab, nodes: Cluster) -> None:
    """Whether its sshd allows one session of a connection, or ten."""
    nodes["gpu01"].sshd("MaxSessions 1")
    nodes["gpu02"].sshd("MaxSessions 10")
    hosts = ["gpu01", "gpu02"] * 3
    for _ in range(2 if lab.transport == "openssh" else 1):  # the second time over shared connections of the first
        with lab.channels(*hosts, command=ECHO) as driven:
            for _ in hosts:
                driven.event("connected")
            for number in range(len(hosts)):
                assert driven.received(number, 6)["text"] == "ready\n"


def test_dropped_logins_are_retried(lab: Lab, nodes: Cluster) -> None:
    nodes["gpu01"].sshd("MaxStartups 2:100:2")
    lab.config("Host many*\n  HostName gpu01\nHost behind*\n  HostName gpu02\n  ProxyJump gpu01\n")
    nodes["gpu02"].sshd("MaxStartups 2:100:2")
    where = {f"many{k}": "gpu01" for k in range(4)} | {f"behind{k}": "gpu02" for k in range(3)}
    assert reached(lab, *where) == where


def test_shells_of_every_kind_and_their_noise_with_python_and_without(lab: Lab, nodes: Cluster) -> None:
    home = lab.ssh.parent
    noise = 'echo "Welcome @all"; echo "to this machine"\n'
    (home / ".bashrc").write_text(f"{noise}echo oops >&2; printf 'no end of line'\n")
    (home / ".cshrc").write_text(noise)
    (home / ".config" / "fish").mkdir(parents=True)
    (home / ".config" / "fish" / "config.fish").write_text(noise)
    nodes["gpu01"].path("/etc/banner").write_text("Only for those who may\n" * 20)
    nodes["gpu01"].sshd("Banner /etc/banner")
    with ExitStack() as shells:
        shells.enter_context(login_shell(nodes["gpu02"], "fish"))
        shells.enter_context(login_shell(nodes["gpu03"], "tcsh"))
        names = ("gpu01", "gpu02", "gpu03")
        assert {name: node["error"] for name, node in lab.status(*names).items()} == dict.fromkeys(names)
        for name in names[1:]:
            give_smi(nodes[name])
        seen = lab.status(*names, GPUBOARD_PYTHON="python3-not-there")
    assert seen["gpu01"]["error"].startswith("python3-not-there cannot be started there (")
    for name in names[1:]:
        node = seen[name]
        assert (node["source"], node["error"], len(node["gpus"])) == ("nvidia-smi", None, 2), name
        assert node["claims_error"].startswith("python3-not-there cannot be started there ("), name


def test_full_homes_there_and_here_and_an_old_python_have_no_effect(lab: Lab, nodes: Cluster) -> None:
    old = old_python()
    if old is None:
        pytest.skip("needs an old Python (3.6 to 3.8) on this machine")
    nodes["gpu02"].use_python(old)
    found = {name: [gpu.uuid for gpu in nodes[name].script(eight())] for name in ("gpu01", "gpu02")}
    with full_home(nodes["gpu01"]), full_home(lab.here):
        seen = lab.status("gpu01", "gpu02")
    assert {name: node["error"] for name, node in seen.items()} == {"gpu01": None, "gpu02": None}
    assert {name: uuids(node) for name, node in seen.items()} == found


def test_hosts_with_unknown_changed_or_revoked_keys_are_refused(lab: Lab, nodes: Cluster) -> None:
    keys = nodes.root / "keys"
    gpu01, gpu02 = ((keys / f"{name}.pub").read_text() for name in ("gpu01", "gpu02"))
    files = {
        "unknown": f"gpu02 {gpu02}",
        "changed": f"gpu01,10.88.0.11 {gpu02}",
        "revoked": f"gpu01 {gpu01}@revoked gpu01 {gpu01}",
        "other": f"gpu0?,!gpu01 {gpu01}",
        "messy": f"\nnonsense\n|1|x|y ssh-ed25519 AAAA\n# gpu01 {gpu02}gpu01 ssh-ed25519 !\n*.example,gpu0? {gpu01}",
    }
    for name, text in files.items():
        lab.config(text, f"known/{name}")
    lab.config(f"gpu01 {gpu01}", "known/hashed")
    lab.here.run(["ssh-keygen", "-q", "-H", "-f", ".ssh/known/hashed"], check=True)
    lab.config(
        "".join(
            f"Host {name}\n  HostName gpu01\n  UserKnownHostsFile ~/.ssh/known/{name}\n"
            f"  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking {'no' if name == 'unknown' else 'ask'}\n"
            for name in (*files, "hashed")
        )
    )
    seen = lab.status(*files, "hashed")
    errors = {name: node["error"] for name, node in seen.items()}
    shown = subprocess.run(["ssh-keygen", "-lf", keys / "gpu01.pub"], capture_output=True, text=True, check=True)
    offered = f"ssh-ed25519 {shown.stdout.split()[1]}"
    assert errors == {
        "unknown": f"ssh: the host key of unknown is unknown ({offered}); "
        "run `ssh unknown` once and compare the fingerprint",
        "changed": f"ssh: the host key of changed has CHANGED ({offered}): a new installation, or an attack; "
        "ask its administrator; then `ssh-keygen -R 'gpu01'` and `ssh changed`",
        "revoked": "ssh: the host key of revoked is revoked; ask its administrator",
        "other": f"ssh: the host key of other is unknown ({offered}); run `ssh other` once and compare the fingerprint",
        "messy": None,
        "hashed": None,
    }
    for name in ("unknown", "changed"):
        assert (lab.ssh / "known" / name).read_text() == files[name]  # nothing was added


def test_each_failure_to_connect_has_its_message_and_remedy(lab: Lab, nodes: Cluster) -> None:
    own(make_key(lab.ssh / "stranger"))
    lab.config(
        "Host refused\n  HostName gpu01\n  IdentityFile ~/.ssh/stranger\n  IdentitiesOnly yes\n"
        "Host closed\n  HostName gpu01\n  Port 99\nHost nowhere\n  HostName no-such-host.invalid\n"
        "Host off\n  HostName 192.0.2.1\nHost hung\n  HostName gpu02\nHost swallowed\n  HostName gpu03\n"
        "Host dropped\n  HostName gpu01\n  Port 2200\n"
        "Host broken\n  HostName 192.0.2.1\n  ProxyCommand echo no way >&2; exit 1\n",
        key_for="* !refused",
    )
    nodes["gpu02"].pause_sshd()
    nodes["gpu03"].firewall("add rule inet t in tcp dport 22 drop")
    words = {
        "refused": ("ssh: alice@refused was refused: no key was accepted", "authorized_keys"),
        "closed": ("ssh: connection refused", "is sshd running there"),
        "nowhere": ("ssh: the name 'nowhere' cannot be resolved", "ssh_config"),
        "off": ("ssh: the network is unreachable", ""),
        "hung": ("ssh: no answer in 8 s", "is the node hung or overloaded?"),
        "swallowed": ("ssh: no answer in 8 s", ""),
        "login2": ("NVML: no NVIDIA driver here (libnvidia-ml.so.1 not found)", ""),
    }
    with nodes["gpu01"].popen(["python3", "-S", "-c", DROPPING], user="bob") as server:
        assert read_line(server) == "ready\n"
        started = Stopwatch()
        seen = lab.status(*words, "dropped", "broken", GPUBOARD_CONNECT_TIMEOUT="8s")
        server.kill()
    assert started.stop() < 24
    assert seen.pop("broken")["state"] == "unreachable"
    dropped = seen.pop("dropped")["error"]
    assert dropped.startswith("ssh: ") and "no answer" not in dropped, dropped
    errors = {name: (node["error"] or "").partition(";") for name, node in seen.items()}
    assert {name: error[0] for name, error in errors.items()} == {name: what for name, (what, _) in words.items()}
    assert {name: error[2] for name, error in errors.items() if words[name][1] not in error[2]} == {}


def test_the_end_of_a_command_is_reported(lab: Lab) -> None:
    ends = {
        "echo so; exit 7": ("exited", "the agent ended with exit code 7"),
        "echo so; echo 'no \x1b[31m luck' >&2; exit 3": ("exited", "the agent ended with exit code 3: no [31m luck"),
        "echo so; kill -9 $$": ("exited", "killed"),
        # no output, then its end
        "echo so; exec >&- 2>&-; sleep 3; exit 9": ("exited", "the agent ended with exit code 9"),
        "no-such-program": ("no-python", "python3 cannot be started there ("),
    }
    with lab.channels(*["gpu01"] * len(ends), command=list(ends)) as driven:
        seen = {ended["n"]: ended for ended in (driven.event("ended", after="connected") for _ in ends)}
    for number, (command, (kind, words)) in enumerate(ends.items()):
        assert seen[number]["kind"] == kind, command
        assert words in seen[number]["words"], command


def test_lines_of_a_mebibyte_pass_in_both_directions_beside_a_channel_that_does_not_read(lab: Lab) -> None:
    """Data that one node does not read is queued; the lines of the others continue."""
    size = 1 << 20
    with lab.channels("gpu01", "gpu02", "gpu03", command=[ECHO, ECHO, "sleep 1000 & exec sleep 1000"]) as driven:
        for _ in range(3):
            driven.event("connected")
        driven.send(op="write", n=2, bytes=16 << 20)  # more than all buffers together
        for number in range(2):
            driven.received(number, 6)
            driven.send(op="reset", n=number)
        for number in (0, 1, 0):  # three of them at once, two on one channel
            driven.send(op="write", n=number, bytes=size)
        for number, times in ((0, 2), (1, 1)):
            found = driven.received(number, times * size)
            assert (found["bytes"], found["sha256"]) == (times * size, hashlib.sha256(line(size) * times).hexdigest())
        driven.send(op="close")
        assert driven.event("closed")["s"] < 3.0


def test_agents_end_when_the_transport_is_closed(lab: Lab, nodes: Cluster) -> None:
    gpu01 = nodes["gpu01"]
    with lab.channels("gpu01", "gpu01", command=None) as driven:
        driven.start_agents("gpu01", "gpu01")
        assert len(agents(gpu01)) >= 2
        driven.send(op="close")
        assert driven.event("closed")["s"] < 3.0
        until(lambda: not agents(gpu01), "all agents ended", 8)
        until(lambda: not lab.children(), "no ssh process is left", 8)  # a shared connection may last for 10 s


def test_agents_end_when_the_client_is_killed(lab: Lab, nodes: Cluster) -> None:
    with lab.channels("gpu01", "gpu02", command=None) as driven:
        driven.start_agents("gpu01", "gpu02")
        assert agents(nodes["gpu01"])
        driven.process.kill()
        until(lambda: not agents(nodes["gpu01"]) and not agents(nodes["gpu02"]), "all agents ended", 8)
    until(lambda: not lab.children(), "no ssh process is left")  # a shared connection lasts for 10 s


def test_a_cut_connection_and_a_path_that_drops_packets_are_reported(lab: Lab, nodes: Cluster) -> None:
    """Also before the first output; other connections go on."""
    lab.config("Host gpu01 gpu03\n  ServerAliveInterval 1\n  ServerAliveCountMax 2\n")
    commands = [ECHO, ECHO, "exec sleep 60", ECHO]
    with lab.channels("gpu01", "gpu02", "gpu03", "login2", command=commands) as driven:
        for _ in commands:
            driven.event("connected")
        driven.received(3, 6)
        nodes["login2"].stop_sshd()
        ended = [driven.event("ended")]
        nodes["gpu01"].unplug()
        nodes["gpu03"].unplug()
        started = Stopwatch()
        ended += [driven.event("ended") for _ in range(2)]
        assert started.stop() < 15
        assert [one["n"] for one in ended] in ([3, 0, 2], [3, 2, 0])
        for one in ended:
            assert one["kind"] == "lost", one
            assert one["words"].startswith("the connection was lost")
        driven.send(op="write", n=1, text="still here\n")
        driven.received(1, 17)
        driven.send(op="close")
        assert driven.event("closed")["s"] < 3.0


@contextmanager
def login_shell(host: Host, name: str) -> Iterator[None]:
    """Give alice another login shell on a host."""
    found = host.run(["sh", "-c", f"command -v {name}"]).stdout.strip()
    if not found:
        pytest.skip(f"needs {name}")
    passwd = host.path("/etc/passwd")
    before = passwd.read_text()
    passwd.write_text(before.replace(":/srv/home/alice:/bin/bash", f":/srv/home/alice:{found}"))
    try:
        yield
    finally:
        passwd.write_text(before)


@contextmanager
def full_home(host: Host, user: str = "alice") -> Iterator[None]:
    """Replace a home by one without space or inodes left, with keys and configuration in it."""
    home = f"/srv/home/{user}"
    script = (
        f"cp -a {home}/.ssh /tmp/ssh-kept && mount -t tmpfs -o size=64k,nr_inodes=24,mode=755 tmpfs {home} && "
        f"cp -a /tmp/ssh-kept {home}/.ssh && rm -r /tmp/ssh-kept && chown {user} {home}; cat /dev/zero > {home}/full; "
        f"n=0; while : > {home}/$n; do n=$((n + 1)); done 2>/dev/null"
    )
    host.run(["sh", "-c", script], user="root")
    try:
        assert host.run(["sh", "-c", "mkdir new || cp /etc/passwd new"], user=user).returncode
        yield
    finally:
        # Programs that use it may still be ending, such as a shared connection.
        until(lambda: not host.run(["umount", home], user="root").returncode, "its own home is back")
