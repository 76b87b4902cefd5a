"""A node without python3: the script in every shell, and what the client reads from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuboard.agent.proc import COMMAND_LIMIT
from gpuboard.model.reading import Hello, Pushed, Reading, Static
from gpuboard.model.replies import Read
from gpuboard.shellprobe.link import TIMING, ShellLink, ShellTiming
from gpuboard.shellprobe.script import COMMAND, SCRIPT
from gpuboard.transport.base import CallFailed, LinkLost, TransportError
from gpuboard.transport.connector import LocalTransport
from tests.agent import still_there
from tests.smi import FakeSmi
from tests.sshd import children
from tests.waiting import Stopwatch, read_line, until

WHY = "python3 cannot be started there; install python3 (3.6 or later) or set `python` in the config"


class Recorded:
    """A link over the local transport, and its messages."""

    def __init__(self, *, interval_s: float | None = None, timing: ShellTiming = TIMING) -> None:
        self.messages: list[Pushed] = []
        self.error: TransportError | None = None
        self.transport = LocalTransport()
        self.link = ShellLink("n1", WHY, interval_s, self.messages.append, self._ended, timing=timing)
        self.link.attach(self.transport.open("localhost", "shell", self.link, COMMAND))

    def _ended(self, error: TransportError) -> None:
        self.error = error

    def readings(self) -> list[Reading]:
        return [message for message in self.messages if isinstance(message, Reading)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait as a feed does, with calls of the link's ``look``."""

        def there() -> object:
            self.link.look(time.monotonic())
            return condition()

        until(there, f"{what}; {self.error}")

    def reading(self, number: int = 0) -> Reading:
        """Wait for the reading of that number and return it."""
        self.until(lambda: len(self.readings()) > number, f"reading {number}")
        return self.readings()[number]

    def static(self) -> Static:
        return next(message for message in reversed(self.messages) if isinstance(message, Static))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    """nvidia-smi on PATH."""
    fake = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    fake.says("v13-h100-590")
    return fake


@pytest.fixture
def links() -> Iterator[list[Recorded]]:
    made: list[Recorded] = []
    yield made
    for one in made:
        one.link.close()
        one.transport.close()


def open_link(links: list[Recorded], **options: Any) -> Recorded:
    links.append(Recorded(**options))
    return links[-1]


