"""The pictures in docs/screenshots are what the board draws now, and reveal nothing of the build machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.board.lab import claims_folder

ROOT = Path(__file__).parents[2]
DRAWN = ROOT / "docs" / "screenshots"


def text(svg: str) -> list[str]:
    return [unescape(line).replace("\xa0", " ") for line in re.findall(r"<text [^>]*>([^<]*)</text>", svg)]


@pytest.mark.torch
def test_the_pictures_are_what_the_board_draws_now(tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    env = dict(os.environ)
    if os.geteuid() == 0:
        env["GPUBOARD_CLAIMS_DIR"] = str(claims_folder(tmp_path))
    command = [sys.executable, str(ROOT / "scripts" / "screenshots.py"), "--to", str(tmp_path / "drawn")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    now = {path.name: path.read_text() for path in (tmp_path / "drawn").iterdir()}
    kept = {path.name: path.read_text() for path in DRAWN.iterdir()}
    assert now.keys() == kept.keys()
    for name, svg in now.items():
        assert text(kept[name]) == text(svg), f"{name} is out of date: run scripts/screenshots.py"
        assert kept[name] == svg, f"{name} looks different: run scripts/screenshots.py"


def test_the_pictures_are_in_the_readme_and_reveal_nothing_of_the_machine() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r'"docs/screenshots/(\w+\.svg)"', readme))
    assert shown == {path.name for path in DRAWN.iterdir()}
    assert {"cluster.svg", "gpu.svg", "leases.svg", "run.svg"} <= shown
    for path in DRAWN.iterdir():
        svg = path.read_text()
        words = "\n".join(text(svg))
        assert "SIMULATED" in words, path.name
        assert re.findall(r"(?:https?:)?//[^\s\"')]+", svg.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []
        for own in (str(ROOT), str(Path.home()) + "/", "/tmp/", sys.prefix):
            assert own not in words, path.name
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", words), path.name
