"""Helpers for the tests of integrations: skip conditions, loading of frameworks, printed lines, damage to files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.framework_trainings import FrameworkRanks, has_frameworks, launch_frameworks

LONG_WITH_FRAMEWORKS = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(not has_frameworks(), reason="no training frameworks: run `make frameworks`"),
]
"""Marks of a module whose tests train with the frameworks."""


def make_ranks_fixture(*modules: str) -> Callable[[], Iterator[FrameworkRanks]]:
    """Return a fixture of ranks with these modules loaded, which the tests of a module share."""

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[FrameworkRanks]:
        with launch_frameworks(*modules) as launched:
            yield launched

    return ranks


def read_printed(root: Path) -> list[str]:
    """Return the lines that rank 0 of a probe has printed after `> ` in all generations."""
    logs = sorted(root.glob("run-*/log-0"))
    return re.findall(r"^> (.*)$", "\n".join(path.read_text() for path in logs), re.M)


def flip_bit(file: Path) -> None:
    """Flip one bit of the last byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