@pytest.mark.parametrize("login", ["sh", "bash", "dash", "zsh", "csh", "tcsh", "fish"])
def test_every_login_shell_starts_it_and_it_ends_with_the_connection(login: str, fake: FakeSmi) -> None:
    if not shutil.which(login):
        pytest.skip(f"{login} is not installed")
    fake.hangs()
    with subprocess.Popen([login, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(SCRIPT + b"00ff\n-q -x\n")
        child.stdin.flush()
        assert [read_line(child) for _ in range(2)] == [b"\n", b"@00ff hello\n"]
        until(fake.calls, "nvidia-smi runs")
        running = children(child.pid)
        assert running
        closed = Stopwatch()
        child.stdin.close()
        assert child.wait(60) == 0
        assert still_there(running) == []
    assert closed.stop() < 2


@pytest.mark.parametrize("still", [b"x=$(sleep 1; exec", b"x=$(exec"], ids=["before", "after"])
def test_it_ends_with_the_connection_also_while_nvidia_smi_is_being_started(fake: FakeSmi, still: bytes) -> None:
    fake.hangs()
    assert SCRIPT.count(b"x=$(exec") == 1
    script = SCRIPT.replace(b"x=$(exec", still)
    with subprocess.Popen(["sh", "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(script + b"00ff\n-q -x\n")
        child.stdin.flush()
        while read_line(child) != b"@00ff messages\n":
            pass
        running = children(child.pid)
        child.stdin.close()
        assert child.wait(60) == 0
        assert still_there(running, 10.0) == []
    assert len(fake.calls()) <= 1  # nothing else was started


@pytest.mark.parametrize("shell", ["dash", "bash", "zsh", "busybox"])
def test_the_lines_are_posix(shell: str, fake: FakeSmi) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    program = {"bash": ["bash", "--posix"], "zsh": ["zsh", "--emulate", "sh"], "busybox": ["busybox", "sh"]}
    line = COMMAND.removeprefix("exec sh -c '").removesuffix("'")
    done = subprocess.run(
        [*program.get(shell, [shell]), "-c", line],
        input=SCRIPT + b"00ff\n-q -x\n",
        capture_output=True,
        timeout=60,
    )
    assert b"@00ff hello\nhostname " in done.stdout
    assert b"@00ff end 0\n" in done.stdout
    assert done.stderr == b""


def test_it_sends_the_messages_of_an_agent(fake: FakeSmi, links: list[Recorded]) -> None:
    listing = (Path(__file__).parent.parent / "data/nvidia-smi/v13-h100-590.xml").read_text()
    fake.prints(listing.replace("<pid>4242<", f"<pid>{os.getpid()}<").replace("<pid>99<", "<pid>2147483000<").encode())
    here = open_link(links)
    reading = here.reading()
    hello = here.messages[0]
    assert isinstance(hello, Hello)
    assert (hello.hostname, hello.uid, hello.user) == (os.uname().nodename, os.getuid(), "root")
    assert hello.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    static = here.static()
    assert (static.source, static.driver, static.cuda) == ("nvidia-smi", "590.44.01", "13.1")
    assert [(gpu.index, gpu.minor, gpu.memory_total) for gpu in static.gpus] == [
        (0, 2, 81559 * 2**20),
        (1, 0, 81559 * 2**20),
    ]
    assert (reading.nvml_error, reading.claims_error, reading.interval_s) == (None, WHY, 0.0)
    assert abs(reading.at - time.time()) < 10
    assert (reading.memory_total or 0) > 2**20
    assert reading.load1 is not None
    ours, hidden = reading.gpus[1].processes or []
    assert reading.gpus[1].loads == []
    assert (ours.pid, ours.uid, ours.user, ours.type) == (os.getpid(), 0, "root", "compute")
    assert ours.name in {"pytest", "python", "python3"}
    assert ours.command == Path("/proc/self/cmdline").read_text().replace("\0", " ").strip()[:COMMAND_LIMIT]
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    boot = float(next(x for x in Path("/proc/stat").read_text().splitlines() if x.startswith("btime")).split()[1])
    assert ours.started == pytest.approx(boot + started, abs=0.02)
    assert (hidden.user, hidden.type, hidden.name) == (None, "graphics", "")


def test_it_reads_on_request_and_refuses_other_calls(fake: FakeSmi, links: list[Recorded]) -> None:
    here = open_link(links)
    here.reading()
    assert here.link.submit("read", {}).result(60, Read) == Read(2)
    fake.holds()
    answers = [here.link.submit("read", {}) for _ in range(3)]
    fake.holds(False)
    assert [answer.result(60, Read).seq >= 3 for answer in answers] == [True] * 3
    assert len(fake.calls()) <= 4
    with pytest.raises(CallFailed, match="python3 cannot be started there") as failed:
        here.link.submit("take", {"lease": "x"}).result(60, Read)
    assert failed.value.kind == "no-python"
    here.link.close()
    with pytest.raises(LinkLost, match="closed"):
        here.link.submit("read", {}).result(60, Read)


def test_a_lost_gpu_is_named_by_the_messages(fake: FakeSmi, links: list[Recorded]) -> None:
    fake.says("v12-lost-535")
    here = open_link(links)
    assert [(gpu.error, gpu.uuid[:6]) for gpu in here.reading().gpus] == [
        (None, "GPU-5e"),
        ("Unknown Error", "unread"),
        (None, "GPU-5e"),
    ]


def test_queries_replace_xml_that_cannot_be_read(fake: FakeSmi, links: list[Recorded]) -> None:
    fake.prints(b"<nvidia_smi_log><gpu>&bomb;</gpu></nvidia_smi_log>")
    fake.answers("csv-old")
    fake.lacks("memory.reserved", "remapped_rows.pending")
    here = open_link(links)
    assert [(gpu.memory_used, gpu.processes) for gpu in here.reading().gpus] == [(0, []), (1204 * 2**20, None)]


def test_an_error_message_of_nvidia_smi_is_reported(fake: FakeSmi, links: list[Recorded]) -> None:
    fake.says("says-mismatch", code=18)
    here = open_link(links)
    reading = here.reading()
    assert reading.nvml_error == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    with pytest.raises(CallFailed, match="version mismatch"):
        here.link.submit("read", {}).result(60, Read)


def test_a_host_without_nvidia_smi_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: list[Recorded]
) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is installed here")
    here = open_link(links)
    until(lambda: here.error, "an end")
    assert here.error is not None
    assert (here.error.kind, here.error.words) == ("no-python", "nor is there nvidia-smi")
    assert here.messages == []


def test_a_slow_nvidia_smi_runs_at_a_longer_interval(fake: FakeSmi, links: list[Recorded]) -> None:
    fake.takes(0.6)
    here = open_link(links, interval_s=0.2)
    began = time.monotonic()
    first = here.reading()
    here.until(lambda: len(fake.calls()) == 2, "a second run")
    assert first.interval_s < time.monotonic() - began < first.interval_s + 20
    assert 0.5 < first.gpus[0].delay_s < 10
    assert first.interval_s > 5.9
    assert (here.reading(len(here.readings())).cpu_percent or 0) >= 0


@pytest.mark.slow
def test_one_that_hangs_is_killed_and_the_last_values_are_sent_with_their_age(
    fake: FakeSmi, links: list[Recorded]
) -> None:
    here = open_link(links, interval_s=0.2, timing=ShellTiming(run_s=3.0, old_s=1.0))
    here.reading()
    fake.hangs()
    here.until(lambda: len(fake.calls()) > 1, "it hangs")
    here.until(lambda: here.readings()[-1].nvml_error, "it was killed")
    dead = here.readings()[-1]
    assert dead.nvml_error == "nvidia-smi: it has been running for 3 s"
    assert dead.gpus[0].delay_s > 3
    late = [reading for reading in here.readings() if reading.gpus[0].delay_s > 1 and not reading.nvml_error]
    assert {reading.gpus[0].utilization for reading in late} == {0}
    fake.hangs(False)

    def fresh() -> bool:
        newest = here.readings()[-1]
        return not newest.nvml_error and newest.gpus[0].delay_s < 2

    here.until(fresh, "it is back")


def test_too_much_output_before_the_first_frame_ends_the_link(links: list[Recorded]) -> None:
    ended: list[TransportError] = []
    noisy = ShellLink("n1", WHY, None, lambda message: None, ended.append)
    noisy.received(b"Welcome\n" * 9000)
    assert ended[0].words == "malformed answer: the node's shell start-up files print more than 64 kB"


def test_readings_come_from_one_thread(fake: FakeSmi, links: list[Recorded]) -> None:
    here = open_link(links, interval_s=0.2)
    threads: set[int] = set()
    here.link._listener = lambda message: threads.add(threading.get_ident())
    here.link.submit("read", {}).result(60, Read)
    here.link.submit("read", {}).result(60, Read)
    assert len(threads) == 1
