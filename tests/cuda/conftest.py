"""Tests of this folder need a CUDA device. Elsewhere each of them is skipped, and counted as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TORCH_RELEASE = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
REASON = "no CUDA device: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=REASON))
