"""What one node may send: everything that an agent sends, also after a suspend of hours, and no more."""

from __future__ import annotations

import msgspec
import pytest

from gpuboard.cluster.feed import backoff_s
from gpuboard.model.gpu import GpuReading, GpuStatic, Load, MigReading, MigStatic, Process
from gpuboard.model.reading import Claim, Event, GpuDetails, GpuNumbers, Hello, Reading, ReadingDelta, Static
from gpuboard.transport import limits
from gpuboard.transport.limits import Budget, Exceeded, check_line, check_message

MIB = 2**20
PIECE = 32 * 1024  # of an ssh channel


def receive(budget: Budget, size: int, now: float) -> None:
    """Spend the tokens of a message of this size, in the pieces in which it arrives."""
    for start in range(0, size, PIECE):
        budget.spend(min(PIECE, size - start) + limits.PIECE, now)
    budget.spend(limits.DECODED, now)


def test_the_largest_line_each_second_is_allowed() -> None:
    budget = Budget()
    for second in range(100):
        receive(budget, 4 * MIB - PIECE, float(second))


def test_what_was_buffered_for_a_suspended_client_is_allowed() -> None:
    budget = Budget()
    receive(budget, 4096, 0.0)
    receive(budget, 10 * MIB, 3600.0)
    for _ in range(50):
        receive(budget, 4096, 3600.1)


@pytest.mark.parametrize(("size", "a_second"), [(4096, 1000), (MIB, 10), (1, 1000)])
def test_a_flood_is_detected_within_seconds(size: int, a_second: int) -> None:
    budget = Budget()
    with pytest.raises(Exceeded) as caught:
        for number in range(10 * a_second):
            receive(budget, size, number / a_second)
    assert caught.value.kind == "limits"


def gpu(**changes: object) -> GpuReading:
    return msgspec.convert({"uuid": "GPU-0", **changes}, GpuReading)


def reading(*gpus: GpuReading, claims: int = 0) -> Reading:
    claim = Claim(lease="a", uuid="GPU-0", uid=1, owner="a", state="live", since=0.0, until=9.0)
    return Reading(seq=1, at=0.0, interval_s=1.0, gpus=list(gpus), claims=[claim] * claims)


def test_the_numbers_that_are_counted_are_those_that_are_sent() -> None:
    assert limits._DetailsOutline.__struct_fields__ == GpuDetails.__struct_fields__


def test_details_of_a_delta_are_counted_before_they_are_decoded() -> None:
    def sent(*loads: int) -> tuple[ReadingDelta, int]:
        details = msgspec.json.encode([[None, [[1, 2.0, 3]] * count] for count in loads])
        return ReadingDelta(8, 7, 1.0, [GpuNumbers()] * len(loads), msgspec.Raw(details)), len(details)

    check_message(*sent(8191, 1))
    with pytest.raises(Exceeded, match="8193 processes"):
        check_message(*sent(8192, 1))
    with pytest.raises(Exceeded, match="257 GPUs"):
        check_message(*sent(*[40] * 257))
    with pytest.raises(msgspec.DecodeError):
        check_message(ReadingDelta(8, 7, 1.0, details=msgspec.Raw(b'["%s"]' % (b"x" * 8192))), 8196)


PROCESSES = [Process(1, "compute")] * 8192
PARTS = [MigReading("MIG-0")] * 64
STATIC = GpuStatic(0, "GPU-0", "H100", "0")


@pytest.mark.parametrize(
    ("within", "beyond", "words"),
    [
        (reading(*[gpu()] * 256), reading(*[gpu()] * 257), "257 GPUs"),
        (reading(claims=4096), reading(claims=4097), "4097 claims"),
        (reading(gpu(processes=PROCESSES)), reading(gpu(processes=PROCESSES), gpu(processes=[Process(2, "compute")])),
         "8193 processes"),
        (reading(gpu(loads=[Load()] * 8192)), reading(gpu(loads=[Load()] * 8193)), "8193 processes"),
        (reading(gpu(mig=PARTS)), reading(gpu(mig=[*PARTS, MigReading("MIG-1")])), "65 MIG devices of a GPU"),
        (reading(*[gpu(mig=PARTS)] * 16), reading(*[gpu(mig=PARTS)] * 17), "1088 MIG devices"),
        (Static([STATIC] * 256), Static([STATIC] * 257), "257 GPUs"),
        (Static(), Static([msgspec.structs.replace(STATIC, mig=[MigStatic("MIG-0", "1g")] * 65)]), "65 MIG devices"),
        (Static(), Static([msgspec.structs.replace(STATIC, links={f"GPU-{k}": 1 for k in range(1025)})]), "1025 links"),
    ],
)  # fmt: skip
def test_lists_longer_than_any_nodes_are_refused(
    within: Reading | Static, beyond: Reading | Static, words: str
) -> None:
    check_message(within, 1000)
    with pytest.raises(Exceeded, match=f"lists {words}"):
        check_message(beyond, 1000)


@pytest.mark.parametrize("message", [Static(), Hello("n", "b", 1, "a", 2, "3.11"), Event("stderr")])
def test_facts_are_short(message: Static | Hello | Event) -> None:
    check_message(message, MIB)
    with pytest.raises(Exceeded, match="bytes of facts"):
        check_message(message, MIB + 1)


def test_a_long_line_is_counted_before_it_is_decoded() -> None:
    line = msgspec.json.encode({"t": "reading", "gpus": [{"uuid": "GPU-0"}] * 20_000})
    with pytest.raises(Exceeded, match="20000 GPUs"):
        check_line(memoryview(line))
    line = msgspec.json.encode({"t": "reading", "gpus": [{"uuid": "GPU-0", "loads": [[1, 2.0, 3]] * 30_000}]})
    with pytest.raises(Exceeded, match="30000 processes"):
        check_line(memoryview(line))
    for key in ("gpus", "details"):
        line = msgspec.json.encode({"t": "delta", key: [[]] * 100_000})
        with pytest.raises(Exceeded, match="100000 GPUs"):
            check_line(memoryview(line))
    for key in ("gpus", "details", "claims"):  # the last one of two counts for decoders, which make objects of both
        line = b'{"t":"delta","%s":[%s{}],"%s":[{}]}' % (key.encode(), b"{}," * 100_000, key.encode())
        with pytest.raises(Exceeded, match="belong to no GPU"):
            check_line(memoryview(line))
    long = msgspec.json.encode({"t": "reading", "gpus": [{"uuid": "GPU-0", "loads": [[1, 2.0, 3]] * 8_192}] * 30})
    check_line(memoryview(long))
    check_line(memoryview(msgspec.json.encode({"t": "reply", "id": 1, "value": "x" * MIB})))


def test_a_node_beyond_its_limits_is_retried_with_long_back_off() -> None:
    assert 15.0 <= backoff_s(1, "limits") <= 30.0
    assert 150.0 <= backoff_s(9, "limits") <= 300.0
