"""Fixtures for tests with real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rank_launcher import RankLauncher, launch_ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankLauncher]:
    """Launch ranks from one process per test process. Loading torch takes seconds of CPU time, a fork does not."""
    with launch_ranks(tmp_path_factory.mktemp("agent")) as launcher:
        yield launcher
