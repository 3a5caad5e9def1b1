"""Checkpoints of tensors on a GPU: what kernels still compute is saved, and each device gets its tensors back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.checkpoints import load_newest_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COUNT, LENGTH = 12, 1 << 20


def _make_state(value: float) -> dict[str, Any]:
    tensors = {f"gpu{number}": torch.full((LENGTH,), value + number, device="cuda") for number in range(COUNT)}
    half = torch.full((37, 5), value, device="cuda", dtype=torch.bfloat16).t()
    return {**tensors, "half": half, "host": torch.full((300_000,), value), "step": int(value)}


def test_state_is_saved_as_pending_kernels_leave_it(tmp_path: Path) -> None:
    state, stream = _make_state(0.0), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # About 0.3 s, after which the tensors change.
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        for number in range(COUNT):
            state[f"gpu{number}"].fill_(5.0 + number)
        save_checkpoint({**state, "step": 5}, tmp_path, step=5)
    loaded = _make_state(1.0)
    assert load_newest_checkpoint(loaded, tmp_path) == 5
    expected = {**state, "step": 5}
    wrong = [
        name
        for name, value in loaded.items()
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name]))
    ]
    assert wrong == []
    assert {name: value.device.type for name, value in loaded.items() if name in ("gpu0", "half", "host")} == {
        "gpu0": "cuda",
        "half": "cuda",
        "host": "cpu",
    }
