import json
from pathlib import Path
from typing import Any

import torch

from scheduler.trainer.training_state import Ledger, compute_state_digest


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_rank_writes_its_samples_and_rank_0_the_losses(tmp_path: Path) -> None:
    for rank in (0, 1):
        ledger = Ledger(tmp_path / "ledger", generation=3, rank=rank)
        ledger.record_step(1, samples=[rank, rank + 2], loss=4.5)
        ledger.record_step(2, samples=[rank + 4, rank + 6], loss=4.25)
        ledger.record_state(2, "saved", digest="d1")
    assert _lines(tmp_path / "ledger" / "samples-g3-r1.jsonl") == [
        {"step": 1, "samples": [1, 3]},
        {"step": 2, "samples": [5, 7]},
    ]
    assert _lines(tmp_path / "ledger" / "losses-g3.jsonl") == [{"step": 1, "loss": 4.5}, {"step": 2, "loss": 4.25}]
    assert [line["event"] for line in _lines(tmp_path / "ledger" / "states-g3.jsonl")] == ["saved"]


def test_without_a_directory_nothing_is_kept() -> None:
    ledger = Ledger(None, generation=0, rank=0)
    ledger.record_step(1, samples=[1], loss=1.0)
    assert not ledger.is_enabled


def test_a_digest_tells_names_shapes_precisions_and_bits_apart() -> None:
    ones = torch.ones(4)
    nudged = ones.clone()
    nudged[2] += 1e-7
    states: list[dict[str, Any]] = [
        {"a": ones},
        {"b": ones},
        {"a": ones.view(2, 2)},
        {"a": ones.double()},
        {"a": nudged},
        {"a": 1.0},
    ]
    assert len({compute_state_digest(state) for state in states}) == len(states)
    assert compute_state_digest({"a": ones, "b": nudged}) == compute_state_digest(
        {"b": nudged.clone(), "a": ones.clone()}
    )
