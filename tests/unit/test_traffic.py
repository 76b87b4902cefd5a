"""The traffic of a host's physical interfaces."""

from __future__ import annotations

from pathlib import Path

from gpuboard.agent.traffic import Traffic

HEAD = "Inter-|   Receive |  Transmit\n face |bytes packets ...\n"


def line(name: str, received: int, sent: int) -> str:
    return f"{name:>6}: {received} 5 0 0 0 0 0 0 {sent} 7 0 0 0 0 0 0\n"


class Host:
    """A /proc and a /sys with interfaces; time goes by a second a reading."""

    def __init__(self, root: Path, *physical: str) -> None:
        self.root = root
        (root / "net").mkdir()
        for name in physical:
            (root / "class/net" / name / "device").mkdir(parents=True)
        self.seconds = 100.0
        self.traffic = Traffic(str(root), str(root), lambda: self.seconds)

    def read(self, text: str, after_s: float = 1.0) -> tuple[float | None, float | None]:
        """Return what is received and sent, bytes per second."""
        self.seconds += after_s
        (self.root / "net/dev").write_text(HEAD + text)
        found = self.traffic.reading()
        return found["net_received"], found["net_sent"]


def test_physical_interfaces_count_and_no_bytes_count_twice(tmp_path: Path) -> None:
    host = Host(tmp_path, "eth0", "eth1")
    first = [("lo", 10, 10), ("eth0", 1000, 500), ("eth1", 0, 0), ("bond0", 1000, 500), ("veth1", 7, 7)]
    assert host.read("".join(line(*one) for one in first)) == (None, None)
    later = [("lo", 10**9, 10**9), ("eth0", 3000, 600), ("eth1", 50, 0), ("bond0", 3050, 600), ("veth1", 10**6, 7)]
    assert host.read("".join(line(*one) for one in later), 2.0) == (1025.0, 50.0)
    assert host.read("", 0.1) == (1025.0, 50.0)  # too soon to measure
    assert host.read("") == (None, None)


def test_an_interface_that_is_new_or_was_reset_counts_from_the_next_reading_on(tmp_path: Path) -> None:
    host = Host(tmp_path, "eth0", "ib0")
    assert host.read(line("eth0", 5000, 5000)) == (None, None)
    assert host.read(line("eth0", 100, 5100) + line("ib0", 10**12, 10**12)) == (0.0, 100.0)
    assert host.read(line("eth0", 200, 5100) + line("ib0", 10**12 + 50, 10**12)) == (150.0, 0.0)


def test_where_nothing_is_physical_or_readable_the_traffic_is_unknown(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for text in (line("eth0", 1, 1), line("eth0", 2, 2), "garbage", "eth0: x y\n", "\xff" * 100):
        assert host.read(text) == (None, None)
    assert Traffic(str(tmp_path / "none")).reading() == {"net_received": None, "net_sent": None}


def test_this_machine() -> None:
    assert set(Traffic().reading()) == {"net_received", "net_sent"}
