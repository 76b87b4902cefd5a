"""Functions as targets: what they are called with, and what becomes of their result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks_driver import Node, go, launch_config

# The parts of torch that launch calls for a function; the real one takes 2 s per rank.
FILES = {
    "torch/__init__.py": "",
    "torch/distributed.py": "def init_process_group(*_, **__): pass\ndef is_initialized(): return False\n",
    "library.py": """
import argparse, functools, sys

def wrapped(function):  # as hydra.main does
    @functools.wraps(function)
    def inner(given=None):
        return function(given or sys.argv[1:])
    return inner

def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true")
    print(parser.parse_args(argv))

def words(*words):
    print(words, sys.argv[1:])

def required(scale, rate="1"):
    print(scale, rate)

@wrapped
def configured(given):
    print(given)

def epochs():
    return 37

async def later():
    print("never")
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("function", "args", "printed"),
    [
        ("parse", ["--fast"], "Namespace(fast=True)\n"),
        ("words", ["--fast"], "() ['--fast']\n"),
        ("words", ["a", "b"], "('a', 'b') ['a', 'b']\n"),
        ("required", ["-0.5"], "-0.5 1\n"),
        ("required", ["2", "0.1"], "2 0.1\n"),
        ("configured", ["rate=3"], "['rate=3']\n"),
    ],
)
def test_a_function_gets_the_words_that_it_takes(folder: Path, function: str, args: list[str], printed: str) -> None:
    with Node(launch_config(folder, f"library:{function}", *args, kind="function", listen=False)) as node:
        go(node)
        assert (node.wait_ended()[0]["code"], node.text()) == (0, printed)


def test_what_a_function_returns_is_no_exit_code(folder: Path) -> None:
    with Node(launch_config(folder, "library:epochs", kind="function", listen=False)) as node:
        go(node)
        assert (node.wait_ended()[0]["code"], node.text("err")) == (0, "")


def test_a_coroutine_function_is_an_error(folder: Path) -> None:
    with Node(launch_config(folder, "library:later", kind="function", listen=False)) as node:
        go(node)
        assert (node.wait_ended()[0]["code"], node.text()) == (1, "")
        assert [raised["message"] for raised in node.data("raised")] == [
            "library:later is a coroutine function; name a function that calls asyncio.run() with it"
        ]
        assert "never awaited" not in node.text("err")
