"""Fixtures of tests that start real supervisors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.runs import TestMachine, create_machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[TestMachine]:
    yield from create_machine(tmp_path)
