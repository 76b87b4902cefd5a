"""No text that nvidia-smi could print makes its readers raise anything but Bad, or shows a busy GPU as free."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuboard.agent.smi import parse as smi
from gpuboard.agent.smi import values as value
from gpuboard.agent.smi import xml as smi_xml
from tests.unit.test_smi import FORGED, state

DATA = Path(__file__).parent.parent / "data" / "nvidia-smi"
RECORDED = {path.name: path.read_bytes() for path in sorted(DATA.glob("*.xml"))}
ROWS = {path.name: path.read_bytes() for path in sorted(DATA.glob("*.csv"))}
APPS = (DATA / "csv-h100-580.apps").read_bytes()

ODD = st.sampled_from([
    "N/A", "[N/A]", "[Not Supported]", "ERR!", "[GPU is lost]", "[Unknown Error]", "0", "0 MiB", "-1", "1e9", "0x0",
    "NaN", "None", "Default", "Disabled", "No devices were found", "\0", "\n", ", ", '"', FORGED,
    "Unable to determine the device handle for GPU1: 0000:44:00.0: Unknown Error\n",
    "<processes></processes>", "</processes><processes>", "<process_name>", "</process_name>", "<supported_clocks>",
    "</supported_clocks>", "<gpu>", "</gpu>", "<nvidia_smi_log>", "</nvidia_smi_log>", "<uuid>",
    "<!--", "-->", "<![CDATA[", "]]>", "&amp;", "&#48;", "GPU-5eed0001-0000-4000-8000-000000000001",
])  # fmt: skip
TEXT = st.one_of(ODD, st.text(max_size=40), st.lists(ODD, max_size=6).map("".join))


def read_xml(data: bytes, messages: bytes = b"") -> smi.Listing | None:
    try:
        listing = smi_xml.read_xml(data, messages)
    except smi.Bad as bad:
        assert str(bad)
        return None
    listing.number({})
    return listing


def read_csv(rows: bytes, apps: bytes) -> smi.Listing | None:
    try:
        listing = smi.read_csv(rows, apps, smi.FIELDS)
    except smi.Bad as bad:
        assert str(bad)
        return None
    listing.number({})
    return listing


def free(listing: smi.Listing | None) -> set[str]:
    """Return the UUIDs of the GPUs that would be shown as free; everything must fit the wire's types meanwhile."""
    found = listing.gpus if listing else []
    indexes = [gpu.index for gpu in found]
    assert len(set(indexes)) == len(indexes)
    return {gpu.uuid for gpu in found if state(gpu)[0] == "free"}


@given(st.binary(max_size=2000), st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes, more: bytes) -> None:
    assert free(read_xml(data, more)) == set()
    assert free(read_xml(b"<nvidia_smi_log>" + data + b"</nvidia_smi_log>")) == set()
    free(read_csv(data, more))


@settings(max_examples=150)
@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_text_put_in_anywhere_frees_no_gpu(name: str, data: st.DataObject) -> None:
    recorded = RECORDED[name]
    at = data.draw(st.integers(0, len(recorded)))
    text = data.draw(TEXT).encode("utf-8", "surrogatepass")
    assert free(read_xml(recorded[:at] + text + recorded[at:])) <= free(read_xml(recorded))


@settings(max_examples=80)
@given(TEXT)
@example(FORGED)
def test_no_name_of_a_process_frees_a_gpu(name: str) -> None:
    recorded = RECORDED["v13-h100-590.xml"]
    forged = recorded.replace(b"/opt/conda/bin/python", name.encode("utf-8", "surrogatepass"))
    assert free(read_xml(forged)) <= {"GPU-5eed0001-0000-4000-8000-000000000000"}


@settings(max_examples=120)
@given(st.sampled_from(sorted(ROWS)), TEXT, st.data())
def test_text_put_into_the_queries_frees_no_gpu(name: str, text: str, data: st.DataObject) -> None:
    rows = ROWS[name]
    at = data.draw(st.integers(0, len(rows)))
    put = text.encode("utf-8", "surrogatepass")
    assert free(read_csv(rows[:at] + put + rows[at:], APPS)) <= free(read_csv(rows, APPS))
    at = data.draw(st.integers(0, len(APPS)))
    assert free(read_csv(rows, APPS[:at] + put + APPS[at:])) <= free(read_csv(rows, APPS))


@given(TEXT)
def test_no_field_makes_its_reader_raise(text: str) -> None:
    number, size, decimal = value.whole(text), value.size(text), value.decimal(text)
    assert all(found is None or 0 <= found < 2**63 for found in (number, size, decimal))
    value.yes(text), value.compute_mode(text), value.bitmask(text), value.recovery(text)
    assert value.pci_address(text) == "" or len(value.pci_address(text)) >= 16
    assert value.uuid(text) in {"", value.plain(text)}
    for found in smi.without_handle(text):
        assert found.values["error"]
    assert smi.complaint(text)
