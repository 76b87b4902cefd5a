"""Folders of claims, and several users who work on them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuboard.agent.claims import store as claims
from gpuboard.agent.claims.files import SITE_CONFIG
from gpuboard.model.reading import Claim

ALICE, BOB = 20001, 20002
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of several users")


@pytest.fixture(name="folder")
def claims_folder() -> Iterator[str]:
    """A root-owned sticky folder that any user can reach."""
    with tempfile.TemporaryDirectory(prefix="gpuboard-claims-", dir="/var/tmp") as path:
        os.chmod(path, 0o1777)
        yield path


def become(uid: int, do: Callable[[], Any]) -> Any:
    """Run ``do`` in a child process as ``uid``; return its value, or (kind, message) when it was refused or failed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            value: Any = do()
        except claims.Refuse as refused:
            value = [refused.kind, refused.message]
        except OSError as error:
            value = [errno.errorcode[error.errno or 0], str(error)]
        finally:
            os.write(send, json.dumps(value).encode())
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def ask(op: str, path: str, site_config: str = SITE_CONFIG, **args: Any) -> Any:
    return claims.handle(op, args, claims.Folder(path, site_config=site_config))


def take(path: str, lease: str, *uuids: str, for_s: float = 600.0, **more: Any) -> Any:
    wanted: dict[str, Any] = {"share": None, "holder": None, "purpose": "", "host": "login1", "nodes": ["gpu01"]}
    return ask("take", path, lease=lease, uuids=list(uuids), for_s=for_s, gpus=len(uuids), **{**wanted, **more})


def read(path: str, site_config: str = SITE_CONFIG) -> dict[str, Claim]:
    """Return the claims by lease and GPU, decoded as a client does."""
    found, error = claims.Folder(path, site_config=site_config).read()
    assert error is None
    return {f"{c.lease} {c.uuid}": c for c in msgspec.json.decode(json.dumps(found), type=list[Claim])}


def age(path: str, name: str, seconds: float) -> None:
    """Age a claim as if its keeper had ended ``seconds`` ago: shift its creation time."""
    file = Path(path, name)
    before = file.stat()
    content = json.loads(file.read_text())
    content["from"] -= seconds
    content["until"] -= seconds
    content["up"] -= seconds
    file.write_text(json.dumps(content))
    os.utime(file, (before.st_mtime - seconds, before.st_mtime - seconds))


def refused(do: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(claims.Refuse) as caught:
        do()
    return caught.value.kind, caught.value.message
