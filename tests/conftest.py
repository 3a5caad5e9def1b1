"""Options and fixtures of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long variants of seeded tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    long = pytest.mark.skip(reason="long variant: run with --full (make test-full)")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(long)
