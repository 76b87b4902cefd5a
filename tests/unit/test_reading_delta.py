"""Readings sent as differences are the readings that were made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuboard.agent.delta import CLAIMS_MOST, DETAILS, NUMBERS, Deltas
from gpuboard.model.decoding import json_decoder
from gpuboard.model.gpu import GpuReading, Sensors
from gpuboard.model.reading import GpuDetails, GpuNumbers, Message, Reading, ReadingDelta, applied

_decoder = json_decoder(Message)
_count = st.none() | st.integers(0, 2**40)
_process = st.builds(lambda pid: {"pid": pid, "type": "compute", "memory": 5}, st.integers(1, 3))
_claim = {"lease": "k1", "uuid": "GPU-0", "uid": 1, "owner": "alice", "state": "live", "from": 1.0, "until": 9.0}


@st.composite
def gpus(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return GPUs as an agent describes them: keys of unknown values are null or missing."""
    return [
        {"uuid": f"GPU-{number}", "processes": processes}
        | draw(st.fixed_dictionaries({}, optional={
            "memory_used": _count, "utilization": _count, "temperature": _count, "power": st.none() | st.floats(0, 900),
            "sensors": st.none() | st.fixed_dictionaries({"sm_clock": _count}), "pcie_generation": _count,
            "error": st.sampled_from([None, "GPU is lost"]), "pcie_width": st.sampled_from([8, 16]),
        }))
        | ({"loads": [[draw(_count), 1.5, None] for _ in processes]} if processes else {})
        for number in range(draw(st.integers(0, 2)))
        for processes in [draw(st.none() | st.lists(_process, max_size=1))]
    ]  # fmt: skip


@given(st.lists(st.tuples(gpus(), st.sampled_from([0, 1, CLAIMS_MOST + 1]), st.sampled_from([None, "no driver"]))))
@settings(max_examples=60, deadline=None)
def test_a_client_has_the_readings_that_the_agent_made(history: list[tuple[Any, int, str | None]]) -> None:
    deltas = Deltas()
    known: Reading | None = None
    for seq, (found, claims, error) in enumerate(history, 1):
        reading = {"t": "reading", "seq": seq, "at": float(seq), "interval_s": 1.0, "gpus": found, "load1": 0.5 * seq,
                   "nvml_error": error, "claims": [dict(_claim, age_s=float(seq))] * claims}  # fmt: skip
        whole = _decoder.decode(json.dumps(reading))
        sent = _decoder.decode(json.dumps(deltas.shortened(reading)))
        assert isinstance(whole, Reading)
        if isinstance(sent, ReadingDelta):
            assert known is not None
            known = applied(sent, known)
        else:
            assert isinstance(sent, Reading)
            known = sent
        assert known == whole


def test_numbers_alone_are_a_delta_to_the_last_whole_reading() -> None:
    deltas = Deltas()
    reading: dict[str, Any] = {
        "t": "reading",
        "seq": 7,
        "at": 1.0,
        "gpus": [{"uuid": "GPU-0", "power": 70.0}, {"uuid": "GPU-1", "sensors": {"fan": 20}}],
        "claims": [],
    }
    assert deltas.shortened(reading) is reading
    for seq in (8, 9):
        loaded = {"uuid": "GPU-1", "sensors": None, "loads": [[5]]}
        moved = dict(reading, seq=seq, gpus=[{"uuid": "GPU-0", "power": 71.5}, loaded], cpu_percent=3.0)
        found: dict[str, Any] = {"t": "delta", "seq": seq, "of": 7, "at": 1.0, "claims": [], "cpu_percent": 3.0}
        assert deltas.shortened(moved) == {
            **found,
            "gpus": [[None, None, None, 71.5], []],
            "details": [[], [None, [[5]]]],
        }
    renamed = dict(reading, seq=10, gpus=[{"uuid": "GPU-1", "power": 71.5}])
    assert deltas.shortened(renamed) is renamed


@pytest.mark.parametrize(
    "details",
    [b'[[{"fan":"fast"}]]', b"[[],[]]", b"7", b'[[null,[["x"]]]]', b'[["\xff"]]', b'{"a":' * 99 + b"1" + b"}" * 99],
)
def test_malformed_details_of_a_delta_are_none(details: bytes) -> None:
    old = Reading(7, 1.0, 1.0, [GpuReading("GPU-0", power=70.0, sensors=Sensors(fan=20))])
    sent = _decoder.decode(b'{"t":"delta","seq":8,"of":7,"at":2.0,"gpus":[[1,2,3,71.5]],"details":%s}' % details)
    assert isinstance(sent, ReadingDelta)
    expected = GpuReading("GPU-0", memory_used=1, utilization=2, temperature=3, power=71.5)
    assert list(applied(sent, old).gpus) == [expected]


def test_the_agent_sends_the_numbers_in_the_order_of_their_type() -> None:
    assert GpuNumbers.__struct_fields__ == NUMBERS
    assert GpuDetails.__struct_fields__ == DETAILS
    assert {*NUMBERS, *DETAILS} < set(GpuReading.__struct_fields__)
