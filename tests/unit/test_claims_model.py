"""The claim protocol in every order of its steps: three takers, releases, lapses, late keepers, deaths, full disks."""

from __future__ import annotations

import functools
import inspect
import os
import types

import pytest

from gpuboard.agent.claims import protocol as claims_protocol
from tests.unit.claims_model import Checker, Script, Violation, World

TAKE, TAKE_RELEASE, WHOLE_LIFE = ("take",), ("take", "release"), ("take", "touch", "release")


def taker(number: int, *ops: str) -> Script:
    """Return one of three takers of two GPUs each; any two want one GPU both."""
    return Script("abc"[number] * 2, (f"G{number}", f"G{(number + 1) % 3}"), ops)


def keeper(*ops: str) -> Script:
    """Return a process that holds G0 and G1 from the start."""
    return Script("kk", ("G0", "G1"), ops, holds=True)


THREE = (taker(0, *TAKE_RELEASE), taker(1, *TAKE_RELEASE), taker(2, *TAKE_RELEASE))
TWO_AFTER = (taker(1, *TAKE), taker(2, *TAKE))

# 89 s: expired for its owner, not yet for others; 2 s more, or 100 s at once: expired for all.
WORLDS = {
    "three takers, one dies, or a disk is full, or both, the lock held by a hostile user": World(
        THREE, deaths=1, faults=1
    ),
    "three takers that start over": World(THREE, patient=True, deaths=1, attempts=2),
    "two takers that start over at once": World(THREE[:2], deaths=1, attempts=3),
    "three takers with the lock, one keeps alive, time passes": World(
        (taker(0, *WHOLE_LIFE), *THREE[1:]), ticks=(100,), deaths=1, hostile_lock=False
    ),
    "two whole lives, time passes": World((taker(0, *WHOLE_LIFE), taker(1, *WHOLE_LIFE)), ticks=(100,), deaths=1),
    "a keeper wakes late, two take": World((keeper("touch"), *TWO_AFTER), ticks=(100,), deaths=1),
    "a keeper wakes just too late": World((keeper("touch", "touch", "release"), THREE[1]), ticks=(89, 2), deaths=1),
    "renewed too late": World((keeper("renew", "release"), THREE[1]), ticks=(89, 2), deaths=1),
}


@functools.cache
def check(protocol: types.ModuleType, world: World) -> Checker:
    """Explore ``world`` with a protocol."""
    checker = Checker(protocol, world)
    checker.run()
    return checker


@pytest.mark.parametrize("name", WORLDS)
def test_every_order(name: str) -> None:
    """No GPU has two holders, a reported lease is complete, a failed take leaves nothing, disputes are visible."""
    checker = check(claims_protocol, WORLDS[name])
    print(f"{name}: {checker.states} states, {len(checker.endings)} endings")
    assert checker.states > 100


@pytest.mark.skipif(not os.environ.get("GPUBOARD_TEST_LONG"), reason="a minute: set GPUBOARD_TEST_LONG=1")
def test_three_takers_while_time_passes() -> None:
    takers = tuple(taker(number, *TAKE) for number in range(3))
    checker = check(claims_protocol, World(takers, ticks=(100,)))
    print(f"{checker.states} states")
    assert checker.states > 100_000


def test_one_taker_succeeds() -> None:
    """No process dies, the lock is useless, all collide: a taker that retries alone succeeds within two attempts."""
    checker = check(claims_protocol, WORLDS["three takers that start over"])
    assert all(any(ending) for ending in checker.endings), checker.endings
    assert (True, True, True) in checker.endings


def test_the_lock_prevents_collisions() -> None:
    """One attempt suffices for one taker, and every refusal names a lease that its taker got (checked by Checker)."""
    checker = check(claims_protocol, World(THREE, hostile_lock=False))
    assert all(any(ending) for ending in checker.endings), checker.endings


# What the checker must be able to see: a protocol without each of its safeguards, and a world that shows it.
MUTANTS: dict[str, tuple[str | World, ...]] = {
    "no second read": (
        "in_the_way = [x for x in after if any(rules.contradicts(x, y) for y in mine)]",
        "in_the_way = []",
        World(THREE[:2]),
    ),
    "a part is kept": ("if taken is None:", "if taken is False:", World(THREE[:2])),
    "a late keeper looks neither before nor after": (
        'alive = all(x.state == "live" for x in own)\n        for',
        "alive = True\n        for",
        "return there and not (yield from _may_have_expired(one))",
        "return there",
        World((keeper("touch"), taker(1, *TAKE)), ticks=(100,)),
    ),
    "a late keeper does not look again": (
        "return there and not (yield from _may_have_expired(one))",
        "return there",
        World((keeper("touch"), taker(1, *TAKE)), ticks=(100,)),
    ),
    "a late renewal does not look again": (
        "alive = alive and not (yield from _may_have_expired(one))",
        "alive = True",
        World((keeper("renew"), taker(1, *TAKE)), ticks=(100,)),
    ),
    "a taker that was held up goes on": (
        "now.up - clock.up >= HURRY_S or ",
        "",
        World((taker(0, *TAKE), taker(1, *TAKE)), ticks=(100,)),
    ),
    "a full disk leaves a part": (
        "except OSError as error:\n            yield from withdraw(published)",
        "except OSError as error:",
        World(THREE[:2], faults=1),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_detects_a_fault(name: str) -> None:
    *edits, world = MUTANTS[name]
    assert isinstance(world, World)
    source = inspect.getsource(claims_protocol)
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert source.count(str(old)) == 1
        source = source.replace(str(old), str(new))
    mutant = types.ModuleType("mutant")
    exec(compile(source, "mutant.py", "exec"), mutant.__dict__)
    check(claims_protocol, world)
    with pytest.raises(Violation):
        check(mutant, world)
