"""Any text a person may write is understood, or refused by the error meant for it, with bounded results."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import example, given
from hypothesis import strategies as st

from gpuboard import config, nodesets
from gpuboard.board.dialogs import request_form
from gpuboard.board.dialogs.base import number
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.filter.language import QueryError
from gpuboard.cluster.inventory.file import read_nodes
from gpuboard.cluster.inventory.nodes import expand_names
from gpuboard.cluster.inventory.sources import look_up
from gpuboard.errors import GpuboardError, UsageError
from gpuboard.launch.plan import check_rank_map
from gpuboard.launch.rank_map_source import read_rank_map
from gpuboard.launch.target import parse_target
from gpuboard.leases.picks import PICKS_MAX, parse_picks
from gpuboard.model.text import clean, like, lines, split_outside
from gpuboard.model.units import parse_duration, parse_number, parse_size, parse_whole
from tests.integration.test_bad_input import MAP

PIECES = (
    "gpu", "n", "0", "1", "9", "01", "16", "99999", "[", "]", "-", ",", "/", "!", "&", "^", "@", ":", "*", "?", ".",
    " ", "_", "\n", "\x00", "\x1b[31m", "\udcff", "²", "٣", "é", "GPU-", "GPU-0123", "=", "<", ">", "%", "'", '"', "\\",
    "s", "h", "GiB", "nan", "inf", "1e9", "state", "node", "user", "mem", "{", "}", "#", "true", "0x", "hostfile:",
)  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=30)
RANGE = st.builds(
    lambda first, more, pad: f"{first:0{pad}}-{first + more:0{pad}}", st.integers(0, 20), st.integers(0, 9),
    st.integers(2, 3),
)  # fmt: skip
BRACKET = st.lists(RANGE, min_size=1, max_size=3).map(lambda ranges: f"[{','.join(ranges)}]")
OPERAND = st.builds("{}{}{}".format, st.sampled_from(("gpu", "n-", "a1b", "x1")), BRACKET, st.sampled_from(("", "-ib")))
NODESET = st.builds(
    lambda first, more: first + "".join(map("".join, more)),
    OPERAND,
    st.lists(st.tuples(st.sampled_from(",!&^"), OPERAND), max_size=4),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYS = (*config.Settings.__struct_fields__, "state.stale_intervals", "slurm.args", "keys.app.quit", "users.a")


def refused(call: Callable[[], object], error: type[Exception]) -> object:
    """Return what a call returns, None where it is refused by ``error``, whose words are safe to print and encode."""
    try:
        return call()
    except error as caught:
        assert str(caught)
        if isinstance(caught, GpuboardError):
            assert lines(str(caught)) == str(caught)
            str(caught).encode()
        return None


@given(TEXT | NODESET)
@example("gpu[01-1601-1601]x")
@example("gpu[0-9_9]")
@example("a," * 40_000)
@example("[" * 60_000)
@example("1" * 60_000)
@example("a[1-2]" * 8_000)
def test_a_nodeset(text: str) -> None:
    for parse in (nodesets.expand, lambda text: expand_names([text])):
        found = refused(lambda parse=parse: parse(text), UsageError)  # type: ignore[misc]
        assert found is None or 0 < len(found) <= nodesets.NODES_MAX  # type: ignore[arg-type]
    refused(lambda: nodesets.listed(text), ValueError)


@given(NODESET)
def test_a_nodeset_means_what_it_means_to_clustershell(text: str) -> None:
    try:
        meant = [str(name) for name in NodeSet(text)]
    except Exception:
        meant = []
    if meant:
        assert sorted(nodesets.expand(text)) == sorted(meant)
    else:
        with pytest.raises(UsageError):
            nodesets.expand(text)


@given(TEXT, st.booleans())
@example("," * 100_000, True)
@example("0-4095," * 10_000, True)
@example("@" * 100_000, False)
def test_gpus(text: str, whole_nodes: bool) -> None:
    found = refused(lambda: parse_picks(text, whole_nodes=whole_nodes), ValueError)
    assert found is None or len(found) <= PICKS_MAX  # type: ignore[arg-type]
    if not request_form.which(text):
        request_form.request_of({"gpus": text.strip()}, {})


@given(TEXT)
@example("9" * 100_000)
@example("9" * 400 + "GiB")
@example("1s" * 50_000)
def test_numbers(text: str) -> None:
    for parse in (parse_duration, parse_size, parse_number):
        found = refused(lambda parse=parse: parse(text), ValueError)  # type: ignore[misc]
        assert found is None or abs(found) < 2**61  # type: ignore[arg-type]
    found = refused(lambda: parse_whole(text, 1, 99), ValueError)
    assert (found is not None) == bool(re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) and 1 <= int(text) <= 99)
    assert (number(1, 99)(text) == "") == (refused(lambda: parse_whole(text.strip(), 1, 99), ValueError) is not None)


@given(TEXT)
@example("node:" + ",".join(f"a[{n}-99]" for n in range(60)))
@example("mem>" + "9" * 900)
def test_a_filter(text: str) -> None:
    refused(lambda: GPUS.parse(text), QueryError)


@given(TEXT)
def test_a_target(text: str) -> None:
    refused(lambda: parse_target([text]), UsageError)
    refused(lambda: parse_target(["-m", text]), UsageError)


@given(st.dictionaries(st.sampled_from((*MAP, "job")), JSON, max_size=3))
def test_a_rank_map(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "map.json"
    file.write_text(json.dumps(MAP | changes))

    def read() -> None:
        check_rank_map(read_rank_map(file), ["gpu01"], str(file), "cuda")

    refused(read, UsageError)


@given(JSON | st.lists(st.fixed_dictionaries({"name": TEXT, "host": TEXT | st.none()}), max_size=3), st.lists(TEXT))
def test_an_inventory(tmp_path_factory: pytest.TempPathFactory, value: Any, said: list[str]) -> None:
    file = tmp_path_factory.getbasetemp() / "inventory.json"
    file.write_text(json.dumps(value))
    refused(lambda: read_nodes(file, said), UsageError)


@given(st.lists(st.tuples(st.sampled_from(KEYS), JSON), max_size=4), TEXT)
@example([("nodes", "[" * 500)], "nodes = " + "[" * 500)
@example([], "a" + ".a" * 500 + " = 1")
@example([], "'" * 500 + '"' * 501)
def test_settings(tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, Any]], more: str) -> None:
    file = tmp_path_factory.getbasetemp() / "config.toml"
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values) + more
    file.write_bytes(text.encode("utf-8", "surrogateescape" if more.isascii() else "replace"))
    refused(lambda: config.load({"HOME": "/nonexistent"}, {}, file), UsageError)
    try:
        meant = tomllib.loads(file.read_bytes().decode())
    except (ValueError, RecursionError):
        return
    if not re.search(r"[.\[{]", text):  # neither limit can be met
        assert config.parse_toml(file.read_bytes()) == meant


@given(st.sampled_from(config.Settings.__struct_fields__), TEXT)
def test_a_variable(name: str, text: str) -> None:
    refused(lambda: config.load({"HOME": "/nonexistent", f"GPUBOARD_{name.upper()}": text}, {}), UsageError)


@given(TEXT, TEXT)
@example("\x00/*", "gpu*")
@example("Host " + "a " * 20_000, "*a*b")
def test_a_hostfile_and_an_ssh_config(tmp_path_factory: pytest.TempPathFactory, text: str, pattern: str) -> None:
    file = tmp_path_factory.getbasetemp() / "hosts"
    file.write_bytes(text.encode("utf-8", "replace"))
    refused(lambda: look_up(f"hostfile:{file}", "", None), UsageError)
    refused(lambda: look_up(f"ssh_config:{pattern}", str(file), None), UsageError)
    file.write_bytes(f"Host gpu01 {text}\nInclude {text}\n".encode("utf-8", "replace"))
    refused(lambda: look_up(f"ssh_config:{pattern}", str(file), None), UsageError)


@given(st.text("ab", max_size=12), st.text("ab*?", max_size=8))
def test_a_pattern_fits_as_a_regular_expression_would(text: str, pattern: str) -> None:
    regex = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    assert like(text, [pattern]) == bool(re.fullmatch(regex, text))


@given(TEXT)
def test_text_is_split_and_shown_whole(text: str) -> None:
    assert "".join(split_outside(text, ",!")) == text
    assert clean(lines(text)) == clean(clean(lines(text)))


def test_the_message_of_any_error_is_safe(tmp_path: Path) -> None:
    assert str(UsageError("a\x1b[31m\r\nb\udcff\u202e")) == "a[31m \nb\\udcff"
