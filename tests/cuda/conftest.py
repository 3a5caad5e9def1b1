"""Tests on one CUDA GPU. They are skipped on machines without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda_device() -> str:
    """The first GPU. It is counted through the driver, so that CUDA stays uninitialized in processes that fork."""
    if torch.cuda.device_count() == 0:
        pytest.skip("no CUDA GPU")
    return "cuda:0"
