"""The agent's JSON: the same as the json module's, with and without the functions below it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from gpuboard.agent import json_text

VALUES: list[Any] = [
    {"a": [1, None, True, 1.5, 10**30], "é": {"\n\x01\"\\\ud800": ""}}, [], {}, "x", 0, -0.0, 1e300, float("inf"), None,
]  # fmt: skip
TEXTS = [
    "", "{", "[1,]", "{} x", "nul", "\x00", '"\x01"', '{"a":1,}', "-", "NaN", "-Infinity", " [1] \n", "{1:2}", "01",
    "[1]]", "\ufeff1", '"\\ud800"', "\xa01",
]  # fmt: skip


@pytest.fixture(params=["functions in C", "json"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each way; the first is there in every CPython."""
    assert json_text._encode is not None
    if request.param == "json":
        monkeypatch.setattr(json_text, "_encode", None)


def result(function: Any, text: str) -> str:
    try:
        return repr(function(text))
    except ValueError:
        return "ValueError"


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("value", VALUES)
def test_values_become_the_same_text(value: Any) -> None:
    text = json_text.compact(value)
    assert text == json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    pair = {"b": 1, "a": value}
    assert json_text.sorted_ascii(pair) == json.dumps(pair, sort_keys=True)
    assert json_text.parsed(text) == value


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read_or_refused_alike(text: str) -> None:
    assert result(json_text.parsed, text) == result(json.loads, text)


@pytest.mark.usefixtures("by")
def test_what_cannot_be_read_or_written_is_refused() -> None:
    assert json_text.parsed("[12, 1.0, -7]", parse_int=lambda digits: digits) == ["12", 1.0, "-7"]
    with pytest.raises(RecursionError):
        json_text.parsed("[" * 10**6)
    with pytest.raises(TypeError):
        json_text.compact({"a": {1, 2}})
    with pytest.raises(TypeError):
        json_text.sorted_ascii({"a": {1, 2}})


def test_neither_json_nor_re_is_imported() -> None:
    program = "import gpuboard.agent.json_text, sys; print(sorted({'json', 're', 'enum'} & set(sys.modules)))"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
