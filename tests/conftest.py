"""Fixtures for all tests, and a summary of the requirements that this machine lacks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.workermanage import WorkerController

from gpuboard.board.terminal.gc import calm
from tests import nodes as test_nodes
from tests import slurm as test_slurm

gc.disable()  # until all tests are collected (below): a fifth of that time

# Without a network torch warns on stderr about addresses without a name: keep stderr comparable there.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# hypothesis limits examples to 200 ms and also the time to draw them; both depend on the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

pytest_plugins = ["tests.integration.here"]  # the fixture `here`
FIRST = """
    test_storm.py test_slurm_faults_jobs.py test_sizes.py test_transport_conformance.py test_slurm_inside.py
    test_dialogs_mouse.py test_launch_nodes.py test_keeper_folder.py test_screenshots.py test_slurm_keeper.py
    test_ranks_torch.py test_srun.py test_launching.py test_slurm_faults.py test_slurm_allocate.py test_reserve.py
    test_stalls.py
"""  # the longest files; of those, ones that mostly wait in turn with ones that mostly compute
UNTRIED = pytest.StashKey[list[set[str]]]()  # of each process: the board's actions that its tests did not run

# pytest-xdist sets COLUMNS in its workers; programs started by tests would use it as their own width.
os.environ.pop("COLUMNS", None)

# A run in the background, or under nohup, ignores these signals, and programs started by tests would inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session")
def started_nodes() -> Iterator[test_nodes.Cluster]:
    """The test nodes, started once; tests use ``nodes``."""
    lacking = test_nodes.missing()
    if lacking:
        pytest.skip(f"needs {lacking} for the test nodes")
    cluster = test_nodes.Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def nodes(started_nodes: test_nodes.Cluster) -> test_nodes.Cluster:
    """The test nodes, reset: see tests/nodes.py."""
    started_nodes.reset()
    return started_nodes


@pytest.fixture(scope="module")
def started_slurm(started_nodes: test_nodes.Cluster) -> Iterator[test_slurm.SlurmCluster]:
    """Slurm's requirements on the test nodes, for one module; tests use ``slurm``."""
    lacking = test_slurm.missing()
    if lacking:
        pytest.skip(f"needs {lacking} for Slurm on the test nodes")
    cluster = test_slurm.SlurmCluster(started_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(
    started_slurm: test_slurm.SlurmCluster, nodes: test_nodes.Cluster, request: pytest.FixtureRequest
) -> test_slurm.SlurmCluster:
    """Slurm without jobs on the test nodes, which are reset too: see tests/slurm.py."""
    started_slurm.configure(**getattr(request, "param", {}))
    return started_slurm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first, so that parallel workers end at about the same time.

    Sorting by file name mixes tests that compute (of the board) with tests that wait (of nodes).
    """
    order = (*FIRST.split(), "board security integration", "gpu")

    def place(item: pytest.Item) -> tuple[int, str]:
        folder, name = item.path.parts[-2:]
        first = next((k for k, words in enumerate(order) if {folder, name} & {*words.split()}), len(order))
        return first, name

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collect cycles seldom, as the board does: with Python's thresholds a third of its tests' CPU time is for that."""
    calm(1000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.hookimpl(optionalhook=True)  # the hook exists only with xdist
def pytest_testnodedown(node: WorkerController) -> None:
    """Take over what a worker knows of the board's actions (tests/board/conftest.py)."""
    untried = getattr(node, "workeroutput", {}).get("untried")
    if untried is not None:
        node.config.stash.setdefault(UNTRIED, []).append(set(untried))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail if all tests of the board have passed, but no process ran some action."""
    if exitstatus == pytest.ExitCode.OK and untried(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    gc.collect()
    gc.freeze()  # pytest and Python's end collect ten times more


def untried(config: pytest.Config) -> list[str]:
    """Return the board's actions that no process has run; none unless all tests of the board were run."""
    return sorted(set.intersection(*config.stash.get(UNTRIED, [set()])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print at the end, in one line per reason, how many tests were skipped, and the untried actions."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[reason.removeprefix("Skipped: ")] += 1
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"not run here: {count} ({reason})")
    for action in untried(terminalreporter.config):
        terminalreporter.write_line(f"FAILED: no test of the board ran the action {action}", red=True)
