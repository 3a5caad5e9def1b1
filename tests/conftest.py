"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import hypothesis
import pytest

from tests.postgres_server import PostgresServer

# Hundreds of processes start from the same sources: the first ones compile them for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# A suite that runs in the background inherits an ignored SIGINT, and so do the processes that it tests with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
WAITING_FOLDERS = ("e2e", "kubernetes", "contract", "console")
"""Folders whose tests start processes and wait for them."""
TEST_TIMEOUT_S, REPEAT_S = 900.0, 30.0
"""A test that hangs fails after the timeout. The alarm repeats in case its teardown hangs too."""

# The duration of an example depends on what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long variants (make test-full)")


def pytest_runtest_teardown() -> None:
    """Forget the hardware that services of the test described. It is state of the process."""
    if "scheduler.solver.profiles.fleet_hardware" in sys.modules:
        from scheduler.domain.hardware import FleetHardware
        from scheduler.solver.profiles.fleet_hardware import use_fleet_hardware

        use_fleet_hardware(FleetHardware())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = _interleave(items, getattr(config, "workerinput", {"workercount": 1})["workercount"])
    if config.getoption("--full"):
        return
    skipped = pytest.mark.skip(reason="long variant: run with --full (make test-full)")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(skipped)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def fail(_number: int, _frame: object) -> None:
        pytest.fail(f"{item.nodeid} did not end within {TEST_TIMEOUT_S:g} s")

    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, TEST_TIMEOUT_S, REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of injected faults, also if all tests pass: a simulation without faults would prove little."""
    counts = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "faults"
    ]
    if counts:
        terminalreporter.section("faults injected")
        for line in sorted(counts):
            terminalreporter.write_line(line)


def _interleave(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order the tests for xdist's work stealing: each process begins with its share of the waiting tests.

    A process gets one of `processes` equal parts and steals from the end of another's once it is done with its own.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [file for file in files if file.relative_to(HERE).parts[0] in WAITING_FOLDERS]
    others = (item for file in files if file not in waiting for item in files[file])
    ordered: list[pytest.Item] = []
    for number in range(processes):
        share = [item for file in waiting[number::processes] for item in files[file]]
        ordered += [*share, *islice(others, max(0, len(items) // processes - len(share)))]
    return [*ordered, *others]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    yield from _run_postgres()


@pytest.fixture
def disposable_postgres() -> Iterator[PostgresServer]:
    """A server for one test alone, which kills it."""
    yield from _run_postgres()


def _run_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def restored_settings() -> Iterator[None]:
    """Undo what a command set in this process for its children: EBBTIDE_ variables and the umask."""
    before = {name: value for name, value in os.environ.items() if name.startswith("EBBTIDE_")}
    os.umask(umask := os.umask(0))
    yield
    os.umask(umask)
    for name in [name for name in os.environ if name.startswith("EBBTIDE_")]:
        del os.environ[name]
    os.environ.update(before)
