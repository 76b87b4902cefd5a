"""What a filter offers while it is typed: keys, values of the scene, and nothing that it would then refuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboard.board.filter.completion import Completion, complete
from gpuboard.board.filter.conditions import GPUS
from gpuboard.board.filter.language import Key, Language, Query, QueryError
from gpuboard.board.filter.matchers import text as named
from tests.board.made import busy, gpu, lease, mig, node, scene

SCENE = scene(
    node("gpu01", [gpu("gpu01", 0), busy("gpu01", 1, "alice", leases=["k3f9"]), busy("gpu01", 2, "albert")]),
    node("gpu02", [mig("gpu02", 0, "free", "busy")]),
    leases=[lease("k3f9", "alice", [("gpu01", 1)])],
)


def offered(key: Key[Any]) -> Iterable[str]:
    if key.offers is None:
        return ()
    return [v for one in SCENE.snapshot.nodes for g in one.gpus for v in key.offers(one, g, SCENE) if v]


def completed(text: str) -> Completion:
    return complete(text, GPUS, offered)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("", ()),
        ("sta", ("state:",)),
        ("-STA", ("-state:",)),
        ("te", ("tensor<", "temp>")),
        ("state:fr", ("state:free",)),
        ("state:free", ()),
        ("state:busy,Re", ("state:busy,reserved",)),
        ("user:al", ("user:albert", "user:alice")),
        ("who:ali", ("who:alice",)),
        ("user:m", ("user:me",)),
        ("user:alice node:", ("user:alice node:gpu01", "user:alice node:gpu02")),
        ("node:gpu[01,0", ()),
        ("model:3", ("model:3g.40gb",)),
        ("flag!=ro", ("flag!=rogue",)),
        ("lease:k", ("lease:k3f9",)),
        ("what:x", ()),
        ('"state:fr', ()),
        ("'it is' user:ali", ("'it is' user:alice",)),
    ],
)  # fmt: skip
def test_what_is_offered(text: str, texts: tuple[str, ...]) -> None:
    assert completed(text).texts == texts


def test_every_key_is_named_before_anything_is_typed_and_a_number_is_explained() -> None:
    assert {name.rstrip(":<>") for name in completed("").names} == set(GPUS.keys)
    assert completed("state:free ").names == completed("").names
    assert completed("mem>4") == Completion(hint="the memory in use, mem>40GiB or mem>50%")


def test_a_value_with_blanks_is_quoted() -> None:
    pets: Language[[str]] = Language(
        {"name": Key("a name", 1, named(lambda pet: (pet,)), offers=lambda pet: (pet,))}, lambda pet: (pet,)
    )

    def found(text: str) -> tuple[str, ...]:
        return complete(text, pets, lambda _: ("big, bad wolf", "bird")).texts

    assert found("name:bi") == ('name:"big, bad wolf"', "name:bird")
    assert found('name:"big, ') == ('name:"big, bad wolf"',)
    query: Query[[str]] = pets.parse(found("name:big")[0])
    assert [pet for pet in ("big, bad wolf", "bird") if query.matches(pet)] == ["big, bad wolf"]


FILTERS = st.lists(
    st.sampled_from(
        ["state", "user", "node", "mem", ":", "=", ">", "!=", ",", "-", '"', "'", "[", " ", "fr", "al", "?"]
    )
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@given(FILTERS)
def test_any_text_can_be_completed_and_what_is_offered_keeps_the_beginning(text: str) -> None:
    found = completed(text)
    for candidate in found.texts:
        assert candidate.casefold().startswith(text.casefold()) or candidate.endswith(('"', "'")) or '"' in text


@given(FILTERS)
def test_taking_what_is_offered_makes_no_valid_filter_invalid(text: str) -> None:
    try:
        GPUS.parse(text)
    except QueryError:
        return
    for candidate in completed(text).texts:
        if candidate[-1] not in ":<>":  # a key is not a term yet
            GPUS.parse(candidate)
