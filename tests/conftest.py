"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.postgres_server import PostgresServer

# Hundreds of processes are started here from the same sources: the first ones compile them for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# How long an example takes says nothing of what is tested, and much of what else the machine does.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long variants of seeded tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    long = pytest.mark.skip(reason="long variant: run with --full (make test-full)")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(long)


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
