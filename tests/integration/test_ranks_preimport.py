"""torch is imported ahead of the target, but not of code that sets variables which torch reads when it is loaded."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from gpuboard.agent.launch.rank import module_search, preimport, traceback_text
from tests.integration.ranks_driver import Node, go, launch_config

SET = "import os\nos.environ['PROBE'] = 'set'\n"
FILES = {
    "fake/torch/__init__.py": "import os\nseen = os.environ.get('PROBE')\nfrom torch.distributed import rendezvous\n",
    "fake/torch/distributed/__init__.py": "",
    "fake/torch/distributed/rendezvous.py": "class TCPStore: pass\n",
    "settings.py": SET,
    "early.py": "import torch\n",
    "pack/__init__.py": "",
    "pack/variables.py": "from .deep import set_all\nset_all()\n",
    "pack/deep.py": "def set_all():\n    import os\n    os.environ['PROBE'] = 'set'\n",
    "pack/run.py": "import pack.variables, torch\nprint(torch.seen)\ntorch.distributed.rendezvous.TCPStore()\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def seen(folder: Path, kind: str, name: str, preimport: bool = True) -> tuple[str, bool, bool]:
    """Return the output, whether torch was imported early, and whether the store was seen to be joined."""
    config = launch_config(folder, name, kind=kind, listen=False, preimport=preimport)
    config["environ"]["PYTHONPATH"] = str(folder / "fake")
    with Node(config) as here:
        go(here)
        (end,) = here.wait_ended()
        return here.text(), here.data("gate")[0]["import_s"] is not None, end["joined"]


def test_torch_sees_the_variables_that_its_importer_sets_first(folder: Path) -> None:
    assert seen(folder, "module", "pack.run") == ("set\n", False, True)
    (folder / "script.py").write_text(f"import torch\n{SET}print(torch.seen)\ntorch.distributed.rendezvous.TCPStore()")
    assert seen(folder, "script", "script.py") == ("None\n", True, True)
    (folder / "script.py").write_text(f"exec({SET!r})\nimport torch\nprint(torch.seen)")
    assert seen(folder, "script", "script.py", preimport=False) == ("set\n", False, False)


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        ("import os\nos.environ['A'] = 'b'\nimport torch", True),
        ("from os import environ\nenviron.setdefault('A', 'b')", True),
        ("from os import environ as e\ne['A'] = 'b'", True),
        ("import os\nos.environ |= {'A': 'b'}", True),
        ("import os\nvariables = os.environ", True),
        ("import os\nos.putenv('A', 'b')", True),
        ("def prepare():\n    import os\n    os.environ.update(A='b')\nprepare()\nfrom torch import nn", True),
        ("import settings\nimport torch", True),
        ("def main():\n    import pack.variables", True),
        ("try:\n    import torch\nexcept ImportError:\n    pass\nimport settings", True),
        ("import os, torch\nos.environ['A'] = 'late'", False),
        ("import early\nimport settings", False),
        ("import os\nif 'A' in os.environ or dict(os.environ) == {} or os.environ.get('A'): os.environ['B']", False),
        ("import subprocess, os\nsubprocess.run('true', env={**os.environ, 'A': 'b'})", False),
        ("no python", False),
    ],
)  # fmt: skip
def test_code_that_may_change_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, changes: bool
) -> None:
    for module in (module_search, traceback_text):  # the rank's stub does this
        monkeypatch.setattr(preimport, module.__name__.rpartition(".")[2], module, raising=False)
    monkeypatch.chdir(folder)
    Path("script.py").write_text(script)
    assert preimport.changes_environment("script", "script.py") is changes
    assert preimport.changes_environment("module", "script") is changes
    assert preimport.changes_environment("script", os.path.abspath("script.py")) is changes


class Editable:
    """A finder of its own, as editable installs add one."""

    def __init__(self, folder: Path) -> None:
        self._file, self._folder = str(folder / "__init__.py"), str(folder)

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the spec of the installed package."""
        if name != "lab":
            return None
        return spec_from_file_location(name, self._file, submodule_search_locations=[self._folder])


def test_an_editable_install_is_code_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (module_search, traceback_text):
        monkeypatch.setattr(preimport, module.__name__.rpartition(".")[2], module, raising=False)
    (folder / "src/elsewhere").mkdir(parents=True)
    monkeypatch.chdir(folder / "src")
    for name, text in {"__init__": "", "train": "from . import variables\nimport torch", "variables": SET}.items():
        (folder / f"src/elsewhere/{name}.py").write_text(text)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(folder / "src/elsewhere")])
    assert preimport.changes_environment("module", "lab.train")
    assert preimport.changes_environment("function", "lab.train:main")
    assert not preimport.changes_environment("module", "lab")


def test_files_that_replace_modules_of_torch_are_imported_by_it(folder: Path) -> None:
    (folder / "torch.py").write_text("seen = 'of the folder'\n")
    (folder / "script.py").write_text("import torch\nprint(torch.seen)")
    assert seen(folder, "script", "script.py") == ("of the folder\n", False, False)


def test_modules_of_python_that_files_replace(tmp_path: Path) -> None:
    for name in ("train.py", "logging.py", "test.py", "data/loader.py", "numpy/__init__.py", "random/weights.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert preimport.shadowed(str(tmp_path)) == {"logging", "numpy"}
    assert preimport.shadowed(str(tmp_path / "no.pyz")) == set()
