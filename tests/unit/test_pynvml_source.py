"""The part of pynvml that is sent to nodes: complete for the agent, for any layout of its source."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pynvml
import pytest

from gpuboard.transport import bundle
from gpuboard.transport.pynvml_source import reduced


def codes(code: CodeType) -> Iterator[CodeType]:
    """Return a compiled module's code and that of all its functions and classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[CodeType, ModuleType]:
    """pynvml as sent, compiled and imported."""
    code = compile(bundle.sources("node")["pynvml"], "<pynvml>", "exec", dont_inherit=True)
    module = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", module)  # it looks for itself there
    exec(code, module.__dict__)
    return code, module


def test_what_the_agent_uses_is_sent_with_all_that_it_needs(sent: tuple[CodeType, ModuleType]) -> None:
    code, module = sent
    for user in ("reader", "activity"):
        source = bundle.sources("launch")[f"gpuboard.agent.nvml.{user}"]
        outside = source.partition('"""\n')[2]
        assert len(re.findall(r"\bpynvml\b(?!\.[A-Za-z])", outside)) == 1, "its import; all else names what it uses"
        assert {name for name in re.findall(r"\bpynvml\.(\w+)", source) if not hasattr(module, name)} == set()
    named = {name for part in codes(code) for name in part.co_names}
    assert {name for name in named if hasattr(pynvml, name) and not hasattr(module, name)} == set()
    errors = {name for name in dir(pynvml) if name.startswith(("NVML_ERROR", "NVMLError"))}
    assert errors <= set(dir(module))
    assert {name for name in errors if name.isupper() and getattr(module, name) != getattr(pynvml, name)} == set()


def test_less_than_a_quarter_of_pynvml_is_sent() -> None:
    assert pynvml.__file__ is not None
    assert len(bundle.sources("node")["pynvml"]) < Path(pynvml.__file__).stat().st_size / 4


def test_modules_that_cost_a_node_time_are_not_imported(sent: tuple[CodeType, ModuleType]) -> None:
    code, module = sent
    assert not {"string", "threading"} & set(code.co_names)
    assert module.NVMLError_Unknown.__name__ == pynvml.NVMLError_Unknown.__name__
    kept = "import os\nimport string\nA = string.capwords(string.digits)\nimport threading, sys\nB = threading.Lock()\n"
    assert reduced(kept, ()) == kept


SOURCE = '''\
from ctypes import *
from ctypes.util import find_library
from functools import wraps
NVML_USED = 1
NVML_UNUSED = 2  # a comment
NVML_OF_A_DEFAULT = 0x3
NVML_ERROR_UNUSED = 4
NVML_PAIR = (1,
NVML_USED)
class c_nvmlBase_t(Structure):
    _fields_ = [("a", c_uint)]

nvmlBase_v1 = 0x1000004
class c_nvmlOther_t(Structure):
    pass
@wraps
# about nvmlUnused
@wraps
def nvmlDecorated():
    return nvmlOfDecorated()
def nvmlOfDecorated():
    pass
@wraps(
    "with arguments")
def nvmlOpenDecorator():
    pass
def nvmlTwice():
    """Several
    lines"""
def c_nvmlTwice():
    pass
def nvmlUsed(a=NVML_OF_A_DEFAULT):
    x = c_nvmlBase_t()

    return nvmlHelper(x)
# about the next
def nvmlHelper(x):
    return x
def nvmlUnused(a,
               b):
    return NVML_UNUSED
def nvmlLong():
    """Several
nvmlLines
"""
def nvmlOdd():
    call(
)
nvmlAlias = nvmlTarget
def nvmlTarget(): pass
def _other():
    pass
def nvmlLast():
    pass
'''


def test_definitions_that_nothing_uses_and_only_those_are_left_out() -> None:
    left = reduced(SOURCE, {"nvmlUsed", "NVML_USED"})
    gone = [
        "NVML_UNUSED = 2  # a comment\n",
        "class c_nvmlOther_t(Structure):\n    pass\n",
        "from ctypes.util import find_library\n",
        "@wraps\n# about nvmlUnused\n@wraps\ndef nvmlDecorated():\n    return nvmlOfDecorated()\n",
        "def nvmlOfDecorated():\n    pass\n",
        'def nvmlTwice():\n    """Several\n    lines"""\n',
        "def c_nvmlTwice():\n    pass\n",
        "def nvmlUnused(a,\n               b):\n    return NVML_UNUSED\n",
        "def nvmlLast():\n    pass\n",
    ]
    expected = SOURCE
    for text in gone:
        assert text in expected
        expected = expected.replace(text, "")
    assert left == expected
    assert reduced(SOURCE, re.findall(r"\w+", SOURCE)) == SOURCE
    assert '"""Several' in (twice := reduced(SOURCE, {"nvmlTwice"})) and "c_nvmlTwice" in twice
    assert reduced("", {"nvmlUsed"}) == ""


def test_pynvml_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(FileNotFoundError, match="install nvidia-ml-py"):
        bundle.sources("node")
