"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import hypothesis
import pytest

from tests.postgres_server import PostgresServer

# Hundreds of processes are started here from the same sources: the first ones compile them for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# Who starts a suite in the background has it ignore Ctrl-C, and with it all processes that it starts: some are tested
# on how they end at one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
LONG = ("e2e", "kubernetes", "contract")
"""Folders whose tests start processes and wait for them."""
LIMIT_S, AGAIN_S = 900.0, 30.0
"""A test that waits for ever fails after that time, and is told again where its own end waits for ever too."""

# How long an example takes says nothing of what is tested, and much of what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long variants of seeded tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = _spread(items, getattr(config, "workerinput", {"workercount": 1})["workercount"])
    if config.getoption("--full"):
        return
    long = pytest.mark.skip(reason="long variant: run with --full (make test-full)")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def end(_number: int, _frame: object) -> None:
        pytest.fail(f"{item.nodeid} is not over within {LIMIT_S:g} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the counts of injected faults also when all is well: a simulation without faults would prove little."""
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


def _spread(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Each process of xdist gets one of so many equal parts, and takes from the end of another's when it has done its
    own: so each part begins with its share of the long tests, and ends with short ones."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [file for file in files if file.relative_to(HERE).parts[0] in LONG]
    short = (item for file in files if file not in long for item in files[file])
    spread: list[pytest.Item] = []
    for number in range(processes):
        share = [item for file in long[number::processes] for item in files[file]]
        spread += [*share, *islice(short, max(0, len(items) // processes - len(share)))]
    return [*spread, *short]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    yield from _running_postgres()


@pytest.fixture
def mortal_postgres() -> Iterator[PostgresServer]:
    """For one test alone, which kills it."""
    yield from _running_postgres()


def _running_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    """Commands that are run in this process set what they hand on to others; no later test is to find it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("EBBTIDE_")}
    yield
    for name in [name for name in os.environ if name.startswith("EBBTIDE_")]:
        del os.environ[name]
    os.environ.update(before)
