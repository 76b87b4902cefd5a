"""known_hosts read for paramiko as ssh reads it; hashed names are compared with ssh-keygen's."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuboard.transport.ssh.known_hosts import KnownHosts

ONE, TWO = (base64.b64encode(b"\0\0\0\x0bssh-ed25519" + bytes([n]) * 36).decode() for n in (1, 2))
KEY, OTHER = base64.b64decode(ONE), base64.b64decode(TWO)


@pytest.mark.parametrize(
    ("line", "name", "port", "verdict"),
    [
        (f"gpu01 ssh-ed25519 {ONE}", "gpu01", 22, "known"),
        (f"gpu01,10.0.0.1 ssh-ed25519 {ONE} a comment", "10.0.0.1", 22, "known"),
        (f"GPU01 ssh-ed25519 {ONE}", "gpu01", 22, "known"),
        (f"gpu01 ssh-ed25519 {ONE}", "gpu01", 2222, "unknown"),
        (f"[gpu01]:2222 ssh-ed25519 {ONE}", "gpu01", 2222, "known"),
        (f"[fd88::1]:2222 ssh-ed25519 {ONE}", "fd88::1", 2222, "known"),
        (f"gpu0? ssh-ed25519 {ONE}", "gpu01", 22, "known"),
        (f"*.example ssh-ed25519 {ONE}", "gpu01", 22, "unknown"),
        (f"gpu*,!gpu01 ssh-ed25519 {ONE}", "gpu01", 22, "unknown"),
        (f"gpu01 ssh-ed25519 {TWO}", "gpu01", 22, "changed"),
        (f"gpu01 ssh-ed25519 {TWO}\ngpu01 ssh-ed25519 {ONE}", "gpu01", 22, "known"),
        (f"gpu01 ssh-ed25519 {ONE}\n@revoked * ssh-ed25519 {ONE}", "gpu01", 22, "revoked"),
        (f"@revoked * ssh-ed25519 {TWO}\ngpu01 ssh-ed25519 {ONE}", "gpu01", 22, "known"),
        (f"@cert-authority gpu01 ssh-ed25519 {ONE}", "gpu01", 22, "unknown"),
        (f"# gpu01 ssh-ed25519 {ONE}", "gpu01", 22, "unknown"),
        (f"gpu01 ssh-ed25519\ngpu01 ssh-ed25519 !!!\n|1|x ssh-ed25519 {ONE}\n\n", "gpu01", 22, "unknown"),
        ("", "gpu01", 22, "unknown"),
    ],
)
def test_keys_are_judged_as_by_ssh(tmp_path: Path, line: str, name: str, port: int, verdict: str) -> None:
    (tmp_path / "known").write_text(line + "\n")
    assert KnownHosts([str(tmp_path / "none"), str(tmp_path / "known")]).judge(name, port, KEY) == verdict


@pytest.mark.parametrize("port", [22, 2222])
def test_hashed_names_are_found(tmp_path: Path, port: int) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (openssh-client)")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    kind, blob, *_ = (tmp_path / "key.pub").read_text().split()
    target = "gpu01" if port == 22 else f"[gpu01]:{port}"
    (tmp_path / "known").write_text(f"{target} {kind} {blob}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(tmp_path / "known")], check=True, capture_output=True)
    assert "gpu01" not in (tmp_path / "known").read_text()
    known = KnownHosts([str(tmp_path / "known")])
    assert known.judge("gpu01", port, base64.b64decode(blob)) == "known"
    assert known.judge("gpu02", port, base64.b64decode(blob)) == "unknown"
    assert known.kinds("gpu01", port) == ["ssh-ed25519"]
