"""What tests of real ranks have in common: an agent from which all of them are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.forked_ranks import Farm, farm


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """One for all tests of a process: to load torch takes it seconds of processor time, and a fork none."""
    with farm(tmp_path_factory.mktemp("farm")) as made:
        yield made
